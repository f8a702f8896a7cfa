/* plan_cublas.c: one plan for each shape of a product: cuBLASLt's descriptors and an algorithm.
 *
 * A plan is made at a shape's first call: from a choice that is known already (a file, another
 * rank), else from the heuristics' list, whose first entry counts unless the shape is worth timing
 * (tune_cublas.c).  Only algorithms are asked for that give the same bits every time: none, or one
 * whose partial sums are added in f32 in a fixed order.  Plans live as long as the process. */
#include "../runtime/base/capture.h"
#include "matmul_cublas.h"

#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024 };

static struct { /* of the process: one device, one stream */
    cublasLtHandle_t handle;
    char *workspace; /* GEMM_WORKSPACE bytes, then 16 for two scalars */
    gemm_plan *buckets[BUCKETS];
} lt;

static int told(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return PG_OK;
    return pg_fail(PG_EDEVICE, "matmul: %s: %s", what, cublasLtGetStatusString(status));
}

cublasLtHandle_t gemm_handle(void) {
    if (lt.handle) return lt.handle;
    if (!lt.workspace && cudaMalloc((void **)&lt.workspace, GEMM_WORKSPACE + 16) != cudaSuccess) {
        cudaGetLastError();
        pg_fail(PG_ENOMEM, "matmul: no %d MiB of device memory for cuBLASLt to work in",
                GEMM_WORKSPACE >> 20);
        return NULL;
    }
    if (told(cublasLtCreate(&lt.handle), "cannot start cuBLASLt") < 0) lt.handle = NULL;
    return lt.handle;
}

void *gemm_scalars(void) { return lt.workspace + GEMM_WORKSPACE; }

static cudaDataType_t type_of(int64_t dtype) {
    return dtype == PG_F64    ? CUDA_R_64F
           : dtype == PG_BF16 ? CUDA_R_16BF
           : dtype == PG_F16  ? CUDA_R_16F
                              : CUDA_R_32F;
}

#define SET_OP(p, name, value)                                                                     \
    PG_TRY(told(cublasLtMatmulDescSetAttribute((p)->op, CUBLASLT_MATMUL_DESC_##name, &(value),     \
                                               sizeof(value)),                                     \
                "describing " #name))

static int describe_op(gemm_plan *p) {
    const int64_t *at = p->key.at;
    int f64 = at[GEMM_DTYPE] == PG_F64;
    cublasComputeType_t compute = f64             ? CUBLAS_COMPUTE_64F
                                  : at[GEMM_TF32] ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                  : CUBLAS_COMPUTE_32F;
    PG_TRY(told(cublasLtMatmulDescCreate(&p->op, compute, f64 ? CUDA_R_64F : CUDA_R_32F),
                "describing the product"));
    cublasOperation_t first = at[GEMM_TRANSPOSE_B] ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = at[GEMM_TRANSPOSE_A] ? CUBLAS_OP_T : CUBLAS_OP_N;
    SET_OP(p, TRANSA, first);
    SET_OP(p, TRANSB, second);
    if (at[GEMM_ON_DEVICE]) {
        int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
        SET_OP(p, POINTER_MODE, mode);
    }
    uint32_t epilogue = (uint32_t)at[GEMM_EPILOGUE];
    SET_OP(p, EPILOGUE, epilogue);
    if (epilogue & CUBLASLT_EPILOGUE_BIAS) {
        int32_t type = (int32_t)type_of(at[GEMM_DTYPE]);
        SET_OP(p, BIAS_DATA_TYPE, type);
    }
    if (epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
        epilogue == CUBLASLT_EPILOGUE_DGELU) {
        int64_t rows = at[GEMM_LDC], matrices = at[GEMM_STRIDE_C];
        SET_OP(p, EPILOGUE_AUX_LD, rows);
        SET_OP(p, EPILOGUE_AUX_BATCH_STRIDE, matrices);
    }
    return PG_OK;
}

static int describe_matrix(cublasLtMatrixLayout_t *out, const int64_t *at, int64_t dtype,
                           int64_t rows, int64_t columns, int64_t ld, int64_t stride) {
    PG_TRY(
        told(cublasLtMatrixLayoutCreate(out, type_of(dtype), (uint64_t)rows, (uint64_t)columns, ld),
             "describing a matrix"));
    if (at[GEMM_BATCH] == 1) return PG_OK;
    int32_t count = (int32_t)at[GEMM_BATCH];
    PG_TRY(told(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                 sizeof count),
                "describing a batch"));
    return told(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                 &stride, sizeof stride),
                "describing a batch");
}

static int describe(gemm_plan *p) {
    const int64_t *at = p->key.at, m = at[GEMM_M], n = at[GEMM_N], k = at[GEMM_K];
    int ta = at[GEMM_TRANSPOSE_A] != 0, tb = at[GEMM_TRANSPOSE_B] != 0;
    PG_TRY(describe_op(p));
    PG_TRY(describe_matrix(&p->a, at, at[GEMM_DTYPE], tb ? k : n, tb ? n : k, at[GEMM_LDB],
                           at[GEMM_STRIDE_B]));
    PG_TRY(describe_matrix(&p->b, at, at[GEMM_DTYPE], ta ? m : k, ta ? k : m, at[GEMM_LDA],
                           at[GEMM_STRIDE_A]));
    return describe_matrix(&p->c, at, at[GEMM_DTYPE_C], n, m, at[GEMM_LDC], at[GEMM_STRIDE_C]);
}

/* Addresses that the description carries: the heuristics look at their alignment too. */
static cublasStatus_t point(const gemm_plan *p, const gemm_call *call) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (call->bias)
        status = cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &call->bias, sizeof call->bias);
    if (call->aux && status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                                &call->aux, sizeof call->aux);
    return status;
}

cublasStatus_t gemm_launch(const gemm_plan *p, const gemm_call *call,
                           const cublasLtMatmulAlgo_t *algo) {
    cublasStatus_t status = point(p, call);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatmul(lt.handle, p->op, call->alpha, call->b, p->a, call->a, p->b, call->beta,
                          call->c, p->c, call->c, p->c, algo, lt.workspace, GEMM_WORKSPACE,
                          call->stream);
}

#define SET_PREFERENCE(name, value)                                                                \
    PG_TRY_TO(done, rc,                                                                            \
              told(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_##name,         \
                                                        &(value), sizeof(value)),                  \
                   "asking for " #name))

/* The library's candidates, best guess first; *count 0 where it has none. */
static int candidates(const gemm_plan *p, cublasLtMatmulHeuristicResult_t *found, int *count) {
    cublasLtMatmulPreference_t wish = NULL;
    size_t workspace = GEMM_WORKSPACE;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int64_t bits = p->key.at[GEMM_ALIGN];
    uint32_t a = 1u << (bits & 15), b = 1u << (bits >> 4 & 15), c = 1u << (bits >> 8 & 15);
    int rc;
    *count = 0;
    PG_TRY_TO(done, rc, told(cublasLtMatmulPreferenceCreate(&wish), "asking for algorithms"));
    SET_PREFERENCE(MAX_WORKSPACE_BYTES, workspace);
    SET_PREFERENCE(REDUCTION_SCHEME_MASK, schemes);
    SET_PREFERENCE(MIN_ALIGNMENT_A_BYTES, a);
    SET_PREFERENCE(MIN_ALIGNMENT_B_BYTES, b);
    SET_PREFERENCE(MIN_ALIGNMENT_C_BYTES, c);
    SET_PREFERENCE(MIN_ALIGNMENT_D_BYTES, c);
    if (cublasLtMatmulAlgoGetHeuristic(lt.handle, p->op, p->a, p->b, p->c, p->c, wish,
                                       GEMM_CANDIDATES, found, count) != CUBLAS_STATUS_SUCCESS)
        *count = 0;
    int usable = 0;
    for (int i = 0; i < *count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS) found[usable++] = found[i];
    *count = usable;
done:
    if (wish) cublasLtMatmulPreferenceDestroy(wish);
    return rc;
}

/* 1 if the library takes that algorithm for this plan. */
static int takes(const gemm_plan *p, const cublasLtMatmulAlgo_t *algo) {
    cublasLtMatmulHeuristicResult_t result;
    return cublasLtMatmulAlgoCheck(lt.handle, p->op, p->a, p->b, p->c, p->c, algo, &result) ==
               CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= GEMM_WORKSPACE;
}

static int choose(gemm_plan *p, const gemm_call *call) {
    const cublasLtMatmulAlgo_t *known = gemm_choice_find(&p->key);
    if (known && takes(p, known)) {
        p->algo = *known;
        p->there = 1;
        return PG_OK;
    }
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    int count, timed = 0, best = 0;
    PG_TRY(candidates(p, found, &count));
    if (count == 0) return PG_OK;
    if (count > 1 && gemm_worth_tuning(p)) {
        PG_TRY(pg_capture_bars(
            "matmul", "a product of this size is timed at its first call; run it once before"));
        best = gemm_tune(p, call, found, count, &timed);
    }
    p->algo = found[best].algo;
    p->there = 1;
    if (timed) gemm_choice_add(&p->key, &p->algo);
    return PG_OK;
}

static void plan_free(gemm_plan *p) {
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    if (p->op) cublasLtMatmulDescDestroy(p->op);
    free(p);
}

int gemm_plan_find(gemm_plan **out, const gemm_key *key, const gemm_call *call) {
    gemm_plan **bucket = &lt.buckets[pg_hash(key, sizeof *key, 0) % BUCKETS];
    for (*out = *bucket; *out; *out = (*out)->next)
        if (!memcmp(&(*out)->key, key, sizeof *key)) return PG_OK;
    gemm_plan *p = calloc(1, sizeof *p);
    if (!p) return pg_fail(PG_ENOMEM, "matmul: no memory for a plan");
    p->key = *key;
    int rc = describe(p);
    if (rc == PG_OK) rc = told(point(p, call), "describing bias and aux");
    if (rc == PG_OK) rc = choose(p, call);
    if (rc < 0) {
        plan_free(p);
        return rc;
    }
    p->next = *bucket;
    *bucket = *out = p;
    return PG_OK;
}

void gemm_plans_forget(void) {
    for (int i = 0; i < BUCKETS; i++) {
        while (lt.buckets[i]) {
            gemm_plan *p = lt.buckets[i];
            lt.buckets[i] = p->next;
            plan_free(p);
        }
    }
}
