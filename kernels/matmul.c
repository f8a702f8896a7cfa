/* matmul.c: matrix products by OpenBLAS, with bias, GELU and accumulation finished in one pass.
 *
 * OpenBLAS built on OpenMP uses the threads of this program, and one thread inside a parallel
 * region: so many small products of a batch run side by side, and a large one uses all threads.
 * Arithmetic around the product: matmul_typed.h. */
#include <cblas.h>
#include <limits.h>
#include <omp.h>
#define LANE       256 /* numbers finished at a time: some KiB that stay in the L1 cache */
#define TILE       64
#define BLAS_ALONE 262144 /* m n k up to which one product is not worth several threads */
#define TYPED_BODY "matmul_typed.h"
#include "typed_twice.h"

/* OpenBLAS counts in 32 bits. */
static int fits(const pg_gemm_args *g) {
    int64_t largest = pg_max64(pg_max64(g->m, g->n), g->k);
    largest = pg_max64(pg_max64(largest, g->lda), pg_max64(g->ldb, g->ldc));
    if (largest <= INT_MAX) return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "matmul: a size of %lld is above %d, the most that OpenBLAS takes; "
                   "split the product",
                   (long long)largest, INT_MAX);
}

static int gemm(void *c, const void *a, const void *b, const pg_gemm_args *g) {
    TYPED_CALL(gemm, g->dtype, c, a, b, g);
}

int cpu_gemm(void *c, const void *a, const void *b, const pg_gemm_args *g, pg_stream s) {
    int slope = pg_epilogue_slope(g->epilogue);
    if (g->m == 0 || g->n == 0 || g->batch == 0) return PG_OK;
    PG_TRY(fits(g));
    if (slope < 0) return gemm(c, a, b, g);
    pg_gemm_args plain = *g;
    plain.epilogue = PG_EPILOGUE_NONE, plain.aux = NULL;
    PG_TRY(gemm(c, a, b, &plain));
    return cpu_unary_grad(c, c, g->aux, g->batch * g->m * g->n, slope, 0, g->dtype_c, s);
}
