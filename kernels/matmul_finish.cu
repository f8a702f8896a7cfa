/* matmul_finish.cu: bias, activation and beta on finished products, where cuBLASLt has no such
 * combination; see matmul_cublas.h.  Formulas: runtime/pg.h. */
#include "common.cuh"
#include "matmul_cublas.h"

enum { THREADS = 256, ROWS_MOST = 65535 /* of a grid's second side */ };

template <typename R> __device__ __forceinline__ R activate(R v, int epilogue) {
    if (epilogue == PG_EPILOGUE_GELU) return v * ((R)0.5 + (R)0.5 * erf(v * (R)0.70710678118654752440));
    if (epilogue == PG_EPILOGUE_GELU_TANH) {
        const R root_2_pi = (R)0.79788456080286535588; /* sqrt(2 / pi) */
        return v * ((R)0.5 + (R)0.5 * tanh(root_2_pi * (v + (R)0.044715 * v * v * v)));
    }
    return v;
}

/* B is the bias's type, T that of all else.  Grid: columns by rows of all matrices; a thread takes
 * W columns a turn.  z may be c or aux, so none of the three is __restrict__. */
template <typename T, typename B, int W>
__global__ void __launch_bounds__(THREADS)
    finish_kernel(T *c, const T *z, T *aux, const B *bias, int64_t batch, int64_t m, int64_t n,
                  int64_t ld, int64_t stride, int epilogue, real<T> beta) {
    for (int64_t row = blockIdx.y; row < batch * m; row += gridDim.y) {
        int64_t start = row / m * stride + row % m * ld;
        for (int64_t j = grid_thread() * W; j < n; j += grid_threads() * W) {
            real<T> v[W] = {}, old[W];
            if (z) load<T, W>(v, z + start + j);
#pragma unroll
            for (int k = 0; k < W; k++)
                if (bias) v[k] += (real<T>)to_real(bias[j + k]);
            if (aux) store<T, W>(aux + start + j, v);
#pragma unroll
            for (int k = 0; k < W; k++) v[k] = activate(v[k], epilogue);
            if (beta != 0) {
                load<T, W>(old, c + start + j);
#pragma unroll
                for (int k = 0; k < W; k++) v[k] += beta * old[k];
            }
            store<T, W>(c + start + j, v);
        }
    }
}

template <typename T, typename B>
static void finish(void *c, const void *z, void *aux, const pg_gemm_args *g, const void *bias,
                   int epilogue, double beta, pg_stream s) {
    constexpr int64_t wide = 16 / (int64_t)sizeof(T);
    int even = g->n % wide == 0 && g->ldc % wide == 0 && (g->batch == 1 || g->stride_c % wide == 0);
    CUDA_WIDE(even && cuda_aligned(c, z, aux), T, {
        unsigned across = (unsigned)pg_min64((g->n + THREADS * W - 1) / (THREADS * W), 1024);
        unsigned down = (unsigned)pg_min64(g->batch * g->m, ROWS_MOST);
        finish_kernel<T, B, W><<<dim3(across, down), THREADS, 0, (cudaStream_t)s>>>(
            (T *)c, (const T *)z, (T *)aux, (const B *)bias, g->batch, g->m, g->n, g->ldc,
            g->stride_c, epilogue, (real<T>)beta);
    })
}

extern "C" int cuda_gemm_finish(void *c, const void *z, void *aux, const pg_gemm_args *g,
                                const void *bias, int epilogue, double beta, pg_stream s) {
    if (g->dtype == g->dtype_c) {
        CUDA_FLOATING("matmul", g->dtype, (finish<T, T>(c, z, aux, g, bias, epilogue, beta, s)))
    } else { /* the core lets only half types through, into f32 */
        CUDA_FLOATING("matmul", g->dtype, (finish<float, T>(c, z, aux, g, bias, epilogue, beta, s)))
    }
    return cuda_launched("matmul");
}

template <typename R>
__global__ void scalars_kernel(R *out, double alpha, double beta, const float *scale_a,
                               const float *scale_b) {
    double scale = (scale_a ? (double)*scale_a : 1.0) * (scale_b ? (double)*scale_b : 1.0);
    out[0] = (R)(alpha * scale);
    out[1] = (R)beta;
}

extern "C" int cuda_gemm_scalars(void *scalars, const pg_gemm_args *g, double beta, pg_stream s) {
    if (g->dtype == PG_F64)
        scalars_kernel<<<1, 1, 0, (cudaStream_t)s>>>((double *)scalars, g->alpha, beta, g->scale_a,
                                                     g->scale_b);
    else
        scalars_kernel<<<1, 1, 0, (cudaStream_t)s>>>((float *)scalars, g->alpha, beta, g->scale_a,
                                                     g->scale_b);
    return cuda_launched("matmul");
}
