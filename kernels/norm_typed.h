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

PG_CLONES static void N(add_rows)(REAL *sum, const REAL *x, const REAL *r, int64_t d) {
    for (int64_t j = 0; j < d; j++) sum[j] = x[j] + r[j];
}

/* Row i of x; or, with r, of sum = x + r, which is written here. */
static const REAL *N(row_of)(REAL *sum, const REAL *x, const REAL *r, int64_t i, int64_t d) {
    if (!r) return x + i * d;
    N(add_rows)(sum + i * d, x + i * d, r + i * d, d);
    return sum + i * d;
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

/* dx = base + rstd * (g - mean(g) - xhat * mean(g * xhat)), means over the row; base may be dx or
 * NULL */
PG_CLONES static void N(row_grad)(REAL *dx, const REAL *base, const REAL *dy, const REAL *x,
                                  const REAL *w, REAL mean, REAL rstd, double mean_g,
                                  double mean_gx, int64_t d) {
    const REAL one = (REAL)mean_g, two = (REAL)mean_gx;
#define GRADIENT(g) rstd *((g)-one - (x[j] - mean) * rstd * two)
    if (w && base) {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) dx[j] = base[j] + GRADIENT(dy[j] * w[j]);
    } else if (w) {
        for (int64_t j = 0; j < d; j++) dx[j] = GRADIENT(dy[j] * w[j]);
    } else if (base) {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) dx[j] = base[j] + GRADIENT(dy[j]);
    } else {
        for (int64_t j = 0; j < d; j++) dx[j] = GRADIENT(dy[j]);
    }
#undef GRADIENT
}

/* dw += rows of dy * xhat; mean NULL: xhat = x * rstd.  Four rows at a time, so that dw, in double
 * and too long for registers, is touched once for all of them. */
PG_CLONES static void N(weight_sums)(double *restrict dw, const REAL *dy, const REAL *x,
                                     const REAL *mean, const REAL *rstd, int64_t rows, int64_t d) {
#define TERM(k) (double)dy[(k)*d + j] * (double)((x[(k)*d + j] - m##k) * s##k)
    for (; rows >= 4; rows -= 4, dy += 4 * d, x += 4 * d, rstd += 4, mean += mean ? 4 : 0) {
        const REAL m0 = mean ? mean[0] : 0, m1 = mean ? mean[1] : 0, s0 = rstd[0], s1 = rstd[1];
        const REAL m2 = mean ? mean[2] : 0, m3 = mean ? mean[3] : 0, s2 = rstd[2], s3 = rstd[3];
        for (int64_t j = 0; j < d; j++) dw[j] += (TERM(0) + TERM(1)) + (TERM(2) + TERM(3));
    }
    for (; rows > 0; rows--, dy += d, x += d, rstd++, mean += mean ? 1 : 0) {
        const REAL m0 = mean ? mean[0] : 0, s0 = rstd[0];
        for (int64_t j = 0; j < d; j++) dw[j] += TERM(0);
    }
#undef TERM
}

/* db += rows of dy */
PG_CLONES static void N(bias_sums)(double *restrict db, const REAL *dy, int64_t rows, int64_t d) {
    for (; rows >= 4; rows -= 4, dy += 4 * d)
        for (int64_t j = 0; j < d; j++)
            db[j] += ((double)dy[j] + (double)dy[d + j]) +
                     ((double)dy[2 * d + j] + (double)dy[3 * d + j]);
    for (; rows > 0; rows--, dy += d)
        for (int64_t j = 0; j < d; j++) db[j] += (double)dy[j];
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
    const REAL *dy = a->dy, *x = a->x, *mean = a->mean, *rstd = a->rstd, *base = a->base;
    REAL *dx = a->dx;
    int64_t d = a->d;
    for (int64_t r = r0; r < r1; r += ROWS) {
        int64_t end = pg_min64(r1, r + ROWS);
        for (int64_t i = r; dx && i < end; i++) {
            double one, two;
            REAL m = mean ? mean[i] : 0;
            N(row_sums)(&one, &two, dy + i * d, x + i * d, a->w, m, rstd[i], d);
            if (!mean) one = 0; /* rmsnorm: nothing was centred */
            one /= (double)d, two /= (double)d;
            N(row_grad)(dx + i * d, base ? base + i * d : NULL, dy + i * d, x + i * d, a->w, m,
                        rstd[i], one, two, d);
        }
        if (dw)
            N(weight_sums)(dw, dy + r * d, x + r * d, mean ? mean + r : NULL, rstd + r, end - r, d);
        if (db) N(bias_sums)(db, dy + r * d, end - r, d);
    }
}
