/* CUDA kernels against their CPU twins: sum of squares, clip, bad numbers, AdamW, SGD; and every
 * kernel of the first half on empty tensors.  See twins.h. */
#include "twins.h"

#define LARGE 3000005 /* elements: all blocks of any card go round */

#define cpu_do(name, ...)  ok(twins.cpu->name(__VA_ARGS__, PG_F64, NULL))
#define cuda_do(name, ...) ok(twins.cuda->name(__VA_ARGS__, twins.stream))

static int64_t case_size(int i) {
    twins.shift = i % 3 == 2 ? 1 : 0;
    return i == 0 ? LARGE : i == 1 ? 1 : draw_size(5000);
}

/* A step block as a training step fills it, on an aligned address. */
static twin_array draw_step(int finite) {
    double s[PG_STEP_SIZE] = {0};
    s[PG_STEP_RATE] = draw(1e-4, 1e-1), s[PG_STEP_BIAS1] = draw(0.1, 1);
    s[PG_STEP_BIAS2] = draw(0.05, 1), s[PG_STEP_CLIP] = draw(0.1, 1);
    s[PG_STEP_SCALE] = 1024, s[PG_STEP_FINITE] = finite, s[PG_STEP_SUMSQ] = draw(0, 100);
    int shift = twins.shift;
    twins.shift = 0;
    twin_array step = input_of(s, PG_STEP_SIZE, PG_F64);
    twins.shift = shift;
    return step;
}

/* Runs of parameters that cover n elements: some of no length, some of one. */
typedef struct {
    int64_t runs, ends[40];
    float factors[80];
    twin_array ends_on, factors_on;
} runs_case;

static void draw_runs(runs_case *r, int64_t n) {
    double ends[40], factors[80];
    r->runs = draw_int(1, 40);
    for (int64_t k = 0; k < r->runs; k++) {
        int64_t before = k ? r->ends[k - 1] : 0, left = n - before;
        int64_t length = k % 5 == 3 ? 0 : draw_int(0, left / 2 + 1 < left ? left / 2 + 1 : left);
        r->ends[k] = k == r->runs - 1 ? n : before + length;
        r->factors[2 * k] = k % 2 ? 0 : (float)draw(0, 0.3);
        r->factors[2 * k + 1] = k % 4 == 2 ? 0 : (float)draw(0.5, 2);
        ends[k] = (double)r->ends[k];
        factors[2 * k] = r->factors[2 * k], factors[2 * k + 1] = r->factors[2 * k + 1];
    }
    int shift = twins.shift;
    twins.shift = 0;
    r->ends_on = input_of(ends, r->runs, PG_I64);
    r->factors_on = input_of(factors, 2 * r->runs, PG_F32);
    twins.shift = shift;
}

static void adamw(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 12; i++) {
            int64_t n = case_size(i);
            int dtype = floating[f], finite = i != 4;
            runs_case r;
            draw_runs(&r, n);
            twin_array step = draw_step(finite), value = input(n, dtype), grad = input(n, dtype);
            twin_array m = input(n, dtype), v = input_in(n, dtype, 0.01, 1);
            cpu_do(adamw, value.host, NULL, grad.host, m.host, v.host, n, r.ends, r.factors, r.runs,
                   step.host, 0.9, 0.95, 1e-8, PG_F64, -1, PG_F64);
            cuda_do(adamw, value.device, NULL, grad.device, m.device, v.device, n, r.ends_on.device,
                    r.factors_on.device, r.runs, step.device, 0.9, 0.95, 1e-8, dtype, -1, dtype,
                    dtype);
            near(value, finite ? bound(dtype) : 0);
            near(m, finite ? bound(dtype) : 0);
            near(v, finite ? bound(dtype) : 0);
            twins_free();
        }
}

static void sgd(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 14; i++) {
            int64_t n = case_size(i);
            int dtype = floating[f], finite = i != 4, momentum = i % 3, nesterov = i % 3 == 2;
            double mu = momentum ? 0.9 : 0, dampening = i % 3 == 1 ? 0.2 : 0;
            runs_case r;
            draw_runs(&r, n);
            twin_array step = draw_step(finite), value = input(n, dtype), grad = input(n, dtype);
            int first = finite && momentum && i > 8;
            twin_array m = output(n, dtype, !first); /* not read the first time */
            cpu_do(sgd, value.host, NULL, grad.host, momentum ? m.host : NULL, n, r.ends, r.factors,
                   r.runs, step.host, mu, dampening, nesterov, first, PG_F64, -1, PG_F64);
            cuda_do(sgd, value.device, NULL, grad.device, momentum ? m.device : NULL, n,
                    r.ends_on.device, r.factors_on.device, r.runs, step.device, mu, dampening,
                    nesterov, first, dtype, -1, dtype, dtype);
            near(value, finite ? bound(dtype) : 0);
            near(m, finite && momentum ? bound(dtype) : 0);
            twins_free();
        }
}

/* Adds to what is there, and a second call gives the same bits. */
static void sum_of_squares(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 12; i++) {
            int64_t n = case_size(i);
            twin_array x = input(n, floating[f]), step = draw_step(1), again = step;
            again = input_of(step.host, PG_STEP_SIZE, PG_F64);
            cpu_do(sumsq, step.host, x.host, n, NULL, NULL, 0);
            cuda_do(sumsq, step.device, x.device, n, NULL, NULL, 0, floating[f]);
            cuda_do(sumsq, again.device, x.device, n, NULL, NULL, 0, floating[f]);
            near(step, TOLERANCE_F64);
            double *one = device_numbers(&step, "step"), *two = device_numbers(&again, "again");
            assert_memory_equal(one, two, PG_STEP_SIZE * sizeof(double));
            free(one), free(two);
            twins_free();
        }
}

static void clip(void **state) {
    (void)state;
    need_gpu();
    const double norms[] = {0, 1e-3, 1, 1e9}, sums[] = {0, 1, 1e12, INFINITY, NAN};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 5; k++) {
            double s[PG_STEP_SIZE] = {0};
            s[PG_STEP_SCALE] = 256, s[PG_STEP_SUMSQ] = sums[k];
            twin_array step = input_of(s, PG_STEP_SIZE, PG_F64);
            ok(twins.cpu->clip(step.host, norms[i], NULL));
            ok(twins.cuda->clip(step.device, norms[i], twins.stream));
            double *got = device_numbers(&step, "step");
            for (int slot = 0; slot < PG_STEP_SIZE; slot++)
                if (!(fabs(got[slot] - step.host[slot]) <= TOLERANCE_F64 * fabs(got[slot])) &&
                    memcmp(&got[slot], &step.host[slot], 8) &&
                    !(isnan(got[slot]) && isnan(step.host[slot])))
                    fail_msg("clip: slot %d is %g, not %g", slot, got[slot], step.host[slot]);
            free(got);
            twins_free();
        }
}

static void bad_numbers(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 9; i++) {
            int64_t n = case_size(i), bad = 0;
            double *x = twin_doubles(n);
            for (int64_t k = 0; k < n; k++) x[k] = draw(-1, 1);
            for (int64_t k = 0; i % 2 && k < n; k += draw_int(1, 400), bad++)
                x[k] = bad % 3 == 0 ? NAN : bad % 3 == 1 ? INFINITY : -INFINITY;
            twin_array on = input_of(x, n, floating[f]);
            int64_t found = twins.cuda->count_nonfinite(on.device, n, floating[f], twins.stream);
            assert_int_equal(found, bad);
            free(x);
            twins_free();
        }
    assert_int_equal(twins.cuda->count_nonfinite(NULL, 100, PG_I32, twins.stream), 0);
}

/* Nothing to do is done without a launch of no blocks; sums over nothing are 0. */
static void empty(void **state) {
    (void)state;
    need_gpu();
    const pg_index_map map = {0, 0, 0};
    const int64_t dims[] = {3, 0};
    const int32_t order[] = {1, 0};
    for (int f = 0; f < 4; f++) {
        int t = floating[f];
        twin_array none = input(0, t), y = output(5, t, 0), w = input(5, t), step = draw_step(1);
        void *x = none.device;
        cuda_do(fill, x, 1, 0, t);
        cuda_do(cast, x, x, 0, t, t == PG_F32 ? PG_F64 : PG_F32);
        cuda_do(random_uniform, x, 0, 1, 1, 0, 1, map, t);
        cuda_do(random_normal, x, 0, 1, 1, 0, 1, map, t);
        cuda_do(unary, x, x, 0, PG_EXP, t);
        cuda_do(unary_grad, x, x, x, 0, PG_EXP, 0, t);
        cuda_do(binary, x, x, x, 0, 0, PG_ADD, 0, t);
        cuda_do(axpby, x, x, 1, 1, 0, t, t);
        cuda_do(dropout, x, x, 0, 0.5, step.device, 1, map, 0, t);
        cuda_do(rmsnorm, x, NULL, x, x, NULL, w.device, 1e-5, 0, 5, t);
        cuda_do(layernorm, x, NULL, x, x, x, NULL, w.device, w.device, 1e-5, 0, 5, t);
        cuda_do(reduce, x, x, PG_SUM, 0, 7, 1, 0, t, t);
        cuda_do(expand, x, x, 1, 0, 7, 1, 0, t);
        cuda_do(move, x, x, 0, 3, 0, 3, 0, 2, 5, 0, t);
        cuda_do(permute, x, x, 2, dims, order, 0, t);
        cuda_do(adamw, x, NULL, x, x, x, 0, NULL, NULL, 0, step.device, 0.9, 0.95, 1e-8, t, -1, t,
                t);
        cuda_do(sgd, x, NULL, x, NULL, 0, NULL, NULL, 0, step.device, 0, 0, 0, 0, t, -1, t, t);
        cuda_do(sumsq, step.device, x, 0, NULL, NULL, 0, t);
        assert_int_equal(twins.cuda->count_nonfinite(x, 0, t, twins.stream), 0);
        cuda_do(reduce, y.device, x, PG_SUM, 1, 0, 5, 0, t, t);
        for (int k = 0; k < 5; k++) y.host[k] = 0;
        same(y);
        same(step);
        twins_free();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {twin_test(adamw),          twin_test(sgd),
                                       twin_test(sum_of_squares), twin_test(clip),
                                       twin_test(bad_numbers),    twin_test(empty)};
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
