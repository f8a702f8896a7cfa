/* fake_cublas.c: as much of cuBLASLt as kernels/STEM_cublas.c use, on the host; see fake.h.
 *
 * Products are columns-first, as the manual has them.  It knows no bias of another type than the
 * result, and offers three algorithms of which the second is the fastest. */
#include <cublasLt.h>
#include "../../kernels/matmul_cublas.h"
#include "fake.h"

#include <math.h>
#include <time.h>

typedef struct {
    int64_t rows, columns, ld, stride;
    int32_t batch;
    cudaDataType type;
} matrix;
typedef struct {
    int64_t set[64]; /* by cublasLtMatmulDescAttributes_t */
    cublasComputeType_t compute;
    cudaDataType scale;
} product;

static cublasStatus_t keep(int64_t *slot, const void *value, size_t bytes) {
    *slot = 0;
    memcpy(slot, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

size_t CUBLASWINAPI cublasLtGetVersion(void) { return 1; }
const char *CUBLASWINAPI cublasLtGetStatusString(cublasStatus_t s) {
    return s == CUBLAS_STATUS_SUCCESS ? "success" : "failure";
}
cublasStatus_t CUBLASWINAPI cublasLtCreate(cublasLtHandle_t *h) {
    *h = malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d,
                                                     cublasComputeType_t compute,
                                                     cudaDataType_t scale) {
    product *p = calloc(1, sizeof *p);
    p->compute = compute, p->scale = scale;
    p->set[CUBLASLT_MATMUL_DESC_EPILOGUE] = CUBLASLT_EPILOGUE_DEFAULT;
    *d = (cublasLtMatmulDesc_t)(void *)p;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                                           cublasLtMatmulDescAttributes_t name,
                                                           const void *value, size_t bytes) {
    return keep(&((product *)(void *)d)->set[name], value, bytes);
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    free(d);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out,
                                                       cudaDataType type, uint64_t rows,
                                                       uint64_t columns, int64_t ld) {
    matrix *m = calloc(1, sizeof *m);
    *m = (matrix){(int64_t)rows, (int64_t)columns, ld, 0, 1, type};
    *out = (cublasLtMatrixLayout_t)(void *)m;
    return ld >= m->rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                             cublasLtMatrixLayoutAttribute_t name,
                                                             const void *value, size_t bytes) {
    matrix *m = (matrix *)(void *)l;
    if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&m->batch, value, bytes);
    if (name == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) memcpy(&m->stride, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    free(l);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t name, const void *value,
    size_t bytes) {
    (void)p, (void)name, (void)value, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t wish, int most,
    cublasLtMatmulHeuristicResult_t *found, int *count) {
    (void)h, (void)a, (void)b, (void)out, (void)wish;
    const product *p = (product *)(void *)d;
    int bias = (p->set[CUBLASLT_MATMUL_DESC_EPILOGUE] & CUBLASLT_EPILOGUE_BIAS) != 0;
    *count = 0;
    if (bias && p->set[CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE] != ((matrix *)(void *)c)->type)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < 3 && i < most; i++, ++*count)
        found[i] = (cublasLtMatmulHeuristicResult_t){.algo = {{(uint64_t)i + 1}},
                                                     .state = CUBLAS_STATUS_SUCCESS};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoCheck(
    cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t *algo,
    cublasLtMatmulHeuristicResult_t *result) {
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)out;
    *result = (cublasLtMatmulHeuristicResult_t){.algo = *algo};
    return algo->data[0] - 1 < 3 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- the product ---- */
static int dtype_of(cudaDataType type) {
    return type == CUDA_R_64F   ? PG_F64
           : type == CUDA_R_32F ? PG_F32
           : type == CUDA_R_16F ? PG_F16
                                : PG_BF16;
}

/* Matrix number i as [rows,columns] doubles, row first. */
static double *dense(const void *data, const matrix *m, int transpose, int i, int tf32) {
    int dtype = dtype_of(m->type);
    int64_t rows = transpose ? m->columns : m->rows, columns = transpose ? m->rows : m->columns;
    double *all = fake_doubles((const char *)data + i * m->stride * pg_dtype_size(dtype),
                               (m->columns - 1) * m->ld + m->rows, dtype);
    double *out = fake_doubles(NULL, rows * columns, PG_F64);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double v = transpose ? all[r * m->ld + c] : all[c * m->ld + r];
            out[r * columns + c] = tf32 ? (double)pg_f16_to_f32(pg_f32_to_f16((float)v)) : v;
        }
    free(all);
    return out;
}

static double gelu_tanh(double v) {
    return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
}

static double gelu_tanh_slope(double v) {
    const double h = 1e-6; /* the other way than the kernel takes */
    return (gelu_tanh(v + h) - gelu_tanh(v - h)) / (2 * h);
}

/* D = epilogue(alpha op(A) op(B) + beta C + bias), bias down the rows. */
static void finish(const product *p, double *sum, const void *c, void *d, const matrix *m, int i,
                   double beta) {
    int dtype = dtype_of(m->type);
    int64_t epilogue = p->set[CUBLASLT_MATMUL_DESC_EPILOGUE];
    int slope = epilogue == CUBLASLT_EPILOGUE_DGELU;
    int aux = !slope && (epilogue & 128) != 0, gelu = (epilogue & CUBLASLT_EPILOGUE_GELU) != 0;
    void *before = (void *)p->set[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER];
    const void *bias = (const void *)p->set[CUBLASLT_MATMUL_DESC_BIAS_POINTER];
    int64_t ld = p->set[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD];
    int64_t next = p->set[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE];
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t k = 0; k < m->columns; k++) {
            int64_t at = i * m->stride + k * m->ld + r;
            double v = sum[r * m->columns + k] + (beta != 0 ? beta * fake_get(c, at, dtype) : 0);
            if (epilogue & CUBLASLT_EPILOGUE_BIAS) v += fake_get(bias, r, dtype);
            if (aux) fake_put(before, i * next + k * ld + r, v, dtype);
            if (gelu) v = gelu_tanh(v);
            if (slope) v *= gelu_tanh_slope(fake_get(before, i * next + k * ld + r, dtype));
            fake_put(d, at, v, dtype);
        }
}

static void spoil(void *d, const matrix *m) {
    int64_t n = (m->batch - 1) * m->stride + (m->columns - 1) * m->ld + m->rows;
    memset(d, 0xff, (size_t)(n * pg_dtype_size(dtype_of(m->type))));
}

cublasStatus_t CUBLASWINAPI cublasLtMatmul(
    cublasLtHandle_t h, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
    cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
    const void *c, cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
    const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t stream) {
    (void)h, (void)lc, (void)workspace, (void)bytes, (void)stream;
    const product *p = (product *)(void *)desc;
    const matrix *ma = (matrix *)(void *)la, *mb = (matrix *)(void *)lb, *md = (matrix *)(void *)ld;
    int scale = dtype_of(p->scale), ta = p->set[CUBLASLT_MATMUL_DESC_TRANSA] == CUBLAS_OP_T;
    int tb = p->set[CUBLASLT_MATMUL_DESC_TRANSB] == CUBLAS_OP_T;
    int tf32 = p->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    int64_t k = ta ? ma->rows : ma->columns, other = tb ? mb->columns : mb->rows;
    if (k != other || (ta ? ma->columns : ma->rows) != md->rows ||
        (tb ? mb->rows : mb->columns) != md->columns)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (fake_timing) {
        struct timespec wait = {0, algo->data[0] == 2 ? 100000 : 400000};
        nanosleep(&wait, NULL);
        spoil(d, md);
        return CUBLAS_STATUS_SUCCESS;
    }
    for (int i = 0; i < md->batch; i++) {
        double *x = dense(a, ma, ta, i, tf32), *y = dense(b, mb, tb, i, tf32);
        double *sum = fake_doubles(NULL, md->rows * md->columns, PG_F64);
        pg_gemm_args g = {.m = md->rows,
                          .n = md->columns,
                          .k = k,
                          .batch = 1,
                          .lda = k,
                          .ldb = md->columns,
                          .ldc = md->columns,
                          .dtype = PG_F64,
                          .dtype_c = PG_F64,
                          .alpha = fake_get(alpha, 0, scale)};
        pg_kernels_cpu()->gemm(sum, x, y, &g, NULL);
        finish(p, sum, c, d, md, i, fake_get(beta, 0, scale));
        free(x), free(y), free(sum);
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- matmul_finish.cu ---- */
static double activate(double v, int epilogue) {
    if (epilogue == PG_EPILOGUE_GELU) return 0.5 * v * (1 + erf(v / sqrt(2)));
    return epilogue == PG_EPILOGUE_GELU_TANH ? gelu_tanh(v) : v;
}

int cuda_gemm_finish(void *c, const void *z, void *aux, const pg_gemm_args *g, const void *bias,
                     int epilogue, double beta, pg_stream s) {
    (void)s;
    for (int64_t row = 0; row < g->batch * g->m; row++)
        for (int64_t j = 0; j < g->n; j++) {
            int64_t at = row / g->m * g->stride_c + row % g->m * g->ldc + j;
            double v = z ? fake_get(z, at, g->dtype_c) : 0;
            if (bias) v += fake_get(bias, j, g->dtype);
            if (aux) fake_put(aux, at, v, g->dtype_c);
            v = activate(v, epilogue) + (beta != 0 ? beta * fake_get(c, at, g->dtype_c) : 0);
            fake_put(c, at, v, g->dtype_c);
        }
    return PG_OK;
}

int cuda_unary_grad(void *dx, const void *dy, const void *x, int64_t n, int kind, int add,
                    int dtype, pg_stream s) {
    return pg_kernels_cpu()->unary_grad(dx, dy, x, n, kind, add, dtype, s);
}

int cuda_gemm_scalars(void *scalars, const pg_gemm_args *g, double beta, pg_stream s) {
    (void)s;
    double scale = (double)(g->scale_a ? *g->scale_a : 1) * (double)(g->scale_b ? *g->scale_b : 1);
    fake_round(scalars, (double[]){g->alpha * scale, beta}, 2,
               g->dtype == PG_F64 ? PG_F64 : PG_F32);
    return PG_OK;
}
