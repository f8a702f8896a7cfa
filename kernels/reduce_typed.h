/* reduce_typed.h: the loops of reduce.c over one tile of columns; see typed_twice.h. */

/* acc[0] = kind over n numbers side by side.  A NaN wins in max and min: it is looked for apart, as
 * the order of a vector's lanes would lose it. */
PG_CLONES static void N(run)(double *acc, const REAL *x, int64_t n, int kind) {
    double sum = 0;
    REAL most = n ? x[0] : 0, least = most;
    int nans = 0;
    if (kind == PG_RMAX) {
#pragma omp simd reduction(max : most) reduction(| : nans)
        for (int64_t i = 0; i < n; i++) nans |= x[i] != x[i], most = x[i] > most ? x[i] : most;
    } else if (kind == PG_RMIN) {
#pragma omp simd reduction(min : least) reduction(| : nans)
        for (int64_t i = 0; i < n; i++) nans |= x[i] != x[i], least = x[i] < least ? x[i] : least;
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += (double)x[i];
    }
    acc[0] = nans ? NAN : kind == PG_RMAX ? (double)most : kind == PG_RMIN ? (double)least : sum;
}

/* acc[j] = kind over n rows, `inner` numbers apart, for `width` columns */
PG_CLONES static void N(columns)(double *acc, const REAL *x, int64_t n, int64_t inner,
                                 int64_t width, int kind) {
    int sums = kind == PG_SUM || kind == PG_MEAN;
    for (int64_t j = 0; j < width; j++) acc[j] = sums || !n ? 0 : (double)x[j];
    for (int64_t k = 0; k < n; k++, x += inner) {
        if (sums)
            for (int64_t j = 0; j < width; j++) acc[j] += (double)x[j];
        else if (kind == PG_RMAX)
            for (int64_t j = 0; j < width; j++)
                acc[j] = x[j] > acc[j] || x[j] != x[j] ? (double)x[j] : acc[j];
        else
            for (int64_t j = 0; j < width; j++)
                acc[j] = x[j] < acc[j] || x[j] != x[j] ? (double)x[j] : acc[j];
    }
}

static void N(store)(REAL *y, const double *acc, int64_t width, double factor, int add) {
    for (int64_t j = 0; j < width; j++) y[j] = (REAL)((add ? (double)y[j] : 0) + acc[j] * factor);
}

/* y (+)= scale * x; same: x is one number for all */
PG_CLONES static void N(spread)(REAL *y, const REAL *x, REAL scale, int64_t n, int same, int add) {
    const REAL one = n ? scale * x[0] : 0;
    if (same && add)
        for (int64_t i = 0; i < n; i++) y[i] += one;
    else if (same)
        for (int64_t i = 0; i < n; i++) y[i] = one;
    else if (add)
        for (int64_t i = 0; i < n; i++) y[i] += scale * x[i];
    else
        for (int64_t i = 0; i < n; i++) y[i] = scale * x[i];
}

/* dx (+)= dy at the first of n rows where x is y, 0 at the others; a NaN is found like a number */
PG_CLONES static void N(pick)(REAL *dx, const REAL *dy, const REAL *x, const REAL *y, int64_t n,
                              int64_t inner, int64_t width, int add) {
    uint8_t found[TILE] = {0};
    for (int64_t k = 0; k < n; k++, x += inner, dx += inner)
        for (int64_t j = 0; j < width; j++) {
            int hit = !found[j] && (x[j] == y[j] || (x[j] != x[j] && y[j] != y[j]));
            found[j] |= (uint8_t)hit;
            dx[j] = (add ? dx[j] : 0) + (hit ? dy[j] : 0);
        }
}
