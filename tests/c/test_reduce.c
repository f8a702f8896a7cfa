/* Reductions, expand and the gradient of max and min against plain loops; sums of many numbers. */
#include <omp.h>
#include "tensors.h"

typedef struct {
    int64_t outer, n, inner;
} split;

static pg_tensor *shaped(int dtype, split s, int whole) { /* whole: with the dim n */
    return whole ? tensor(dtype, s.outer, s.n, s.inner) : tensor(dtype, s.outer, s.inner);
}

static const split splits[] = {{1, 1, 1},     {3, 5, 7},      {1, 70001, 1}, {300, 129, 1},
                               {1, 7001, 65}, {2, 4099, 130}, {33, 3, 400},  {1, 9, 70000},
                               {0, 4, 3},     {3, 4, 0}};
#define SPLITS ((int)(sizeof splits / sizeof *splits))

static void plain(double *y, pg_tensor *x, split s, int kind) {
    for (int64_t o = 0; o < s.outer; o++)
        for (int64_t i = 0; i < s.inner; i++) {
            double sum = 0, most = -INFINITY, least = INFINITY;
            for (int64_t k = 0; k < s.n; k++) {
                double v = at(x, (o * s.n + k) * s.inner + i);
                sum += v, most = fmax(most, v), least = fmin(least, v);
            }
            y[o * s.inner + i] = kind == PG_SUM    ? sum
                                 : kind == PG_MEAN ? sum / (double)s.n
                                 : kind == PG_RMAX ? most
                                                   : least;
        }
}

static void reduce_values(void **state) {
    (void)state;
    for (int c = 0; c < SPLITS; c++)
        for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
            split s = splits[c];
            pg_tensor *x = scatter(shaped(dtype, s, 1), 0.5, 1), *y = shaped(dtype, s, 0);
            int64_t n = pg_tensor_count(y);
            double *want = doubles(n);
            for (int kind = PG_SUM; kind <= PG_RMIN; kind++) {
                plain(want, x, s, kind);
                memset(pg_tensor_data(y), 0xff, (size_t)(n * pg_dtype_size(dtype)));
                ok(pg_reduce(y, x, kind, 1, 0));
                close_to(y, want);
                ok(pg_reduce(y, x, kind, 1, 1));
                for (int64_t i = 0; i < n; i++) want[i] *= 2;
                close_to(y, want);
            }
            free(want);
            pg_tensor_free(x), pg_tensor_free(y);
        }
}

/* dim -1: everything; other dims of a 4-D tensor; NaN wins in max and min. */
static void reduce_dims(void **state) {
    (void)state;
    pg_tensor *x = scatter(tensor(PG_F64, 4, 3, 5, 2), 0, 1), *all = tensor(PG_F64);
    pg_tensor *y = tensor(PG_F64, 4, 5, 2);
    double sum = 0, want[40];
    for (int i = 0; i < 120; i++) sum += at(x, i);
    ok(pg_reduce(all, x, PG_SUM, -1, 0));
    close_to(all, &sum);
    plain(want, x, (split){4, 3, 10}, PG_MEAN);
    ok(pg_reduce(y, x, PG_MEAN, 1, 0));
    close_to(y, want);
    put_at(x, 7, NAN);
    ok(pg_reduce(all, x, PG_RMAX, -1, 0));
    assert_true(isnan(at(all, 0)));
    ok(pg_reduce(all, x, PG_RMIN, -1, 0));
    assert_true(isnan(at(all, 0)));
    pg_tensor_free(x), pg_tensor_free(all), pg_tensor_free(y);
}

/* Ten million times 0.1 in f32: a plain f32 sum is off by percents. */
static void long_sums(void **state) {
    (void)state;
    int64_t n = 10000000;
    pg_tensor *x = tensor(PG_F32, n), *y = tensor(PG_F32);
    ok(pg_fill(x, 0.1));
    ok(pg_reduce(y, x, PG_SUM, -1, 0));
    assert_true(fabs(at(y, 0) - (double)0.1f * (double)n) < 0.1);
    pg_tensor_free(x), pg_tensor_free(y);
}

static void same_bits_on_any_threads(void **state) {
    (void)state;
    int before = omp_get_max_threads();
    for (int c = 0; c < SPLITS; c++) {
        split s = splits[c];
        pg_tensor *x = scatter(shaped(PG_F64, s, 1), 0, 1), *a = shaped(PG_F64, s, 0),
                  *b = shaped(PG_F64, s, 0);
        omp_set_num_threads(1);
        ok(pg_reduce(a, x, PG_SUM, 1, 0));
        omp_set_num_threads(3);
        ok(pg_reduce(b, x, PG_SUM, 1, 0));
        omp_set_num_threads(before);
        assert_memory_equal(pg_tensor_data(a), pg_tensor_data(b), (size_t)pg_tensor_count(a) * 8);
        pg_tensor_free(x), pg_tensor_free(a), pg_tensor_free(b);
    }
}

static void expand_values(void **state) {
    (void)state;
    for (int c = 0; c < SPLITS; c++)
        for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
            split s = splits[c];
            pg_tensor *x = scatter(shaped(dtype, s, 0), 0, 1), *y = shaped(dtype, s, 1);
            int64_t n = pg_tensor_count(y);
            double *want = doubles(n);
            for (int64_t i = 0; i < n; i++)
                want[i] = 0.5 * at(x, i / (s.n * s.inner) * s.inner + i % s.inner);
            ok(pg_expand(y, x, 1, 0.5, 0));
            close_to(y, want);
            ok(pg_expand(y, x, 1, 1, 1));
            for (int64_t i = 0; i < n; i++) want[i] *= 3;
            close_to(y, want);
            free(want);
            pg_tensor_free(x), pg_tensor_free(y);
        }
}

/* Numbers from a few values, so that the best comes often: only its first place gets dy. */
static void extreme_slopes(void **state) {
    (void)state;
    for (int c = 0; c < SPLITS; c++)
        for (int kind = PG_RMAX; kind <= PG_RMIN; kind++) {
            split s = splits[c];
            pg_tensor *x = shaped(PG_F32, s, 1), *y = shaped(PG_F32, s, 0);
            pg_tensor *dx = shaped(PG_F32, s, 1), *dy = scatter(shaped(PG_F32, s, 0), 3, 1);
            int64_t n = pg_tensor_count(x);
            for (int64_t i = 0; i < n; i++) put_at(x, i, floor(4 * chance()));
            ok(pg_reduce(y, x, kind, 1, 0));
            double *want = doubles(n);
            for (int64_t o = 0; o < s.outer; o++)
                for (int64_t i = 0; i < s.inner; i++)
                    for (int64_t k = 0; k < s.n; k++) {
                        int64_t j = (o * s.n + k) * s.inner + i;
                        if (at(x, j) != at(y, o * s.inner + i)) continue;
                        want[j] = at(dy, o * s.inner + i);
                        break;
                    }
            ok(pg_reduce_grad(dx, dy, x, y, kind, 1, 0));
            close_to(dx, want);
            ok(pg_reduce_grad(dx, dy, x, y, kind, 1, 1));
            for (int64_t i = 0; i < n; i++) want[i] *= 2;
            close_to(dx, want);
            free(want);
            pg_tensor_free(x), pg_tensor_free(y), pg_tensor_free(dx), pg_tensor_free(dy);
        }
}

static void refusals(void **state) {
    (void)state;
    pg_tensor *x = tensor(PG_F32, 2, 3), *y = tensor(PG_F32, 2), *i = tensor(PG_I32, 2, 3);
    pg_tensor *none = tensor(PG_F32, 2, 0), *d = tensor(PG_F64, 2);
    refuses(PG_ESHAPE, "sum: [2,3] f32 without dim 0 does not make [2] f32; 3 numbers",
            pg_reduce(y, x, PG_SUM, 0, 0));
    refuses(PG_ESHAPE, "mean: dim 2 of [2,3] f32; there are dims 0 to 1",
            pg_reduce(y, x, PG_MEAN, 2, 0));
    refuses(PG_ESHAPE, "does not make [2] f64", pg_reduce(d, x, PG_SUM, 1, 0));
    refuses(PG_ESHAPE, "it must be f32, f64, bf16 or f16", pg_reduce(y, i, PG_SUM, 1, 0));
    refuses(PG_ESHAPE, "max: dim 1 of [2,0] f32 is empty", pg_reduce(y, none, PG_RMAX, 1, 0));
    ok(pg_reduce(y, none, PG_SUM, 1, 0));
    assert_true(at(y, 0) == 0 && at(y, 1) == 0);
    refuses(PG_EINVAL, "sum and mean use expand", pg_reduce_grad(x, y, x, y, PG_SUM, 1, 0));
    refuses(PG_ESHAPE, "expand: [2,3] f32 without dim 0", pg_expand(x, y, 0, 1, 0));
    refuses(PG_EINVAL, "share memory", pg_reduce_grad(x, y, x, y, PG_RMAX, 1, 0));
    pg_tensor_free(x), pg_tensor_free(y), pg_tensor_free(i), pg_tensor_free(none),
        pg_tensor_free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(reduce_values, nothing_alive),
        cmocka_unit_test_teardown(reduce_dims, nothing_alive),
        cmocka_unit_test_teardown(long_sums, nothing_alive),
        cmocka_unit_test_teardown(same_bits_on_any_threads, nothing_alive),
        cmocka_unit_test_teardown(expand_values, nothing_alive),
        cmocka_unit_test_teardown(extreme_slopes, nothing_alive),
        cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
