/* numbers.h: tensors for tests of ops: made, filled, read as doubles, and compared by norm; slopes
 * compared with finite differences.  All that a test makes here is freed by numbers_end(). */
#ifndef PG_TEST_NUMBERS_H
#define PG_TEST_NUMBERS_H
#include "../check.h"

#define TOLERANCE_DIFFERENCES 1e-6 /* central differences in f64 with DIFFERENCE */
#define DIFFERENCE            1e-5
#define SHAPE(...)                                                                                 \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

#define MOST 256
static struct {
    pg_tensor *tensors[MOST];
    void *blocks[MOST];
    int n_tensors, n_blocks;
    uint64_t noise;
} made = {.noise = 1};

__attribute__((unused)) static double *doubles(int64_t n) {
    double *p = calloc((size_t)(n ? n : 1), sizeof *p);
    assert_non_null(p);
    assert_true(made.n_blocks < MOST);
    return made.blocks[made.n_blocks++] = p;
}

__attribute__((unused)) static pg_tensor *born(int dtype, int ndim, const int64_t *dims) {
    pg_tensor *t = NULL;
    ok(pg_tensor_new(&t, dtype, ndim, dims));
    assert_true(made.n_tensors < MOST);
    return made.tensors[made.n_tensors++] = t;
}

/* Numbers of t as doubles. */
__attribute__((unused)) static double *numbers(pg_tensor *t) {
    int64_t n = pg_tensor_count(t);
    double *p = doubles(n);
    void *data = pg_tensor_data(t);
    for (int64_t i = 0; i < n; i++) {
        switch (pg_tensor_dtype(t)) {
        case PG_F32: p[i] = (double)((float *)data)[i]; break;
        case PG_F64: p[i] = ((double *)data)[i]; break;
        case PG_I32: p[i] = ((int32_t *)data)[i]; break;
        default: p[i] = (double)((int64_t *)data)[i];
        }
    }
    return p;
}

__attribute__((unused)) static void set(pg_tensor *t, int64_t i, double value) {
    void *data = pg_tensor_data(t);
    switch (pg_tensor_dtype(t)) {
    case PG_F32: ((float *)data)[i] = (float)value; break;
    case PG_F64: ((double *)data)[i] = value; break;
    case PG_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    default: ((int64_t *)data)[i] = (int64_t)value;
    }
}

__attribute__((unused)) static void set_all(pg_tensor *t, double value) {
    for (int64_t i = 0; i < pg_tensor_count(t); i++) set(t, i, value);
}

/* The next number in [-1,1), the same in every run. */
__attribute__((unused)) static double noise(void) {
    made.noise = made.noise * 6364136223846793005u + 1442695040888963407u;
    return (double)(made.noise >> 11) * 0x1p-52 - 1;
}

__attribute__((unused)) static pg_tensor *noisy(int dtype, int ndim, const int64_t *dims) {
    pg_tensor *t = born(dtype, ndim, dims);
    for (int64_t i = 0; i < pg_tensor_count(t); i++) set(t, i, noise());
    return t;
}

/* Full of NaNs: an op that reads what it should write shows at once. */
__attribute__((unused)) static pg_tensor *poisoned(int dtype, int ndim, const int64_t *dims) {
    pg_tensor *t = born(dtype, ndim, dims);
    set_all(t, NAN);
    return t;
}

/* i32 ids in [0,v). */
__attribute__((unused)) static pg_tensor *some_ids(int dtype, int64_t v, int ndim,
                                                   const int64_t *dims) {
    pg_tensor *t = born(dtype, ndim, dims);
    for (int64_t i = 0; i < pg_tensor_count(t); i++)
        set(t, i, floor((noise() + 1) / 2 * (double)v));
    return t;
}

__attribute__((unused)) static double tolerance(int dtype) {
    return dtype == PG_F64 ? TOLERANCE_F64 : TOLERANCE_F32;
}

#define near_to(t, want, limit)                                                                    \
    do {                                                                                           \
        double near_error = error_norm(numbers(t), want, pg_tensor_count(t));                      \
        if (!(near_error <= (limit)))                                                              \
            fail_msg("%s is off by %.3g, more than %.3g", #t, near_error, (double)(limit));        \
    } while (0)

/* sum of t * weights */
__attribute__((unused)) static double weighed(pg_tensor *t, pg_tensor *weights) {
    double *a = numbers(t), *b = numbers(weights), sum = 0;
    for (int64_t i = 0; i < pg_tensor_count(t); i++) sum += a[i] * b[i];
    made.n_blocks -= 2;
    free(a), free(b);
    return sum;
}

/* dx against the central differences of value(context) by each number of x (f64). */
__attribute__((unused)) static void slopes(pg_tensor *dx, pg_tensor *x, double (*value)(void *),
                                           void *context) {
    int64_t n = pg_tensor_count(x);
    double *want = doubles(n), *at = numbers(x);
    for (int64_t i = 0; i < n; i++) {
        set(x, i, at[i] + DIFFERENCE);
        double above = value(context);
        set(x, i, at[i] - DIFFERENCE);
        want[i] = (above - value(context)) / (2 * DIFFERENCE);
        set(x, i, at[i]);
    }
    near_to(dx, want, TOLERANCE_DIFFERENCES);
}

__attribute__((unused)) static int numbers_end(void **state) {
    while (made.n_tensors) pg_tensor_free(made.tensors[--made.n_tensors]);
    while (made.n_blocks) free(made.blocks[--made.n_blocks]);
    return nothing_alive(state);
}
#endif
