/* Functions of one tensor and of two, axpby and dropout: values against libm, slopes against finite
 * differences in f64, broadcasts, NaN, and what is refused. */
#include "tensors.h"
#include "../../kernels/philox.h"

#define DIFFERENCE  1e-6 /* finite differences in f64 agree to this */
#define UNARY_KINDS (PG_ABS + 1)

static double by_libm(double x, int kind) {
    switch (kind) {
    case PG_RELU: return x > 0 ? x : 0;
    case PG_SILU: return x / (1 + exp(-x));
    case PG_GELU: return x * 0.5 * erfc(-x / sqrt(2));
    case PG_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case PG_TANH: return tanh(x);
    case PG_SIGMOID: return 1 / (1 + exp(-x));
    case PG_EXP: return exp(x);
    case PG_LOG: return log(x);
    case PG_SQRT: return sqrt(x);
    case PG_SQUARE: return x * x;
    case PG_NEG: return -x;
    default: return fabs(x);
    }
}

static void unary_values(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 17, 50021};
    for (int kind = 0; kind < UNARY_KINDS; kind++)
        for (int dtype = PG_F32; dtype <= PG_F64; dtype++)
            for (int s = 0; s < 4; s++) {
                int positive = kind == PG_LOG || kind == PG_SQRT;
                pg_tensor *x = scatter(tensor(dtype, sizes[s]), positive ? 5.01 : 0, 5);
                pg_tensor *y = tensor(dtype, sizes[s]);
                double *want = numbers_of(x);
                for (int64_t i = 0; i < sizes[s]; i++) want[i] = by_libm(want[i], kind);
                ok(pg_unary(y, x, kind));
                close_to(y, want);
                ok(pg_unary(x, x, kind)); /* in place */
                close_to(x, want);
                free(want);
                pg_tensor_free(x), pg_tensor_free(y);
            }
}

/* dx = dy f'(x), against (f(x+h) - f(x-h)) / 2h; and dx added to what is there. */
static void unary_slopes(void **state) {
    (void)state;
    int64_t n = 1001;
    for (int kind = 0; kind < UNARY_KINDS; kind++) {
        int positive = kind == PG_LOG || kind == PG_SQRT;
        pg_tensor *x = scatter(tensor(PG_F64, n), positive ? 3 : 0, 2.5);
        pg_tensor *dy = scatter(tensor(PG_F64, n), 0, 1), *dx = tensor(PG_F64, n);
        pg_tensor *x32 = tensor(PG_F32, n), *dy32 = tensor(PG_F32, n), *dx32 = tensor(PG_F32, n);
        double *want = doubles(n), *got, h = 1e-5;
        for (int64_t i = 0; i < n; i++)
            want[i] = at(dy, i) * (by_libm(at(x, i) + h, kind) - by_libm(at(x, i) - h, kind)) / 2 /
                      h;
        ok(pg_unary_grad(dx, dy, x, kind, 0));
        got = numbers_of(dx);
        assert_true(error_norm(got, want, n) < DIFFERENCE);
        ok(pg_copy(x32, x));
        ok(pg_copy(dy32, dy));
        ok(pg_unary_grad(dx32, dy32, x32, kind, 0));
        close_to(dx32, got);
        ok(pg_unary_grad(dx, dy, x, kind, 1));
        for (int64_t i = 0; i < n; i++) got[i] *= 2;
        close_to(dx, got);
        free(want), free(got);
        pg_tensor_free(x), pg_tensor_free(dy), pg_tensor_free(dx);
        pg_tensor_free(x32), pg_tensor_free(dy32), pg_tensor_free(dx32);
    }
}

/* A NaN goes through every function, and infinities give their limits. */
static void unary_ends(void **state) {
    (void)state;
    const struct {
        int kind;
        double minus, plus;
    } limits[] = {{PG_RELU, 0, INFINITY},
                  {PG_GELU_TANH, NAN, INFINITY},
                  {PG_TANH, -1, 1},
                  {PG_SIGMOID, 0, 1},
                  {PG_EXP, 0, INFINITY},
                  {PG_LOG, NAN, INFINITY},
                  {PG_SQUARE, INFINITY, INFINITY}};
    pg_tensor *x = tensor(PG_F32, 3), *y = tensor(PG_F32, 3);
    for (int kind = 0; kind < UNARY_KINDS; kind++) {
        ok(pg_fill(x, NAN));
        ok(pg_fill(y, 0));
        ok(pg_unary(y, x, kind));
        for (int i = 0; i < 3; i++) assert_true(isnan(at(y, i)));
    }
    put_at(x, 0, -INFINITY), put_at(x, 1, INFINITY), put_at(x, 2, 1);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        ok(pg_unary(y, x, limits[i].kind));
        assert_true(at(y, 0) == limits[i].minus || (isnan(at(y, 0)) && isnan(limits[i].minus)));
        assert_true(at(y, 1) == limits[i].plus);
    }
    pg_tensor_free(x), pg_tensor_free(y);
}

static double combine(double a, double b, int kind) {
    switch (kind) {
    case PG_ADD: return a + b;
    case PG_SUB: return a - b;
    case PG_MUL: return a * b;
    case PG_DIV: return a / b;
    case PG_MAX: return a > b ? a : b;
    default: return a < b ? a : b;
    }
}

/* b of the shape of a, the last dims of it, one number; into a new tensor, added, in place */
static void binary_values(void **state) {
    (void)state;
    for (int kind = PG_ADD; kind <= PG_MIN; kind++)
        for (int dtype = PG_F32; dtype <= PG_F64; dtype++)
            for (int shape = 0; shape < 4; shape++) {
                pg_tensor *a = scatter(tensor(dtype, 37, 11, 129), 0, 2), *y;
                pg_tensor *b = shape == 0   ? tensor(dtype, 37, 11, 129)
                               : shape == 1 ? tensor(dtype, 11, 129)
                               : shape == 2 ? tensor(dtype, 129)
                                            : tensor(dtype);
                scatter(b, 3, 1);
                y = tensor(dtype, 37, 11, 129);
                int64_t n = pg_tensor_count(a), nb = pg_tensor_count(b);
                double *want = doubles(n);
                for (int64_t i = 0; i < n; i++) want[i] = combine(at(a, i), at(b, i % nb), kind);
                ok(pg_binary(y, a, b, kind, 0));
                close_to(y, want);
                ok(pg_fill(y, 10));
                ok(pg_binary(y, a, b, kind, 1));
                ok(pg_binary(a, a, b, kind, 0));
                close_to(a, want);
                for (int64_t i = 0; i < n; i++) want[i] += 10;
                close_to(y, want);
                free(want);
                pg_tensor_free(a), pg_tensor_free(b), pg_tensor_free(y);
            }
}

static void axpby_values(void **state) {
    (void)state;
    int64_t n = 33001;
    pg_tensor *x = scatter(tensor(PG_F32, n), 0, 1), *y = tensor(PG_F32, n);
    double *want = numbers_of(x);
    for (int64_t i = 0; i < n; i++) want[i] *= 2;
    ok(pg_axpby(y, x, 2, 0)); /* y was NaN: beta 0 writes */
    close_to(y, want);
    for (int64_t i = 0; i < n; i++) want[i] = 3 * at(x, i) - 0.5 * want[i];
    ok(pg_axpby(y, x, 3, -0.5));
    close_to(y, want);
    for (int64_t i = 0; i < n; i++) want[i] += at(x, i);
    ok(pg_axpby(y, x, 1, 1));
    close_to(y, want);
    free(want);
    pg_tensor_free(x), pg_tensor_free(y);
}

static void dropout_masks(void **state) {
    (void)state;
    int64_t n = 300 * 128;
    pg_tensor *x = tensor(PG_F32, 300, 128), *y = tensor(PG_F32, 300, 128);
    pg_tensor *half = tensor(PG_F32, 300, 64), *y_half = tensor(PG_F32, 300, 64);
    pg_tensor *step = tensor(PG_F64, PG_STEP_SIZE);
    ok(pg_fill(x, 1));
    ok(pg_fill(half, 1));
    ok(pg_fill(step, 0));
    put_at(step, PG_STEP_RANDOM, 4503599627370497.0);
    ok(pg_dropout(y, x, 0.25, step, 9, 1000, 0, 0, 0));
    uint64_t stream = pg_philox_stream(4503599627370497, 9);
    double kept = 0;
    for (int64_t i = 0; i < n; i++) {
        int keep = pg_philox_uniform(stream, 1000 + i) >= 0.25f;
        assert_true(at(y, i) == (keep ? (float)(1 / 0.75) : 0));
        kept += keep;
    }
    assert_true(fabs(kept / (double)n - 0.75) < 0.012);
    ok(pg_dropout(y_half, half, 0.25, step, 9, 1000 + 64, 64, 128, 0)); /* the right half of it */
    for (int64_t i = 0; i < n / 2; i++)
        assert_true(at(y_half, i) == at(y, i / 64 * 128 + 64 + i % 64));
    ok(pg_dropout(y, x, 0, NULL, 9, 0, 0, 0, 0));
    ok(pg_dropout(y, x, 0, NULL, 9, 0, 0, 0, 1));
    for (int64_t i = 0; i < n; i++) assert_true(at(y, i) == 2);
    ok(pg_dropout(y, x, 1, NULL, 9, 0, 0, 0, 0));
    for (int64_t i = 0; i < n; i++) assert_true(at(y, i) == 0);
    pg_tensor_free(x), pg_tensor_free(y), pg_tensor_free(half), pg_tensor_free(y_half);
    pg_tensor_free(step);
}

static void refusals(void **state) {
    (void)state;
    pg_tensor *a = tensor(PG_F32, 3, 4), *b = tensor(PG_F32, 4, 3), *c = tensor(PG_F32, 3);
    pg_tensor *d = tensor(PG_F64, 3, 4), *i = tensor(PG_I32, 3, 4);
    pg_tensor *flat = NULL, *part = NULL;
    ok(pg_tensor_view(&flat, a, 0, 1, (int64_t[]){8}));
    ok(pg_tensor_view(&part, a, 1, 1, (int64_t[]){8}));
    refuses(PG_ESHAPE, "gelu: y is [3,4] f32, x is [4,3] f32; their shapes",
            pg_unary(a, b, PG_GELU));
    refuses(PG_ESHAPE, "gelu: y is [3,4] f32, x is [3,4] f64; their dtypes",
            pg_unary(a, d, PG_GELU));
    refuses(PG_ESHAPE, "relu: x is [3,4] i32; it must be f32, f64, bf16 or f16 (cast it)",
            pg_unary(i, i, PG_RELU));
    refuses(PG_EINVAL, "kind 99 is unknown", pg_unary(a, a, 99));
    refuses(PG_EINVAL, "exp: dy is missing", pg_unary_grad(a, NULL, a, PG_EXP, 0));
    refuses(PG_EINVAL, "share memory in part", pg_unary(flat, part, PG_EXP));
    refuses(PG_ESHAPE, "mul: a is [3,4] f32, b is [3] f32; b must have",
            pg_binary(a, a, c, PG_MUL, 0));
    refuses(PG_ESHAPE, "axpby: y is [3,4] f32, x is [4,3] f32", pg_axpby(a, b, 1, 1));
    refuses(PG_EINVAL, "dropout: p is 1.5", pg_dropout(a, a, 1.5, NULL, 0, 0, 0, 0, 0));
    refuses(PG_ESHAPE, "step is [3] f32; a step block is [16] f64",
            pg_dropout(a, a, 0.5, c, 0, 0, 0, 0, 0));
    pg_interrupt(1);
    refuses(PG_EINTR, "interrupted", pg_unary(a, a, PG_EXP));
    pg_interrupt(0);
    pg_tensor_free(a), pg_tensor_free(b), pg_tensor_free(c), pg_tensor_free(d);
    pg_tensor_free(i), pg_tensor_free(flat), pg_tensor_free(part);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(unary_values, nothing_alive),
                                       cmocka_unit_test_teardown(unary_slopes, nothing_alive),
                                       cmocka_unit_test_teardown(unary_ends, nothing_alive),
                                       cmocka_unit_test_teardown(binary_values, nothing_alive),
                                       cmocka_unit_test_teardown(axpby_values, nothing_alive),
                                       cmocka_unit_test_teardown(dropout_masks, nothing_alive),
                                       cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
