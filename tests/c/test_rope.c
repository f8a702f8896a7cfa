/* Rope and swiglu: value against a loop in double, gradients against finite differences. */
#include "numbers.h"

typedef struct {
    pg_tensor *x, *y, *cos, *sin, *weights;
    int64_t heads, start;
} rope;

static rope prepare(int dtype, int64_t T, int64_t C, int64_t heads, int64_t half, int64_t start) {
    rope r = {.x = noisy(dtype, SHAPE(2, T, C)),
              .y = poisoned(dtype, SHAPE(2, T, C)),
              .weights = noisy(dtype, SHAPE(2, T, C)),
              .heads = heads,
              .start = start,
              .cos = poisoned(dtype, SHAPE(start + T + 1, half)),
              .sin = poisoned(dtype, SHAPE(start + T + 1, half))};
    ok(pg_rope_table(r.cos, r.sin, 10000, 3));
    return r;
}

static void check_value(int dtype, int64_t T, int64_t C, int64_t heads, int64_t half,
                        int64_t start) {
    rope r = prepare(dtype, T, C, heads, half, start);
    double *x = numbers(r.x), *want = numbers(r.x);
    for (int64_t row = 0; row < 2 * T; row++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < half; i++) {
                double angle = (double)(3 + start + row % T) * pow(10000, -2.0 * i / (2.0 * half));
                int64_t low = row * C + h * 2 * half + i, high = low + half;
                want[low] = x[low] * cos(angle) - x[high] * sin(angle);
                want[high] = x[high] * cos(angle) + x[low] * sin(angle);
            }
    ok(pg_rope(r.y, r.x, r.cos, r.sin, heads, start, 1, 0));
    near_to(r.y, want, tolerance(dtype));
    ok(pg_rope(r.x, r.x, r.cos, r.sin, heads, start, 1, 0)); /* in place */
    near_to(r.x, want, tolerance(dtype));
    ok(pg_rope(r.x, r.x, r.cos, r.sin, heads, start, -1, 0)); /* and back */
    near_to(r.x, x, tolerance(dtype));
    for (int64_t i = 0; i < 2 * T * C; i++) want[i] += 0.5;
    set_all(r.y, 0.5);
    ok(pg_rope(r.y, r.x, r.cos, r.sin, heads, start, 1, 1));
    near_to(r.y, want, tolerance(dtype));
    numbers_end(NULL);
}

static void rope_agrees_with_a_loop(void **state) {
    (void)state;
    for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
        check_value(dtype, 5, 17, 2, 3, 4); /* five more columns are copied */
        check_value(dtype, 70, 256, 4, 32, 0);
        check_value(dtype, 3, 8, 1, 4, 2);
    }
}

static double weighed_rope(void *context) {
    rope *r = context;
    ok(pg_rope(r->y, r->x, r->cos, r->sin, r->heads, r->start, 1, 0));
    return weighed(r->y, r->weights);
}

static void rope_gradient(void **state) {
    (void)state;
    rope r = prepare(PG_F64, 3, 11, 2, 2, 1);
    pg_tensor *dx = poisoned(PG_F64, SHAPE(2, 3, 11));
    ok(pg_rope(dx, r.weights, r.cos, r.sin, r.heads, r.start, -1, 0));
    slopes(dx, r.x, weighed_rope, &r);
}

static void check_swiglu(int dtype, int64_t n, int64_t f) {
    pg_tensor *x = noisy(dtype, SHAPE(n, 2 * f)), *y = poisoned(dtype, SHAPE(n, f));
    double *a = numbers(x), *want = doubles(n * f);
    for (int64_t i = 0; i < n * f; i++) {
        double gate = a[i / f * 2 * f + i % f];
        want[i] = gate / (1 + exp(-gate)) * a[i / f * 2 * f + f + i % f];
    }
    ok(pg_swiglu(y, x));
    near_to(y, want, tolerance(dtype));
    numbers_end(NULL);
}

static double weighed_swiglu(void *context) {
    rope *r = context;
    ok(pg_swiglu(r->y, r->x));
    return weighed(r->y, r->weights);
}

static void swiglu_value_and_gradient(void **state) {
    (void)state;
    for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
        check_swiglu(dtype, 3, 7);
        check_swiglu(dtype, 130, 352);
    }
    rope r = {.x = noisy(PG_F64, SHAPE(3, 10)),
              .y = poisoned(PG_F64, SHAPE(3, 5)),
              .weights = noisy(PG_F64, SHAPE(3, 5))};
    pg_tensor *dx = poisoned(PG_F64, SHAPE(3, 10)), *half = born(PG_F64, SHAPE(3, 10));
    ok(pg_swiglu_grad(dx, r.weights, r.x, 0));
    slopes(dx, r.x, weighed_swiglu, &r);
    double *want = numbers(dx);
    set_all(half, 0.5);
    ok(pg_swiglu_grad(half, r.weights, r.x, 1));
    ok(pg_swiglu_grad(r.x, r.weights, r.x, 0)); /* in place */
    near_to(r.x, want, TOLERANCE_F64);
    for (int64_t i = 0; i < 30; i++) want[i] += 0.5;
    near_to(half, want, TOLERANCE_F64);
}

static void bad_calls_are_told(void **state) {
    (void)state;
    rope r = prepare(PG_F32, 4, 16, 2, 4, 0);
    pg_tensor *flat = noisy(PG_F32, SHAPE(4, 16)), *y = noisy(PG_F32, SHAPE(4, 7));
    refuses(PG_ESHAPE, "3 heads of 8 columns do not lie in its 16 columns",
            pg_rope(r.y, r.x, r.cos, r.sin, 3, 0, 1, 0));
    refuses(PG_ESHAPE, "positions [2,6) lie outside the table's 5 lines",
            pg_rope(r.y, r.x, r.cos, r.sin, 2, 2, 1, 0));
    refuses(PG_EINVAL, "sign 0", pg_rope(r.y, r.x, r.cos, r.sin, 2, 0, 0, 0));
    refuses(PG_EINVAL, "share memory", pg_rope(r.x, r.x, r.cos, r.sin, 2, 0, 1, 1));
    refuses(PG_ESHAPE, "it must be [B,T,C]", pg_rope(flat, flat, r.cos, r.sin, 2, 0, 1, 0));
    refuses(PG_EINVAL, "theta -1", pg_rope_table(r.cos, r.sin, -1, 0));
    refuses(PG_ESHAPE, "twice its columns", pg_swiglu(y, flat));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(rope_agrees_with_a_loop, numbers_end),
        cmocka_unit_test_teardown(rope_gradient, numbers_end),
        cmocka_unit_test_teardown(swiglu_value_and_gradient, numbers_end),
        cmocka_unit_test_teardown(bad_calls_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
