/* norm_typed.h: the loops of norm.c over rows; see typed_twice.h.  All sums are in double. */

PG_CLONES static double N(dot)(const REAL *x, const REAL *y, int64_t d) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < d; j++) sum += (double)x[j] * (double)y[j];
    return sum;
}

PG_CLONES static double N(total)(const REAL *x, int64_t d) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < d; j++) sum += (double)x[j];
    return sum;
}

/* sum of (x - mean)^2: a second pass, since sum(x^2) - d mean^2 would cancel */
PG_CLONES static double N(spread)(const REAL *x, double mean, int64_t d) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < d; j++) sum += ((double)x[j] - mean) * ((double)x[j] - mean);
    return sum;
}

/* y = (x - mean) * rstd * w + b; w and b may be NULL */
PG_CLONES static void N(apply)(REAL *y, const REAL *x, const REAL *w, const REAL *b, REAL mean,
                               REAL rstd, int64_t d) {
    if (w && b)
        for (int64_t j = 0; j < d; j++) y[j] = (x[j] - mean) * rstd * w[j] + b[j];
    else if (w)
        for (int64_t j = 0; j < d; j++) y[j] = (x[j] - mean) * rstd * w[j];
    else if (b)
        for (int64_t j = 0; j < d; j++) y[j] = (x[j] - mean) * rstd + b[j];
    else
        for (int64_t j = 0; j < d; j++) y[j] = (x[j] - mean) * rstd;
}

/* one = sum of g, two = sum of g * xhat, where g = dy * w and xhat = (x - mean) * rstd */
PG_CLONES static void N(row_sums)(double *one, double *two, const REAL *dy, const REAL *x,
                                  const REAL *w, REAL mean, REAL rstd, int64_t d) {
    double a = 0, b = 0;
    if (w) {
#pragma omp simd reduction(+ : a, b)
        for (int64_t j = 0; j < d; j++) {
            double g = (double)dy[j] * (double)w[j];
            a += g;
            b += g * (double)((x[j] - mean) * rstd);
        }
    } else {
#pragma omp simd reduction(+ : a, b)
        for (int64_t j = 0; j < d; j++) {
            a += (double)dy[j];
            b += (double)dy[j] * (double)((x[j] - mean) * rstd);
        }
    }
    *one = a;
    *two = b;
}

/* dx (+)= rstd * (g - one - xhat * two); one and two are means over the row */
PG_CLONES static void N(row_grad)(REAL *dx, const REAL *dy, const REAL *x, const REAL *w, REAL mean,
                                  REAL rstd, REAL one, REAL two, int64_t d, int add) {
#define GRADIENT(g) rstd * ((g) - one - (x[j] - mean) * rstd * two)
    if (w && add)
        for (int64_t j = 0; j < d; j++) dx[j] += GRADIENT(dy[j] * w[j]);
    else if (w)
        for (int64_t j = 0; j < d; j++) dx[j] = GRADIENT(dy[j] * w[j]);
    else if (add)
        for (int64_t j = 0; j < d; j++) dx[j] += GRADIENT(dy[j]);
    else
        for (int64_t j = 0; j < d; j++) dx[j] = GRADIENT(dy[j]);
#undef GRADIENT
}

/* Adds rows of dy * xhat to dw, and of dy to db (each may be NULL); mean NULL: xhat = x * rstd.
 * Columns run innermost in tiles that stay in registers while ROWS rows pass. */
PG_CLONES static void N(column_sums)(double *dw, double *db, const REAL *dy, const REAL *x,
                                     const REAL *mean, const REAL *rstd, int64_t rows, int64_t d) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        int64_t n = pg_min64(ROWS, rows - r);
        for (int64_t j0 = 0; j0 < d; j0 += TILE) {
            double w[TILE] = {0}, b[TILE] = {0};
            int64_t width = pg_min64(TILE, d - j0);
            for (int64_t i = r; i < r + n; i++) {
                const REAL *g = dy + i * d + j0, *xi = x + i * d + j0;
                const REAL m = mean ? mean[i] : 0, s = rstd[i];
                if (width == TILE)
                    for (int64_t j = 0; j < TILE; j++) {
                        w[j] += (double)g[j] * (double)((xi[j] - m) * s);
                        b[j] += (double)g[j];
                    }
                else
                    for (int64_t j = 0; j < width; j++) {
                        w[j] += (double)g[j] * (double)((xi[j] - m) * s);
                        b[j] += (double)g[j];
                    }
            }
            for (int64_t j = 0; dw && j < width; j++) dw[j0 + j] += w[j];
            for (int64_t j = 0; db && j < width; j++) db[j0 + j] += b[j];
        }
    }
}

/* out (+)= the sum of `parts` rows of d doubles, in order, for columns [j0, j1) */
PG_CLONES static void N(gather)(REAL *out, const double *sums, int64_t parts, int64_t d, int64_t j0,
                                int64_t j1, int add) {
    for (int64_t j = j0; j < j1; j++) {
        double sum = 0;
        for (int64_t p = 0; p < parts; p++) sum += sums[p * d + j];
        out[j] = (REAL)(add ? (double)out[j] + sum : sum);
    }
}

/* The whole gradient of rows [r0, r1): dx, and this part's column sums. */
static void N(norm_grad_rows)(const norm_grad *a, int64_t r0, int64_t r1, double *dw, double *db) {
    const REAL *dy = a->dy, *x = a->x, *mean = a->mean, *rstd = a->rstd;
    REAL *dx = a->dx;
    int64_t d = a->d;
    for (int64_t r = r0; r < r1; r += ROWS) {
        int64_t end = pg_min64(r1, r + ROWS);
        for (int64_t i = r; dx && i < end; i++) {
            double one, two;
            REAL m = mean ? mean[i] : 0;
            N(row_sums)(&one, &two, dy + i * d, x + i * d, a->w, m, rstd[i], d);
            if (!mean) one = 0; /* rmsnorm: nothing was centred */
            N(row_grad)(dx + i * d, dy + i * d, x + i * d, a->w, m, rstd[i], (REAL)(one / d),
                        (REAL)(two / d), d, a->add_x);
        }
        if (dw || db)
            N(column_sums)(dw, db, dy + r * d, x + r * d, mean ? mean + r : NULL, rstd + r, end - r,
                           d);
    }
}
