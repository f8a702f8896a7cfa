/* matmul_typed.h: bias, activation and beta on finished products; see typed_twice.h. */

/* One row: v = z + bias; aux = v; y = act(v) + beta y.  z may be y or aux. */
PG_CLONES static void N(finish_row)(REAL *y, const REAL *z, REAL *aux, const REAL *bias, int64_t n,
                                    int epilogue, REAL beta) {
    const REAL root_half = (REAL)0.70710678118654752440, a = (REAL)0.044715;
    const REAL root_2_pi = (REAL)0.79788456080286535588; /* sqrt(2 / pi) */
    for (int64_t from = 0; from < n; from += LANE) {
        int64_t count = pg_min64(LANE, n - from);
        REAL v[LANE], old[LANE];
        for (int64_t i = 0; i < count; i++) v[i] = z[from + i];
        for (int64_t i = 0; i < count; i++) old[i] = beta != 0 ? beta * y[from + i] : 0;
        if (bias)
            for (int64_t i = 0; i < count; i++) v[i] += bias[from + i];
        if (aux)
            for (int64_t i = 0; i < count; i++) aux[from + i] = v[i];
        if (epilogue == PG_EPILOGUE_GELU) {
            for (int64_t i = 0; i < count; i++)
                v[i] *= (REAL)0.5 + (REAL)0.5 * M(verf)(v[i] * root_half);
        } else if (epilogue == PG_EPILOGUE_GELU_TANH) {
            for (int64_t i = 0; i < count; i++)
                v[i] *= (REAL)0.5 +
                        (REAL)0.5 * M(vtanh)(root_2_pi * (v[i] + a * v[i] * v[i] * v[i]));
        }
        for (int64_t i = 0; i < count; i++) y[from + i] = v[i] + old[i];
    }
}

/* z = alpha op(a) op(b) + beta z.  An empty sum (k = 0) is 0; beta 0 overwrites NaNs. */
static void N(product)(REAL *z, int64_t ldz, const REAL *a, const REAL *b, int64_t m, int64_t n,
                       const pg_gemm_args *g, double alpha, double beta) {
    if (g->k > 0) {
        BLAS(gemm)(CblasRowMajor, g->transpose_a ? CblasTrans : CblasNoTrans,
                   g->transpose_b ? CblasTrans : CblasNoTrans, (blasint)m, (blasint)n,
                   (blasint)g->k, (REAL)alpha, a, (blasint)g->lda, b, (blasint)g->ldb, (REAL)beta,
                   z, (blasint)ldz);
        return;
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            z[i * ldz + j] = beta != 0 ? (REAL)beta * z[i * ldz + j] : 0;
}

/* The value before the epilogue has no place of its own (no aux, and c is still wanted for beta):
 * it goes by tiles through the stack. */
static void N(gemm_tiled)(REAL *c, const REAL *a, const REAL *b, const pg_gemm_args *g,
                          double alpha) {
    const REAL *bias = g->bias;
#pragma omp parallel for collapse(2)
    for (int64_t i = 0; i < g->m; i += TILE) {
        for (int64_t j = 0; j < g->n; j += TILE) {
            REAL z[TILE * TILE];
            int64_t m = pg_min64(TILE, g->m - i), n = pg_min64(TILE, g->n - j);
            N(product)(z, TILE, a + i * (g->transpose_a ? 1 : g->lda),
                       b + j * (g->transpose_b ? g->ldb : 1), m, n, g, alpha, 0);
            for (int64_t r = 0; r < m; r++)
                N(finish_row)(c + (i + r) * g->ldc + j, z + r * TILE, NULL, bias ? bias + j : NULL,
                              n, g->epilogue, (REAL)g->beta);
        }
    }
}

static void N(gemm_one)(REAL *c, const REAL *a, const REAL *b, REAL *aux, const pg_gemm_args *g,
                        double alpha) {
    int plain = g->epilogue == PG_EPILOGUE_NONE && !aux; /* beta can then go to the product */
    if (!plain && !aux && g->beta != 0) {
        N(gemm_tiled)(c, a, b, g, alpha);
        return;
    }
    REAL *z = aux ? aux : c;
    N(product)(z, g->ldc, a, b, g->m, g->n, g, alpha, plain ? g->beta : 0);
    if (plain && !g->bias) return;
#pragma omp parallel for if (g->m * g->n >= CPU_MANY)
    for (int64_t i = 0; i < g->m; i++)
        N(finish_row)(c + i * g->ldc, z + i * g->ldc, aux ? aux + i * g->ldc : NULL, g->bias, g->n,
                      g->epilogue, plain ? 0 : (REAL)g->beta);
}

static void N(gemm)(REAL *c, const REAL *a, const REAL *b, const pg_gemm_args *g) {
    double alpha = g->alpha * (double)(g->scale_a ? *g->scale_a : 1);
    alpha *= (double)(g->scale_b ? *g->scale_b : 1);
    REAL *aux = g->aux;
    int apart = g->batch >= omp_get_max_threads() || g->m * g->n * g->k <= BLAS_ALONE;
#pragma omp parallel for if (apart && g->batch > 1 && g->batch * g->m * g->n * g->k >= CPU_MANY)
    for (int64_t i = 0; i < g->batch; i++)
        N(gemm_one)(c + i * g->stride_c, a + i * g->stride_a, b + i * g->stride_b,
                    aux ? aux + i * g->stride_c : NULL, g, alpha);
}
