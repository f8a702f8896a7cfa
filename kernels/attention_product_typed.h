/* attention_product_typed.h: the small products of attention, of one thread; see typed_twice.h.
 *
 * Heads are 32 to 128 wide, where a BLAS call costs as much in packing as in arithmetic.  Here a
 * tile of ROWS x COLUMNS sums stays in registers while the inner size runs: that is the whole idea.
 * The tile is inlined into a PG_CLONES function, which decides the machine's vectors.  A sum is one
 * chain in the order of the inner size, whatever tile it falls in. */

/* 32 bytes: one AVX2 register; gcc makes two of 16 bytes where there are no larger ones. */
typedef REAL N(vec) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#define LANES   ((int64_t)(32 / sizeof(REAL)))
#define COLUMNS (2 * LANES)

/* c [m,w LANES] = (add ? c : 0) + factor[i] * sum over l < inner of a(i,l) b(l,j).
 * a(i,l) lies at a[i ra + l la], row l of b at b + l ldb.  m <= ROWS and w <= 2 are constants. */
PG_INLINE void N(tile)(REAL *c, int64_t ldc, const REAL *a, int64_t ra, int64_t la, const REAL *b,
                       int64_t ldb, int64_t inner, const REAL *factor, int add, const int m,
                       const int w) {
    N(vec) sum[ROWS][2] = {0};
    for (int64_t l = 0; l < inner; l++) {
        const REAL *row = b + l * ldb;
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            REAL x = a[i * ra + l * la];
#pragma GCC unroll 2
            for (int j = 0; j < w; j++) sum[i][j] += x * *(const N(vec) *)(row + j * LANES);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < w; j++) {
            N(vec) *to = (N(vec) *)(c + i * ldc + j * LANES);
            *to = add ? *to + factor[i] * sum[i][j] : factor[i] * sum[i][j];
        }
    }
}

/* The columns that fill no vector. */
PG_INLINE void N(narrow)(REAL *c, int64_t ldc, const REAL *a, int64_t ra, int64_t la, const REAL *b,
                         int64_t ldb, int64_t inner, const REAL *factor, int add, int64_t m,
                         int64_t n) {
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            REAL sum = 0;
            for (int64_t l = 0; l < inner; l++) sum += a[i * ra + l * la] * b[l * ldb + j];
            c[i * ldc + j] = (add ? c[i * ldc + j] : 0) + factor[i] * sum;
        }
    }
}

/* The same for n columns: c [m,n], m a constant. */
PG_INLINE void N(strip)(REAL *c, int64_t ldc, const REAL *a, int64_t ra, int64_t la, const REAL *b,
                        int64_t ldb, int64_t n, int64_t inner, const REAL *factor, int add,
                        const int m) {
    int64_t j = 0;
    for (; j + COLUMNS <= n; j += COLUMNS)
        N(tile)(c + j, ldc, a, ra, la, b + j, ldb, inner, factor, add, m, 2);
    if (j + LANES <= n) {
        N(tile)(c + j, ldc, a, ra, la, b + j, ldb, inner, factor, add, m, 1);
        j += LANES;
    }
    if (j < n) N(narrow)(c + j, ldc, a, ra, la, b + j, ldb, inner, factor, add, m, n - j);
}

/* ... and for m <= ROWS rows. */
PG_CLONES static void N(product)(REAL *c, int64_t ldc, const REAL *a, int64_t ra, int64_t la,
                                 const REAL *b, int64_t ldb, int64_t m, int64_t n, int64_t inner,
                                 const REAL *factor, int add) {
    if (m == ROWS) {
        N(strip)(c, ldc, a, ra, la, b, ldb, n, inner, factor, add, ROWS);
        return;
    }
    for (int64_t i = 0; i < m; i++)
        N(strip)(c + i * ldc, ldc, a + i * ra, ra, la, b, ldb, n, inner, factor + i, add, 1);
}

/* c [m,n] = factor[i] * a [m,inner] panels' with the keys of `panels` in COLUMNS at a time, each
 * panel [inner,COLUMNS]; n is rounded up to whole panels. */
PG_CLONES static void N(panel_product)(REAL *c, int64_t ldc, const REAL *a, int64_t lda,
                                       const REAL *panels, int64_t m, int64_t n, int64_t inner,
                                       const REAL *factor) {
    for (int64_t j = 0; j < n; j += COLUMNS) {
        const REAL *panel = panels + j * inner;
        if (m == ROWS) {
            N(tile)(c + j, ldc, a, lda, 1, panel, COLUMNS, inner, factor, 0, ROWS, 2);
            continue;
        }
        for (int64_t i = 0; i < m; i++)
            N(tile)(c + i * ldc + j, ldc, a + i * lda, lda, 1, panel, COLUMNS, inner, factor + i, 0,
                    1, 2);
    }
}

/* Rows [0,n) of x, turned into panels; the last panel is filled up with zeros.  Costs as much as
 * the scores of two to three query rows. */
PG_CLONES static void N(pack_panels)(REAL *panels, const REAL *x, int64_t ldx, int64_t n,
                                     int64_t width) {
    for (int64_t from = 0; from < n; from += COLUMNS, panels += COLUMNS * width) {
        int64_t m = pg_min64(COLUMNS, n - from);
        const REAL *rows = x + from * ldx;
        if (m < COLUMNS) memset(panels, 0, (size_t)(COLUMNS * width) * sizeof *panels);
        for (int64_t i = 0; i < width; i++)
            for (int64_t j = 0; j < m; j++) panels[i * COLUMNS + j] = rows[j * ldx + i];
    }
}

/* n rows of x, laid end to end: rows as far apart as those of q, k and v share few cache sets. */
static void N(pack_rows)(REAL *y, const REAL *x, int64_t ldx, int64_t n, int64_t width) {
    for (int64_t i = 0; i < n; i++) memcpy(y + i * width, x + i * ldx, (size_t)width * sizeof *y);
}
