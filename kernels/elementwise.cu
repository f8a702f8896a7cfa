/* elementwise.cu: functions of one tensor and of two, their slopes, and y = alpha x + beta y.
 *
 * All go over packs of 16 bytes in a grid-stride loop of 256 threads a block; the kind is looked at
 * once a pack.  exp, tanh, erf are CUDA's accurate ones, but in the slope of gelu_tanh, which is
 * bound by memory only with exp_for (rows.cuh).  Bytes moved: each input and output once, and y
 * once more where it is added to. */
#include "rows.cuh"

#define THREADS 256

/* ---- one tensor ---- */
template <int kind, typename R> __device__ __forceinline__ R value(R x) {
    const R root_half = (R)0.70710678118654752440, a = (R)0.044715;
    const R root_2_pi = (R)0.79788456080286535588; /* sqrt(2 / pi) */
    switch (kind) {
    case PG_RELU: return x < 0 ? 0 : x; /* a NaN passes */
    case PG_SILU: return x / (1 + exp(-x));
    case PG_GELU: return (R)0.5 * x * erfc(-x * root_half); /* erfc: no loss where erf nears -1 */
    case PG_GELU_TANH: return x / ((R)1 + exp((R)-2 * root_2_pi * (x + a * x * x * x)));
    case PG_TANH: return tanh(x);
    case PG_SIGMOID: return 1 / (1 + exp(-x));
    case PG_EXP: return exp(x);
    case PG_LOG: return log(x);
    case PG_SQRT: return sqrt(x);
    case PG_SQUARE: return x * x;
    case PG_NEG: return -x;
    default: return fabs(x);
    }
}

/* Its derivative at x, for numbers that lie in memory as T; at the corner of
 * relu and abs it is 0. */
template <int kind, typename T, typename R = real<T>> __device__ __forceinline__ R slope(R x) {
    const R root_half = (R)0.70710678118654752440, a = (R)0.044715;
    const R root_2_pi = (R)0.79788456080286535588;
    const R density = (R)0.39894228040143267794; /* 1 / sqrt(2 pi) */
    R s;
    switch (kind) {
    case PG_RELU: return x > 0 ? 1 : 0;
    case PG_SILU: s = 1 / (1 + exp(-x)); return s + x * s * (1 - s);
    case PG_GELU: return (R)0.5 + (R)0.5 * erf(x * root_half) + x * density * exp((R)-0.5 * x * x);
    case PG_GELU_TANH:
        /* (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)) */
        s = divide_for<T>(1, 1 + exp_for<T>((R)-2 * root_2_pi * (x + a * x * x * x)));
        return s + 2 * root_2_pi * x * s * (1 - s) * (1 + 3 * a * x * x);
    case PG_TANH: s = tanh(x); return 1 - s * s;
    case PG_SIGMOID: s = 1 / (1 + exp(-x)); return s * (1 - s);
    case PG_EXP: return exp(x);
    case PG_LOG: return 1 / x;
    case PG_SQRT: return (R)0.5 / sqrt(x);
    case PG_SQUARE: return 2 * x;
    case PG_NEG: return -1;
    default: return x > 0 ? 1 : x < 0 ? -1 : 0;
    }
}

#define ALL_UNARY(DO)                                                                              \
    DO(PG_RELU)                                                                                    \
    DO(PG_SILU)                                                                                    \
    DO(PG_GELU)                                                                                    \
    DO(PG_GELU_TANH)                                                                               \
    DO(PG_TANH) DO(PG_SIGMOID) DO(PG_EXP) DO(PG_LOG) DO(PG_SQRT) DO(PG_SQUARE) DO(PG_NEG) DO(PG_ABS)

template <typename T, int W>
__global__ void __launch_bounds__(THREADS) unary_kernel(T *y, const T *x, int64_t n, int kind) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        real<T> v[W];
        load<T, W>(v, x + i, n - i);
#define ONE(K)                                                                                     \
    case K: _Pragma("unroll") for (int k = 0; k < W; k++) v[k] = value<K>(v[k]); break;
        switch (kind) { ALL_UNARY(ONE) }
#undef ONE
        store<T, W>(y + i, v, n - i);
    }
}

template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    unary_grad_kernel(T *dx, const T *dy, const T *x, int64_t n, int kind, int add) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        real<T> v[W], d[W];
        load<T, W>(v, x + i, n - i);
        load<T, W>(d, dy + i, n - i);
#define ONE(K)                                                                                     \
    case K: _Pragma("unroll") for (int k = 0; k < W; k++) d[k] *= slope<K, T>(v[k]); break;
        switch (kind) { ALL_UNARY(ONE) }
#undef ONE
        give<T, W>(dx + i, d, add, n - i);
    }
}

int cuda_unary(void *y, const void *x, int64_t n, int kind, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("unary", dtype,
                  CUDA_WIDE(cuda_aligned(y, x), T,
                            unary_kernel<T, W>
                            <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                                (T *)y, (const T *)x, n, kind)))
    return cuda_launched("unary");
}

int cuda_unary_grad(void *dx, const void *dy, const void *x, int64_t n, int kind, int add,
                    int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("unary_grad", dtype,
                  CUDA_WIDE(cuda_aligned(dx, dy, x), T,
                            unary_grad_kernel<T, W>
                            <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                                (T *)dx, (const T *)dy, (const T *)x, n, kind, add)))
    return cuda_launched("unary_grad");
}

/* ---- two tensors ---- */
template <int kind, typename R> __device__ __forceinline__ R combine(R a, R b) {
    switch (kind) {
    case PG_ADD: return a + b;
    case PG_SUB: return a - b;
    case PG_MUL: return a * b;
    case PG_DIV: return a / b;
    case PG_MAX: return a > b || a != a ? a : b;
    default: return a < b || a != a ? a : b;
    }
}

/* nb: b repeats every nb elements; a pack does not reach over its end. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    binary_kernel(T *y, const T *a, const T *b, int64_t n, int64_t nb, int kind, int add) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        real<T> v[W], w[W];
        load<T, W>(v, a + i, n - i);
        if (nb == 1) {
            real<T> same = to_real(b[0]);
#pragma unroll
            for (int k = 0; k < W; k++) w[k] = same;
        } else {
            int64_t j = nb == n ? i : i % nb;
            load<T, W>(w, b + j, nb - j);
        }
#define ONE(K)                                                                                     \
    case K: _Pragma("unroll") for (int k = 0; k < W; k++) v[k] = combine<K>(v[k], w[k]); break;
        switch (kind) { ONE(PG_ADD) ONE(PG_SUB) ONE(PG_MUL) ONE(PG_DIV) ONE(PG_MAX) ONE(PG_MIN) }
#undef ONE
        give<T, W>(y + i, v, add, n - i);
    }
}

int cuda_binary(void *y, const void *a, const void *b, int64_t n, int64_t nb, int kind, int add,
                int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    int repeats = nb != n && nb != 1;
    CUDA_FLOATING(
        "binary", dtype,
        CUDA_WIDE(cuda_aligned(y, a, nb == 1 ? NULL : b) && !(repeats && nb * sizeof(T) % 16), T,
                  binary_kernel<T, W><<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                      (T *)y, (const T *)a, (const T *)b, n, nb, kind, add)))
    return cuda_launched("binary");
}

/* beta 0 writes: what y held, a NaN too, is gone.  Moves x once, y once, twice where it is read: 10
 * bytes a number for a bf16 gradient added into f32. */
template <typename T, typename Y, int W>
__global__ void __launch_bounds__(THREADS)
    axpby_kernel(Y *y, const T *x, real<T> alpha, real<T> beta, int64_t n) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        real<T> v[W], old[W];
        load<T, W>(v, x + i, n - i);
        if (beta != 0) load<Y, W>(old, y + i, n - i);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = alpha * v[k] + (beta != 0 ? beta * old[k] : 0);
        store<Y, W>(y + i, v, n - i);
    }
}

int cuda_axpby(void *y, const void *x, double alpha, double beta, int64_t n, int dtype_y, int dtype,
               pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_MIXED("axpby", dtype, dtype_y,
               CUDA_WIDE(cuda_aligned(y, x), Y,
                         axpby_kernel<T, Y, W>
                         <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                             (Y *)y, (const T *)x, (real<T>)alpha, (real<T>)beta, n)))
    return cuda_launched("axpby");
}
