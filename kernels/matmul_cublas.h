/* matmul_cublas.h: what the files of the CUDA matrix product share.
 *
 *   matmul_cublas.c   cuda_gemm: which part cuBLASLt does and which part is finished by hand
 *   plan_cublas.c     one plan a shape: descriptors and the chosen algorithm
 *   tune_cublas.c     choosing among the library's candidates by time
 *   choices_cublas.c  choices as text: kept in a file, sent to other ranks
 *   matmul_finish.cu  bias, activation and beta where the library has no such combination
 *
 * cuBLASLt counts columns first.  A row-major matrix is its own transpose there, so
 * c = a b (row major) is asked for as c' = b' a': its A is our b, its m is our n.
 * All products of a process run on one stream: they share a workspace. */
#ifndef PG_MATMUL_CUBLAS_H
#define PG_MATMUL_CUBLAS_H
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include "cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GEMM_WORKSPACE  (64 << 20) /* bytes; what NVIDIA advises for Hopper is 32 MiB */
#define GEMM_CANDIDATES 16
#define GEMM_ALIGNMENT  16 /* bytes: the widest load that a kernel makes by itself */

/* All that the choice of an algorithm depends on.  Written as numbers in this order in the text of
 * choices: a new field goes to the end, and makes old lines unreadable. */
enum gemm_field {
    GEMM_M,
    GEMM_N,
    GEMM_K,
    GEMM_BATCH,
    GEMM_LDA,
    GEMM_LDB,
    GEMM_LDC,
    GEMM_STRIDE_A,
    GEMM_STRIDE_B,
    GEMM_STRIDE_C, /* 0 where there is one product */
    GEMM_DTYPE,
    GEMM_DTYPE_C,
    GEMM_TRANSPOSE_A,
    GEMM_TRANSPOSE_B,
    GEMM_EPILOGUE,  /* cublasLtEpilogue_t */
    GEMM_ADDS,      /* beta is not 0 */
    GEMM_ON_DEVICE, /* alpha and beta lie in device memory */
    GEMM_TF32,
    GEMM_ALIGN, /* of b, a, c, bias, aux: 4 bits each, log2 of bytes, at most GEMM_ALIGNMENT */
    GEMM_FIELDS
};
typedef struct {
    int64_t at[GEMM_FIELDS];
} gemm_key;

/* What changes from call to call of one plan. */
typedef struct {
    const void *a, *b, *bias;
    void *c, *aux;
    const void *alpha, *beta; /* f64 for f64, else f32; on the device if the key says so */
    cudaStream_t stream;
} gemm_call;

typedef struct gemm_plan {
    gemm_key key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c; /* as the library sees them: a is our b */
    cublasLtMatmulAlgo_t algo;
    int there;              /* 0: the library has no algorithm for this */
    struct gemm_plan *next; /* of the same bucket */
} gemm_plan;

/* plan_cublas.c */
/* The plan of a key, made at its first call; PG_OK also where it is not `there`. */
int gemm_plan_find(gemm_plan **out, const gemm_key *key, const gemm_call *call);
cublasStatus_t gemm_launch(const gemm_plan *p, const gemm_call *call,
                           const cublasLtMatmulAlgo_t *algo);
cublasLtHandle_t gemm_handle(void); /* NULL + message */
void *gemm_scalars(void);           /* 16 bytes of device memory, after gemm_handle */
void gemm_plans_forget(void);       /* the next call of each shape chooses anew */

/* tune_cublas.c */
int gemm_worth_tuning(const gemm_plan *p);
/* The fastest of n candidates, or 0 where time could not be taken. */
int gemm_tune(const gemm_plan *p, const gemm_call *call,
              const cublasLtMatmulHeuristicResult_t *found, int n, int *timed);

/* choices_cublas.c */
const cublasLtMatmulAlgo_t *gemm_choice_find(const gemm_key *key); /* NULL: none is known */
void gemm_choice_add(const gemm_key *key, const cublasLtMatmulAlgo_t *algo);

/* matmul_finish.cu */
/* Row by row of `batch` matrices [m,n] laid out as c:  v = z + bias; aux = v; c = act(v) + beta c.
 * z NULL: zeros.  z may be c (beta 0) or aux; bias and aux may be NULL.  16-byte accesses where
 * sizes and addresses allow; reads z (and c if beta), writes c (and aux) once. */
int cuda_gemm_finish(void *c, const void *z, void *aux, const pg_gemm_args *g, const void *bias,
                     int epilogue, double beta, pg_stream s);
/* scalars[0] = alpha scale_a scale_b, scalars[1] = beta, in f64 or f32. */
int cuda_gemm_scalars(void *scalars, const pg_gemm_args *g, double beta, pg_stream s);
#ifdef __cplusplus
}
#endif
#endif
