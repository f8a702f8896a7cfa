/* matmul_cublas.c: cuda_gemm: which part of a product cuBLASLt does, and which is finished by hand.
 *
 * The library adds a bias or beta c to any product, and GELU in the tanh form (with the value
 * before it), or the slope of it, to half precision ones without beta.  Its GELU in f32 may be an
 * approximation, and the exact GELU it does not have: there the product comes first, and
 * matmul_finish.cu or elementwise.cu goes over it once more.  The same where the heuristics know no
 * algorithm for a combination. */
#include "matmul_cublas.h"
#include "../runtime/base/settings.h"
#include "cuda.h"

enum { NOT_THERE = 1 }; /* product(): the library has no such combination */

static int is_half(int dtype) { return dtype == PG_BF16 || dtype == PG_F16; }

/* log2 of the bytes an address is aligned to, at most GEMM_ALIGNMENT's; 4 for NULL. */
static int64_t alignment(const void *p) {
    uintptr_t bits = (uintptr_t)p | GEMM_ALIGNMENT;
    return __builtin_ctzll(bits);
}

/* asked: none, PG_EPILOGUE_GELU_TANH or PG_EPILOGUE_GELU_TANH_GRAD. */
static int64_t epilogue_of(const gemm_call *call, int asked) {
    if (asked == PG_EPILOGUE_GELU_TANH_GRAD) return CUBLASLT_EPILOGUE_DGELU;
    if (!asked) return call->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (call->aux) return call->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return call->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

static gemm_key key_of(const pg_gemm_args *g, const gemm_call *call, int asked, int adds) {
    int many = g->batch > 1;
    gemm_key key = {{[GEMM_M] = g->m,
                     [GEMM_N] = g->n,
                     [GEMM_K] = g->k,
                     [GEMM_BATCH] = g->batch,
                     [GEMM_LDA] = g->lda,
                     [GEMM_LDB] = g->ldb,
                     [GEMM_LDC] = g->ldc,
                     [GEMM_STRIDE_A] = many ? g->stride_a : 0,
                     [GEMM_STRIDE_B] = many ? g->stride_b : 0,
                     [GEMM_STRIDE_C] = many ? g->stride_c : 0,
                     [GEMM_DTYPE] = g->dtype,
                     [GEMM_DTYPE_C] = g->dtype_c,
                     [GEMM_TRANSPOSE_A] = g->transpose_a != 0,
                     [GEMM_TRANSPOSE_B] = g->transpose_b != 0,
                     [GEMM_EPILOGUE] = epilogue_of(call, asked),
                     [GEMM_ADDS] = adds,
                     [GEMM_ON_DEVICE] = g->scale_a || g->scale_b,
                     [GEMM_TF32] = g->dtype == PG_F32 && pg_tf32_allowed()}};
    key.at[GEMM_ALIGN] = alignment(call->b) | alignment(call->a) << 4 | alignment(call->c) << 8 |
                         alignment(call->bias) << 12 | alignment(call->aux) << 16;
    return key;
}

/* c = epilogue(alpha a b + bias) + beta c by the library alone, or NOT_THERE. */
static int product(gemm_call call, const pg_gemm_args *g, int asked, double beta) {
    union {
        double f64;
        float f32;
    } alpha, added;
    if (g->dtype == PG_F64) alpha.f64 = g->alpha, added.f64 = beta;
    else alpha.f32 = (float)g->alpha, added.f32 = (float)beta;
    call.alpha = &alpha, call.beta = &added;
    if (!gemm_handle()) return PG_EDEVICE;
    if (g->scale_a || g->scale_b) {
        char *scalars = gemm_scalars();
        PG_TRY(cuda_gemm_scalars(scalars, g, beta, call.stream));
        call.alpha = scalars,
        call.beta = scalars + pg_dtype_size(g->dtype == PG_F64 ? PG_F64 : PG_F32);
    }
    gemm_key key = key_of(g, &call, asked, beta != 0);
    gemm_plan *plan;
    PG_TRY(gemm_plan_find(&plan, &key, &call));
    if (!plan->there) return NOT_THERE;
    cublasStatus_t status = gemm_launch(plan, &call, &plan->algo);
    if (status == CUBLAS_STATUS_SUCCESS) return PG_OK;
    return pg_fail(PG_EDEVICE, "matmul: [%lld,%lld] x [%lld,%lld] %s: cuBLASLt: %s",
                   (long long)g->m, (long long)g->k, (long long)g->k, (long long)g->n,
                   pg_dtype_name(g->dtype), cublasLtGetStatusString(status));
}

/* With the bias if the library can; *bias becomes NULL once it is added. */
static int product_with_bias(gemm_call call, const pg_gemm_args *g, const void **bias,
                             double beta) {
    call.bias = *bias, call.aux = NULL;
    int rc = product(call, g, PG_EPILOGUE_NONE, beta);
    if (rc == NOT_THERE && *bias) {
        call.bias = NULL;
        rc = product(call, g, PG_EPILOGUE_NONE, beta);
    } else if (rc == PG_OK) {
        *bias = NULL;
    }
    if (rc != NOT_THERE) return rc;
    return pg_fail(PG_EDEVICE,
                   "matmul: cuBLASLt has no algorithm for [%lld,%lld] x [%lld,%lld] %s into %s, "
                   "row strides %lld, %lld, %lld; row strides that are multiples of 16 bytes help",
                   (long long)g->m, (long long)g->k, (long long)g->k, (long long)g->n,
                   pg_dtype_name(g->dtype), pg_dtype_name(g->dtype_c), (long long)g->lda,
                   (long long)g->ldb, (long long)g->ldc);
}

/* The product into aux, into c, or (c is still wanted for beta) into a block for the moment; then
 * one pass that finishes. */
static int in_two_passes(gemm_call call, const pg_gemm_args *g) {
    const void *bias = g->bias;
    int plain = g->epilogue == PG_EPILOGUE_NONE && !g->aux;
    void *c = call.c, *z = g->aux ? g->aux : c, *block = NULL;
    if (!plain && !g->aux && g->beta != 0) {
        int64_t span = (g->batch - 1) * g->stride_c + (g->m - 1) * g->ldc + g->n;
        int64_t bytes = span * pg_dtype_size(g->dtype_c);
        if (cudaMallocAsync(&block, (size_t)bytes, call.stream) != cudaSuccess) {
            cudaGetLastError();
            return pg_fail(PG_ENOMEM,
                           "matmul: %lld bytes for the value before the epilogue; "
                           "pass aux, or beta 0",
                           (long long)bytes);
        }
        z = block;
    }
    call.c = z;
    int rc = product_with_bias(call, g, &bias, plain ? g->beta : 0);
    if (rc == PG_OK && (!plain || bias))
        rc = cuda_gemm_finish(c, z, g->aux, g, bias, g->epilogue, plain ? 0 : g->beta, call.stream);
    if (block) cudaFreeAsync(block, call.stream);
    return rc;
}

/* The value before or at which GELU is taken: whether the library's kernels can have it. */
static int can_gelu(const pg_gemm_args *g, int epilogue) {
    return g->epilogue == epilogue && g->beta == 0 && is_half(g->dtype) && g->dtype_c == g->dtype &&
           (!g->aux || (g->ldc % 8 == 0 && g->stride_c % 8 == 0));
}

/* c = a b times the slope of an activation at aux. */
static int times_slope(gemm_call call, const pg_gemm_args *g, int slope) {
    const void *no_bias = NULL;
    int rc = NOT_THERE;
    if (can_gelu(g, PG_EPILOGUE_GELU_TANH_GRAD)) rc = product(call, g, g->epilogue, 0);
    if (rc != NOT_THERE) return rc;
    PG_TRY(product_with_bias(call, g, &no_bias, 0));
    return cuda_unary_grad(call.c, call.c, g->aux, g->batch * g->m * g->n, slope, 0, g->dtype_c,
                           call.stream);
}

int cuda_gemm(void *c, const void *a, const void *b, const pg_gemm_args *g, pg_stream s) {
    int slope = pg_epilogue_slope(g->epilogue), rc = NOT_THERE;
    if (g->m == 0 || g->n == 0 || g->batch == 0) return PG_OK;
    if (g->batch > INT32_MAX)
        return pg_fail(PG_EINVAL, "matmul: %lld products; cuBLASLt takes %d in a call",
                       (long long)g->batch, INT32_MAX);
    if (g->k == 0) /* zeros times a slope are zeros */
        return cuda_gemm_finish(c, NULL, slope < 0 ? g->aux : NULL, g, g->bias, g->epilogue,
                                g->beta, s);
    gemm_call call = {.a = a, .b = b, .c = c, .bias = g->bias, .aux = g->aux, .stream = s};
    if (slope >= 0) return times_slope(call, g, slope);
    if (can_gelu(g, PG_EPILOGUE_GELU_TANH)) rc = product(call, g, g->epilogue, 0);
    else if (g->epilogue == PG_EPILOGUE_NONE && !g->aux)
        rc = product(call, g, g->epilogue, g->beta);
    return rc == NOT_THERE ? in_two_passes(call, g) : rc;
}
