/* rmsnorm and layernorm: values against plain loops in double, gradients against finite differences
 * in f64, f32 against f64, and the same bits for any number of threads. */
#include <omp.h>
#include "check.h"
#include "tensors.h"
#include "../../kernels/cpu.h"

#define DIFFERENCE 1e-6 /* finite differences in f64 agree to this */

/* All that one norm reads and writes, in doubles: rows n of d. */
typedef struct {
    int64_t n, d;
    int layer, weights, bias; /* layernorm? with w? with b? */
    double *x, *w, *b, *dy, *y, *mean, *rstd, *dx, *dw, *db;
} problem;

static double *drawn(int64_t n, double middle) {
    double *v = doubles(n);
    for (int64_t i = 0; i < n; i++) v[i] = middle + chance();
    return v;
}

static problem new_problem(int64_t n, int64_t d, int layer, int weights, int bias) {
    problem p = {n,
                 d,
                 layer,
                 weights,
                 bias,
                 drawn(n * d, 0.3),
                 drawn(d, 1),
                 drawn(d, 0),
                 drawn(n * d, 0),
                 doubles(n * d),
                 doubles(n),
                 doubles(n),
                 doubles(n * d),
                 doubles(d),
                 doubles(d)};
    return p;
}
static void free_problem(problem *p) {
    double *all[] = {p->x, p->w, p->b, p->dy, p->y, p->mean, p->rstd, p->dx, p->dw, p->db};
    for (int i = 0; i < 10; i++) free(all[i]);
}

/* The definition, loop by loop. */
static void forward(const problem *p, double *y, double *mean, double *rstd) {
    for (int64_t i = 0; i < p->n; i++) {
        const double *x = p->x + i * p->d;
        double m = 0, v = 0;
        for (int64_t j = 0; p->layer && j < p->d; j++) m += x[j] / (double)p->d;
        for (int64_t j = 0; j < p->d; j++) v += (x[j] - m) * (x[j] - m) / (double)p->d;
        mean[i] = m;
        rstd[i] = 1 / sqrt(v + 1e-5);
        for (int64_t j = 0; j < p->d; j++)
            y[i * p->d + j] = (x[j] - m) * rstd[i] * (p->weights ? p->w[j] : 1) +
                              (p->layer && p->bias ? p->b[j] : 0);
    }
}

static double objective(const problem *p) { /* sum of y * dy: its gradients are dx, dw, db */
    double *y = doubles(p->n * p->d), *mean = doubles(p->n), *rstd = doubles(p->n), sum = 0;
    forward(p, y, mean, rstd);
    for (int64_t i = 0; i < p->n * p->d; i++) sum += y[i] * p->dy[i];
    free(y), free(mean), free(rstd);
    return sum;
}

static void differences(const problem *p, double *v, int64_t n, double *out) {
    for (int64_t i = 0; i < n; i++) {
        double h = 1e-5, keep = v[i], up, down;
        v[i] = keep + h, up = objective(p);
        v[i] = keep - h, down = objective(p);
        v[i] = keep;
        out[i] = (up - down) / (2 * h);
    }
}

static void *as(const double *v, int64_t n, int dtype) { /* a block of that dtype; v NULL: NaN */
    void *block = malloc((size_t)n * 8 + 64);
    memset(block, 0xff, (size_t)n * 8 + 64);
    if (v) ok(cpu_cast(block, v, n, dtype, PG_F64, NULL));
    return block;
}
static double off(const void *got, const double *want, int64_t n, int dtype) {
    double *wide = doubles(n);
    ok(cpu_cast(wide, got, n, PG_F64, dtype, NULL));
    double error = error_norm(wide, want, n);
    free(wide);
    return error;
}

/* Runs the kernels at one dtype; each result stays within tolerance of p's own (dx, dw, db where
 * gradients is set), first written over NaN, then added once more. */
static void check_kernels(const problem *p, int dtype, int gradients) {
    int64_t n = p->n, d = p->d;
    double most = dtype == PG_F32 ? TOLERANCE_F32 : TOLERANCE_F64, *expect = doubles(n * d + d);
    double slack = gradients == 2 ? DIFFERENCE : most; /* 2: p's gradients are differences */
    void *x = as(p->x, n * d, dtype), *w = p->weights ? as(p->w, d, dtype) : NULL;
    void *b = p->bias ? as(p->b, d, dtype) : NULL, *dy = as(p->dy, n * d, dtype);
    void *y = as(NULL, n * d, dtype), *mean = as(NULL, n, dtype), *rstd = as(NULL, n, dtype);
    void *dx = as(NULL, n * d, dtype), *dw = as(NULL, d, dtype), *db = as(NULL, d, dtype);
    if (p->layer) ok(cpu_layernorm(y, NULL, mean, rstd, x, NULL, w, b, 1e-5, n, d, dtype, NULL));
    else ok(cpu_rmsnorm(y, NULL, rstd, x, NULL, w, 1e-5, n, d, dtype, NULL));
    assert_true(off(y, p->y, n * d, dtype) <= most && off(rstd, p->rstd, n, dtype) <= most);
    if (p->layer) assert_true(off(mean, p->mean, n, dtype) <= most);
    void *scratch = malloc((size_t)cpu_layernorm_grad_scratch(n, d) + 1);
    for (int add = 0; gradients && add < 2; add++) {
        if (p->layer)
            ok(cpu_layernorm_grad(dx, w ? dw : NULL, b ? db : NULL, dy, x, w, mean, rstd, NULL, n,
                                  d, add, add, add, scratch, dtype, NULL));
        else
            ok(cpu_rmsnorm_grad(dx, w ? dw : NULL, dy, x, w, rstd, NULL, n, d, add, add, scratch,
                                dtype, NULL));
        for (int64_t i = 0; i < n * d; i++) expect[i] = p->dx[i] * (1 + add);
        assert_true(off(dx, expect, n * d, dtype) <= slack);
        for (int64_t i = 0; i < d; i++) expect[i] = p->dw[i] * (1 + add);
        if (w) assert_true(off(dw, expect, d, dtype) <= slack);
        for (int64_t i = 0; i < d; i++) expect[i] = p->db[i] * (1 + add);
        if (p->layer && b) assert_true(off(db, expect, d, dtype) <= slack);
    }
    void *all[] = {x, w, b, dy, y, mean, rstd, dx, dw, db, scratch, expect};
    for (int i = 0; i < 12; i++) free(all[i]);
}

static void values_and_slopes(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{1, 1}, {3, 7}, {19, 33}, {0, 5}};
    for (int s = 0; s < 4; s++)
        for (int which = 0; which < 8; which++) {
            problem p = new_problem(sizes[s][0], sizes[s][1], which & 1, which >> 1 & 1,
                                    which >> 2);
            forward(&p, p.y, p.mean, p.rstd);
            differences(&p, p.x, p.n * p.d, p.dx);
            if (p.weights) differences(&p, p.w, p.d, p.dw);
            if (p.bias && p.layer) differences(&p, p.b, p.d, p.db);
            /* with d = 1 layernorm's dx is 0, and differences are all noise */
            check_kernels(&p, PG_F64, p.d > 1 ? 2 : 0);
            check_kernels(&p, PG_F32, 0);
            free_problem(&p);
        }
}

/* The gradient in plain double loops, for sizes at which threads and parts come in. */
static void exact_gradient(problem *p) {
    for (int64_t i = 0; i < p->n; i++) {
        const double *x = p->x + i * p->d, *dy = p->dy + i * p->d;
        double one = 0, two = 0;
        for (int64_t j = 0; j < p->d; j++) {
            double g = dy[j] * (p->weights ? p->w[j] : 1), xhat = (x[j] - p->mean[i]) * p->rstd[i];
            one += p->layer ? g : 0, two += g * xhat;
            p->dw[j] += dy[j] * xhat, p->db[j] += dy[j];
        }
        for (int64_t j = 0; j < p->d; j++) {
            double g = dy[j] * (p->weights ? p->w[j] : 1), xhat = (x[j] - p->mean[i]) * p->rstd[i];
            p->dx[i * p->d + j] = p->rstd[i] * (g - one / (double)p->d - xhat * two / (double)p->d);
        }
    }
}

static void many_rows(void **state) {
    (void)state;
    for (int which = 0; which < 4; which++) {
        problem p = new_problem(1003, 133, which & 1, which >> 1, 1);
        forward(&p, p.y, p.mean, p.rstd);
        exact_gradient(&p);
        check_kernels(&p, PG_F64, 1);
        check_kernels(&p, PG_F32, 1);
        free_problem(&p);
    }
}

static void same_bits_on_any_threads(void **state) {
    (void)state;
    int64_t n = 1003, d = 133;
    problem p = new_problem(n, d, 1, 1, 1);
    forward(&p, p.y, p.mean, p.rstd);
    float *x = as(p.x, n * d, PG_F32), *dy = as(p.dy, n * d, PG_F32), *w = as(p.w, d, PG_F32);
    float *mean = as(p.mean, n, PG_F32), *rstd = as(p.rstd, n, PG_F32), *out[2];
    void *scratch = malloc((size_t)cpu_layernorm_grad_scratch(n, d));
    int before = omp_get_max_threads();
    for (int run = 0; run < 2; run++) {
        out[run] = as(NULL, n * d + 2 * d, PG_F32);
        omp_set_num_threads(run ? 3 : 1);
        ok(cpu_layernorm_grad(out[run], out[run] + n * d, out[run] + n * d + d, dy, x, w, mean,
                              rstd, NULL, n, d, 0, 0, 0, scratch, PG_F32, NULL));
    }
    omp_set_num_threads(before);
    assert_memory_equal(out[0], out[1], (size_t)(n * d + 2 * d) * 4);
    void *all[] = {x, dy, w, mean, rstd, out[0], out[1], scratch};
    for (int i = 0; i < 8; i++) free(all[i]);
    free_problem(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(values_and_slopes),
                                       cmocka_unit_test(many_rows),
                                       cmocka_unit_test(same_bits_on_any_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
