/* norm.c: rmsnorm and layernorm over rows of d numbers, and their gradients.
 *
 * The two share their gradient: rmsnorm is layernorm that centres nothing (mean = 0).  Weight
 * gradients are sums over rows: rows are cut into at most PARTS parts, each summed in double into
 * its own line of scratch, and the lines are added in order; so threads do not change a bit. */
#include "cpu.h"

#define PARTS 32
#define ROWS  8  /* rows whose dy and x are still in the L2 cache for the second pass */
#define TILE  16 /* columns of the last sum, over parts, that a thread takes at a time */

typedef struct {
    void *dx;
    const void *dy, *x, *w, *mean, *rstd; /* mean NULL: rmsnorm; w NULL: ones */
    const void *base;                     /* what the gradient is added to, or NULL; may be dx */
    int64_t d;
} norm_grad;

#define TYPED_BODY "norm_typed.h"
#include "typed_twice.h"

/* 1 / sqrt(mean square + eps) by the mean of squares that the caller has summed */
static double inverse_root(double sum, int64_t d, double eps) {
    return 1 / sqrt(sum / (double)d + eps);
}

int cpu_rmsnorm(void *y, void *sum, void *rstd, const void *x, const void *r, const void *w,
                double eps, int64_t n, int64_t d, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("rmsnorm", dtype));
#pragma omp parallel for schedule(static) if (n * d >= CPU_MANY)
    for (int64_t i = 0; i < n; i++) {
        if (dtype == PG_F32) {
            const float *row = row_of_f32(sum, x, r, i, d);
            float root = (float)inverse_root(dot_f32(row, row, d), d, eps);
            ((float *)rstd)[i] = root;
            apply_f32((float *)y + i * d, row, w, NULL, 0, root, d);
        } else {
            const double *row = row_of_f64(sum, x, r, i, d);
            double root = inverse_root(dot_f64(row, row, d), d, eps);
            ((double *)rstd)[i] = root;
            apply_f64((double *)y + i * d, row, w, NULL, 0, root, d);
        }
    }
    return PG_OK;
}

int cpu_layernorm(void *y, void *sum, void *mean, void *rstd, const void *x, const void *r,
                  const void *w, const void *b, double eps, int64_t n, int64_t d, int dtype,
                  pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("layernorm", dtype));
#pragma omp parallel for schedule(static) if (n * d >= CPU_MANY)
    for (int64_t i = 0; i < n; i++) {
        if (dtype == PG_F32) {
            const float *row = row_of_f32(sum, x, r, i, d);
            float m = (float)(total_f32(row, d) / (double)d);
            float root = (float)inverse_root(spread_f32(row, m, d), d, eps);
            ((float *)mean)[i] = m;
            ((float *)rstd)[i] = root;
            apply_f32((float *)y + i * d, row, w, b, m, root, d);
        } else {
            const double *row = row_of_f64(sum, x, r, i, d);
            double m = total_f64(row, d) / (double)d;
            double root = inverse_root(spread_f64(row, m, d), d, eps);
            ((double *)mean)[i] = m;
            ((double *)rstd)[i] = root;
            apply_f64((double *)y + i * d, row, w, b, m, root, d);
        }
    }
    return PG_OK;
}

static int64_t parts_of(int64_t n) { return pg_min64(PARTS, (n + ROWS - 1) / ROWS); }

int64_t cpu_rmsnorm_grad_scratch(int64_t n, int64_t d) {
    return parts_of(n) * d * (int64_t)sizeof(double);
}
int64_t cpu_layernorm_grad_scratch(int64_t n, int64_t d) {
    return 2 * cpu_rmsnorm_grad_scratch(n, d);
}

/* dw and db are NULL where not wanted; scratch holds parts x d doubles for each */
static int grad(const norm_grad *a, void *dw, void *db, int64_t n, int add_w, int add_b,
                double *scratch, int dtype) {
    int64_t d = a->d, parts = parts_of(n), rows = parts ? (n + parts - 1) / parts : 0;
    double *dws = dw ? scratch : NULL, *dbs = db ? scratch + (dw ? parts * d : 0) : NULL;
    int64_t sums = parts * d * ((dw != NULL) + (db != NULL));
    if (sums > 0) memset(scratch, 0, (size_t)sums * sizeof(double));
#pragma omp parallel if (n * d >= CPU_MANY)
    {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < parts; p++) {
            int64_t r0 = pg_min64(n, p * rows), r1 = pg_min64(n, r0 + rows);
            double *w = dws ? dws + p * d : NULL, *b = dbs ? dbs + p * d : NULL;
            if (dtype == PG_F32) norm_grad_rows_f32(a, r0, r1, w, b);
            else norm_grad_rows_f64(a, r0, r1, w, b);
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < d; j += TILE) {
            int64_t end = pg_min64(d, j + TILE);
            if (dw && dtype == PG_F32) gather_f32(dw, dws, parts, d, j, end, add_w);
            else if (dw) gather_f64(dw, dws, parts, d, j, end, add_w);
            if (db && dtype == PG_F32) gather_f32(db, dbs, parts, d, j, end, add_b);
            else if (db) gather_f64(db, dbs, parts, d, j, end, add_b);
        }
    }
    return PG_OK;
}

int cpu_rmsnorm_grad(void *dx, void *dw, const void *dy, const void *x, const void *w,
                     const void *rstd, const void *base, int64_t n, int64_t d, int add_x, int add_w,
                     void *scratch, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("rmsnorm_grad", dtype));
    norm_grad a = {dx, dy, x, w, NULL, rstd, add_x ? dx : base, d};
    return grad(&a, dw, NULL, n, add_w, 0, scratch, dtype);
}

int cpu_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w,
                       const void *mean, const void *rstd, const void *base, int64_t n, int64_t d,
                       int add_x, int add_w, int add_b, void *scratch, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("layernorm_grad", dtype));
    norm_grad a = {dx, dy, x, w, mean, rstd, add_x ? dx : base, d};
    return grad(&a, dw, db, n, add_w, add_b, scratch, dtype);
}
