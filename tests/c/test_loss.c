/* Softmax and cross-entropy: value against a loop in double, gradients, ignored rows, wrong ids. */
#include "numbers.h"

#define IGNORE (-100)

static void check_softmax(int dtype, int64_t n, int64_t v, int logarithm) {
    pg_tensor *x = noisy(dtype, SHAPE(n, v)), *y = poisoned(dtype, SHAPE(n, v));
    double *a = numbers(x), *want = doubles(n * v);
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t j = 0; j < v; j++) sum += exp(a[i * v + j]);
        for (int64_t j = 0; j < v; j++)
            want[i * v + j] = logarithm ? a[i * v + j] - log(sum) : exp(a[i * v + j]) / sum;
    }
    ok(pg_softmax(y, x, logarithm));
    near_to(y, want, tolerance(dtype));
    ok(pg_softmax(x, x, logarithm)); /* in place */
    near_to(x, want, tolerance(dtype));
    numbers_end(NULL);
}

static void softmax_agrees_with_a_loop(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        int dtype = kind % 2 ? PG_F64 : PG_F32;
        check_softmax(dtype, 5, 7, kind / 2);
        check_softmax(dtype, 3, 2500, kind / 2);
        check_softmax(dtype, 33, 2, kind / 2);
        check_softmax(dtype, 33, 1, 0);
        check_softmax(dtype, 40, 517, kind / 2);
    }
}

static void softmax_survives_large_numbers(void **state) {
    (void)state;
    pg_tensor *x = born(PG_F32, SHAPE(1, 3)), *y = poisoned(PG_F32, SHAPE(1, 3));
    double want[] = {0.5, 0, 0.5};
    set_all(x, 3e38);
    set(x, 1, -INFINITY);
    ok(pg_softmax(y, x, 0));
    near_to(y, want, TOLERANCE_F32);
}

typedef struct {
    pg_tensor *x, *y, *weights, *targets, *out, *rows, *lse, *step;
    int logarithm, by_rows;
} problem;

static double weighed_softmax(void *context) {
    problem *p = context;
    ok(pg_softmax(p->y, p->x, p->logarithm));
    return weighed(p->y, p->weights);
}

static void softmax_gradients(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        problem p = {.x = noisy(PG_F64, SHAPE(4, 9)),
                     .y = born(PG_F64, SHAPE(4, 9)),
                     .weights = noisy(PG_F64, SHAPE(4, 9)),
                     .logarithm = kind / 2};
        pg_tensor *dx = poisoned(PG_F64, SHAPE(4, 9)), *half = born(PG_F64, SHAPE(4, 9));
        ok(pg_softmax(p.y, p.x, p.logarithm));
        ok(pg_softmax_grad(dx, p.weights, p.y, p.logarithm, 0));
        double *want = numbers(dx);
        for (int64_t i = 0; i < 36; i++) want[i] += 0.5;
        set_all(half, 0.5);
        ok(pg_softmax_grad(half, p.weights, p.y, p.logarithm, 1));
        near_to(half, want, TOLERANCE_F64);
        slopes(dx, p.x, weighed_softmax, &p);
        numbers_end(NULL);
    }
}

static problem loss_problem(int dtype, int dtype_ids, int64_t n, int64_t v) {
    problem p = {.x = noisy(dtype, SHAPE(n, v)),
                 .targets = some_ids(dtype_ids, v, SHAPE(n)),
                 .out = poisoned(dtype, SHAPE(2)),
                 .rows = poisoned(dtype, SHAPE(n)),
                 .lse = poisoned(dtype, SHAPE(n))};
    for (int64_t i = 1; i < n; i += 3) set(p.targets, i, IGNORE);
    return p;
}

static double loss(void *context) {
    problem *p = context;
    ok(pg_cross_entropy(p->out, p->rows, p->lse, p->x, p->targets, IGNORE, p->step));
    return p->by_rows ? weighed(p->rows, p->weights) : ((double *)pg_tensor_data(p->out))[0];
}

static void check_loss(int dtype, int dtype_ids, int64_t n, int64_t v, double inverse) {
    problem p = loss_problem(dtype, dtype_ids, n, v);
    if (inverse > 0) {
        p.step = born(PG_F64, SHAPE(PG_STEP_SIZE));
        set_all(p.step, NAN);
        set(p.step, PG_STEP_INV_TOKENS, inverse);
    }
    double *x = numbers(p.x), *t = numbers(p.targets), *rows = doubles(n), *lse = doubles(n);
    double want[2] = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        if ((int64_t)t[i] == IGNORE) continue;
        double sum = 0;
        for (int64_t j = 0; j < v; j++) sum += exp(x[i * v + j]);
        lse[i] = log(sum);
        rows[i] = lse[i] - x[i * v + (int64_t)t[i]];
        want[0] += rows[i];
        want[1]++;
    }
    want[0] *= inverse > 0 ? inverse : 1 / want[1];
    ok(pg_cross_entropy(p.out, p.rows, p.lse, p.x, p.targets, IGNORE, p.step));
    near_to(p.out, want, tolerance(dtype));
    assert_true(fabs(numbers(p.out)[0] - want[0]) <= tolerance(dtype) * want[0]);
    near_to(p.rows, rows, tolerance(dtype));
    near_to(p.lse, lse, tolerance(dtype));
    ok(pg_cross_entropy(p.out, NULL, p.lse, p.x, p.targets, IGNORE, p.step)); /* rows not wanted */
    near_to(p.out, want, tolerance(dtype));
    numbers_end(NULL);
}

static void loss_agrees_with_a_loop(void **state) {
    (void)state;
    for (int kind = 0; kind < 8; kind++) {
        int dtype = kind & 1 ? PG_F64 : PG_F32, ids = kind & 2 ? PG_I64 : PG_I32;
        check_loss(dtype, ids, 11, 13, kind & 4 ? 0.01 : 0);
        check_loss(dtype, ids, 37, 1500, kind & 4 ? 0.01 : 0);
    }
}

static void loss_gradients(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        problem p = loss_problem(PG_F64, PG_I32, 7, 5);
        p.by_rows = kind & 1;
        p.weights = noisy(PG_F64, SHAPE(7));
        pg_tensor *one = born(PG_F64, SHAPE(1)), *dx = poisoned(PG_F64, SHAPE(7, 5));
        pg_tensor *half = born(PG_F64, SHAPE(7, 5)), *dloss = p.by_rows ? p.weights : one;
        set(one, 0, 1);
        if (kind & 2) {
            p.step = born(PG_F64, SHAPE(PG_STEP_SIZE));
            set_all(p.step, 0.125);
        }
        loss(&p);
        ok(pg_cross_entropy_grad(dx, dloss, p.x, p.targets, p.lse, p.out, IGNORE, p.step, 0));
        double *want = numbers(dx);
        slopes(dx, p.x, loss, &p);
        loss(&p); /* lse as it was before the differences */
        set_all(half, 0.5);
        ok(pg_cross_entropy_grad(half, dloss, p.x, p.targets, p.lse, p.out, IGNORE, p.step, 1));
        ok(pg_cross_entropy_grad(p.x, dloss, p.x, p.targets, p.lse, p.out, IGNORE, p.step, 0));
        near_to(p.x, want, TOLERANCE_F64); /* in place */
        for (int64_t i = 0; i < 35; i++) want[i] += 0.5;
        near_to(half, want, TOLERANCE_F64);
        numbers_end(NULL);
    }
}

/* Logits (1000, 0): loss 0 for class 0, 1000 for class 1. */
static void loss_of_large_logits(void **state) {
    (void)state;
    problem p = {.x = born(PG_F32, SHAPE(2, 2)),
                 .targets = born(PG_I32, SHAPE(2)),
                 .out = poisoned(PG_F32, SHAPE(2)),
                 .rows = poisoned(PG_F32, SHAPE(2)),
                 .lse = poisoned(PG_F32, SHAPE(2))};
    for (int64_t i = 0; i < 4; i++) set(p.x, i, i % 2 ? 0 : 1000);
    set(p.targets, 0, 0);
    set(p.targets, 1, 1);
    ok(pg_cross_entropy(p.out, p.rows, p.lse, p.x, p.targets, -1, NULL));
    double *rows = numbers(p.rows), *out = numbers(p.out);
    assert_true(rows[0] == 0 && rows[1] == 1000 && out[0] == 500 && out[1] == 2);
}

/* No valid row: loss 0, count 0, gradient 0, never NaN. */
static void all_rows_ignored(void **state) {
    (void)state;
    problem p = loss_problem(PG_F32, PG_I64, 4, 6);
    set_all(p.targets, IGNORE);
    pg_tensor *one = born(PG_F32, SHAPE(1)), *dx = poisoned(PG_F32, SHAPE(4, 6));
    set(one, 0, 1);
    ok(pg_cross_entropy(p.out, p.rows, p.lse, p.x, p.targets, IGNORE, NULL));
    ok(pg_cross_entropy_grad(dx, one, p.x, p.targets, p.lse, p.out, IGNORE, NULL, 0));
    double *out = numbers(p.out), *d = numbers(dx), *zeros = doubles(24);
    assert_true(out[0] == 0 && out[1] == 0);
    assert_memory_equal(d, zeros, 24 * sizeof *d);
}

static void bad_calls_are_told(void **state) {
    (void)state;
    problem p = loss_problem(PG_F32, PG_I32, 4, 6);
    pg_tensor *deep = born(PG_I32, SHAPE(2, 2)), *few = born(PG_I32, SHAPE(3));
    pg_tensor *other = noisy(PG_F64, SHAPE(4, 6)), *two = born(PG_F32, SHAPE(2));
    set_all(deep, 1);
    set(deep, 3, 6);
    refuses(
        PG_EINVAL,
        "cross_entropy: target 6 at row 1, column 1 is outside the vocabulary [0,6) (-100 is ignored)",
        pg_cross_entropy(p.out, p.rows, p.lse, p.x, deep, IGNORE, NULL));
    set(deep, 3, -1);
    refuses(PG_EINVAL, "target -1 at row 1",
            pg_cross_entropy(p.out, p.rows, p.lse, p.x, deep, IGNORE, NULL));
    refuses(PG_ESHAPE, "each row needs one target",
            pg_cross_entropy(p.out, p.rows, p.lse, p.x, few, IGNORE, NULL));
    refuses(PG_ESHAPE, "must be i32 or i64",
            pg_cross_entropy(p.out, p.rows, p.lse, p.x, p.lse, IGNORE, NULL));
    refuses(PG_ESHAPE, "a step block is",
            pg_cross_entropy(p.out, p.rows, p.lse, p.x, p.targets, IGNORE, two));
    refuses(PG_ESHAPE, "one for each row",
            pg_cross_entropy_grad(p.x, two, p.x, p.targets, p.lse, p.out, IGNORE, NULL, 0));
    refuses(PG_ESHAPE, "dtypes must be equal", pg_softmax(other, p.x, 0));
    refuses(PG_ESHAPE, "shapes must be equal", pg_softmax(p.lse, p.x, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(softmax_agrees_with_a_loop, numbers_end),
        cmocka_unit_test_teardown(softmax_survives_large_numbers, numbers_end),
        cmocka_unit_test_teardown(softmax_gradients, numbers_end),
        cmocka_unit_test_teardown(loss_agrees_with_a_loop, numbers_end),
        cmocka_unit_test_teardown(loss_gradients, numbers_end),
        cmocka_unit_test_teardown(loss_of_large_logits, numbers_end),
        cmocka_unit_test_teardown(all_rows_ignored, numbers_end),
        cmocka_unit_test_teardown(bad_calls_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
