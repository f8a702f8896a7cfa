/* The end of a step: norms, clipping, bad numbers, AdamW and SGD against plain double loops. */
#include "tensors.h"

static pg_tensor *step_block(double rate, double scale) {
    pg_tensor *step = tensor(PG_F64, PG_STEP_SIZE);
    ok(pg_fill(step, 0));
    put_at(step, PG_STEP_RATE, rate);
    put_at(step, PG_STEP_SCALE, scale);
    put_at(step, PG_STEP_CLIP, 1);
    put_at(step, PG_STEP_FINITE, 1);
    return step;
}

/* True gradient (3,4) at scale 65536, largest norm 1: norm 5, and (0.6, 0.8) is applied. */
static void clip_scaled(void **state) {
    (void)state;
    pg_tensor *step = step_block(0, 65536), *g = tensor(PG_F32, 2);
    put_at(g, 0, 3 * 65536.0), put_at(g, 1, 4 * 65536.0);
    ok(pg_sumsq(step, g, NULL, NULL));
    ok(pg_clip(step, 1));
    assert_true(fabs(at(step, PG_STEP_NORM) - 5) < 1e-12 && at(step, PG_STEP_FINITE) == 1);
    assert_true(fabs(at(g, 0) * at(step, PG_STEP_CLIP) - 0.6) < 1e-12);
    assert_true(fabs(at(g, 1) * at(step, PG_STEP_CLIP) - 0.8) < 1e-12);
    ok(pg_clip(step, 0)); /* no clipping: the scale alone */
    assert_true(at(step, PG_STEP_CLIP) == 1.0 / 65536);
    ok(pg_clip(step, 10)); /* below the limit */
    assert_true(at(step, PG_STEP_CLIP) == 1.0 / 65536);
    pg_tensor_free(step), pg_tensor_free(g);
}

/* Squares of 1e20 do not fit f32; clipped to 1, each of 100 gradients is 0.1. */
static void clip_huge(void **state) {
    (void)state;
    pg_tensor *step = step_block(1, 1), *g = tensor(PG_F32, 100), *w = tensor(PG_F32, 100);
    pg_tensor *ends = tensor(PG_I64, 1), *factors = tensor(PG_F32, 1, 2);
    put_at(ends, 0, 100), put_at(factors, 0, 0), put_at(factors, 1, 1);
    ok(pg_fill(g, 1e20));
    ok(pg_fill(w, 0));
    ok(pg_sumsq(step, g, NULL, NULL));
    ok(pg_clip(step, 1));
    ok(pg_sgd(w, NULL, g, NULL, ends, factors, step, 0, 0, 0, 1));
    for (int i = 0; i < 100; i++) assert_true(fabs(at(w, i) + 0.1) < 1e-6);
    pg_tensor_free(step), pg_tensor_free(g), pg_tensor_free(w);
    pg_tensor_free(ends), pg_tensor_free(factors);
}

static void clip_ends(void **state) {
    (void)state;
    pg_tensor *step = step_block(0, 4), *g = tensor(PG_F32, 3);
    ok(pg_clip(step, 1)); /* no gradient at all */
    assert_true(at(step, PG_STEP_NORM) == 0 && at(step, PG_STEP_CLIP) == 0.25);
    assert_true(at(step, PG_STEP_FINITE) == 1);
    const double bad[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        put_at(step, PG_STEP_SUMSQ, 0);
        ok(pg_fill(g, bad[i]));
        ok(pg_sumsq(step, g, NULL, NULL));
        ok(pg_clip(step, 1));
        assert_true(at(step, PG_STEP_FINITE) == 0 && !isfinite(at(step, PG_STEP_NORM)));
    }
    pg_tensor_free(step), pg_tensor_free(g);
}

static void sums_of_squares(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 65, 100003};
    for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
        pg_tensor *step = step_block(0, 1);
        double want = 0;
        for (int s = 0; s < 4; s++) {
            pg_tensor *x = scatter(tensor(dtype, sizes[s]), 0.1, 1);
            for (int64_t i = 0; i < sizes[s]; i++) want += at(x, i) * at(x, i);
            ok(pg_sumsq(step, x, NULL, NULL)); /* adds to what is there */
            assert_true(fabs(at(step, PG_STEP_SUMSQ) - want) <= TOLERANCE_F64 * want);
            pg_tensor_free(x);
        }
        pg_tensor_free(step);
    }
}

static void bad_numbers(void **state) {
    (void)state;
    const int dtypes[] = {PG_F32, PG_F64, PG_BF16, PG_F16, PG_I32};
    for (int d = 0; d < 5; d++) {
        int64_t n = 50000, count = -1;
        pg_tensor *wide = tensor(PG_F64, n), *x = tensor(dtypes[d], n);
        ok(pg_fill(wide, -1e-8));
        put_at(wide, 0, NAN), put_at(wide, 17, INFINITY), put_at(wide, n - 1, -INFINITY);
        ok(pg_copy(x, wide));
        ok(pg_count_nonfinite(&count, x));
        assert_int_equal(count, dtypes[d] == PG_I32 ? 0 : 3);
        pg_tensor_free(wide), pg_tensor_free(x);
    }
}

/* A segment of three runs with factors of their own, odd lengths, and one empty run. */
typedef struct {
    int64_t n;
    pg_tensor *value, *grad, *m, *v, *ends, *factors, *step;
} segment;
static const double decays[] = {0.1, 0, 0.5, 0.01}, rates[] = {1, 2, 1, 0};

static segment new_segment(int dtype, int64_t n) {
    segment s = {n,
                 tensor(dtype, n),
                 tensor(dtype, n),
                 tensor(dtype, n),
                 tensor(dtype, n),
                 tensor(PG_I64, 4),
                 tensor(PG_F32, 4, 2),
                 step_block(0.01, 2)};
    const double ends[] = {(double)(n / 3), (double)(n / 2), (double)(n / 2), (double)n};
    for (int r = 0; r < 4; r++) {
        put_at(s.ends, r, ends[r]);
        put_at(s.factors, 2 * r, decays[r]), put_at(s.factors, 2 * r + 1, rates[r]);
    }
    scatter(s.value, 0, 1);
    ok(pg_fill(s.m, 0));
    ok(pg_fill(s.v, 0));
    put_at(s.step, PG_STEP_CLIP, 0.5);
    return s;
}
static void free_segment(segment *s) {
    pg_tensor *all[] = {s->value, s->grad, s->m, s->v, s->ends, s->factors, s->step};
    for (int i = 0; i < 7; i++) pg_tensor_free(all[i]);
}
static int run_at(const segment *s, int64_t i) {
    int r = 0;
    while (at(s->ends, r) <= (double)i) r++;
    return r;
}

static void adamw_steps(void **state) {
    (void)state;
    const int64_t sizes[] = {7, 40009};
    for (int c = 0; c < 2; c++)
        for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
            int64_t n = sizes[c];
            segment s = new_segment(dtype, n);
            double *w = numbers_of(s.value), *m = doubles(n), *v = doubles(n);
            for (int t = 1; t <= 5; t++) {
                scatter(s.grad, 0, 1);
                double bias1 = 1 - pow(0.9, t), bias2 = 1 - pow(0.95, t);
                put_at(s.step, PG_STEP_BIAS1, bias1), put_at(s.step, PG_STEP_BIAS2, bias2);
                for (int64_t i = 0; i < n; i++) {
                    int r = run_at(&s, i);
                    double g = at(s.grad, i) * 0.5, rate = 0.01 * rates[r];
                    m[i] = 0.9 * m[i] + 0.1 * g;
                    v[i] = 0.95 * v[i] + 0.05 * g * g;
                    w[i] -= rate * (m[i] / bias1 / (sqrt(v[i] / bias2) + 1e-8) +
                                    at(s.factors, 2 * r) * w[i]);
                }
                ok(pg_adamw(s.value, NULL, s.grad, s.m, s.v, s.ends, s.factors, s.step, 0.9, 0.95,
                            1e-8));
            }
            close_to(s.value, w);
            close_to(s.m, m);
            close_to(s.v, v);
            put_at(s.step, PG_STEP_FINITE, 0); /* a bad step changes nothing */
            ok(pg_fill(s.grad, NAN));
            ok(pg_adamw(s.value, NULL, s.grad, s.m, s.v, s.ends, s.factors, s.step, 0.9, 0.95,
                        1e-8));
            close_to(s.value, w);
            close_to(s.m, m);
            free(w), free(m), free(v);
            free_segment(&s);
        }
}

/* p = g = 1, rate 0.01, decay 0.1, eps 0: decoupled decay gives 0.989, L2
 * decay would give 0.990. */
static void decay_is_decoupled(void **state) {
    (void)state;
    segment s = new_segment(PG_F32, 1);
    put_at(s.factors, 6, 0.1), put_at(s.factors, 7, 1);
    put_at(s.step, PG_STEP_CLIP, 1);
    put_at(s.step, PG_STEP_BIAS1, 1 - 0.9), put_at(s.step, PG_STEP_BIAS2, 1 - 0.999);
    ok(pg_fill(s.value, 1));
    ok(pg_fill(s.grad, 1));
    ok(pg_adamw(s.value, NULL, s.grad, s.m, s.v, s.ends, s.factors, s.step, 0.9, 0.999, 0));
    assert_true(fabs(at(s.value, 0) - 0.989) < 1e-6);
    free_segment(&s);
}

static void sgd_steps(void **state) {
    (void)state;
    const struct {
        double momentum, dampening;
        int nesterov;
    } cases[] = {{0, 0, 0}, {0.9, 0, 0}, {0.9, 0.3, 0}, {0.9, 0, 1}};
    for (int c = 0; c < 4; c++)
        for (int dtype = PG_F32; dtype <= PG_F64; dtype++) {
            double mu = cases[c].momentum, damp = cases[c].dampening;
            int64_t n = 40009;
            segment s = new_segment(dtype, n);
            double *w = numbers_of(s.value), *m = doubles(n);
            memset(pg_tensor_data(s.m), 0xff, (size_t)(n * pg_dtype_size(dtype)));
            for (int t = 0; t < 4; t++) {
                scatter(s.grad, 0, 1);
                for (int64_t i = 0; i < n; i++) {
                    int r = run_at(&s, i);
                    double g = at(s.grad, i) * 0.5 + at(s.factors, 2 * r) * w[i];
                    m[i] = t ? mu * m[i] + (1 - damp) * g : g;
                    if (mu > 0) g = cases[c].nesterov ? g + mu * m[i] : m[i];
                    w[i] -= 0.01 * rates[r] * g;
                }
                ok(pg_sgd(s.value, NULL, s.grad, mu > 0 ? s.m : NULL, s.ends, s.factors, s.step, mu,
                          damp, cases[c].nesterov, t == 0));
            }
            close_to(s.value, w);
            if (mu > 0) close_to(s.m, m);
            free(w), free(m);
            free_segment(&s);
        }
}

static void refusals(void **state) {
    (void)state;
    segment s = new_segment(PG_F32, 6);
    pg_tensor *few = tensor(PG_F32, 5);
#define ADAMW(value, m, beta)                                                                      \
    pg_adamw(value, NULL, s.grad, m, s.v, s.ends, s.factors, s.step, beta, 0.9, 0)
    refuses(PG_ESHAPE, "adamw: grad is [6] f32, value is [5] f32", ADAMW(few, s.m, 0.9));
    refuses(PG_ESHAPE, "adamw: m is [5] f32, value is [6] f32", ADAMW(s.value, few, 0.9));
    refuses(PG_EINVAL, "adamw: m is missing", ADAMW(s.value, NULL, 0.9));
    refuses(PG_EINVAL, "betas 1 and 0.9", ADAMW(s.value, s.m, 1));
    put_at(s.ends, 1, 1);
    refuses(PG_EINVAL, "run 1 ends at 1, before 2; ends must rise", ADAMW(s.value, s.m, 0.9));
    put_at(s.ends, 1, 3), put_at(s.ends, 3, 7);
    refuses(PG_ESHAPE, "the runs end at 7, value is [6] f32", ADAMW(s.value, s.m, 0.9));
    refuses(PG_EINVAL, "without a buffer m",
            pg_sgd(s.value, NULL, s.grad, NULL, s.ends, s.factors, s.step, 0.9, 0, 0, 1));
    refuses(PG_EINVAL, "nesterov with momentum 0",
            pg_sgd(s.value, NULL, s.grad, NULL, s.ends, s.factors, s.step, 0, 0, 1, 1));
    refuses(PG_ESHAPE, "sumsq: step is [5] f32; a step block", pg_sumsq(few, s.grad, NULL, NULL));
    refuses(PG_EINVAL, "clip: max_norm is -1", pg_clip(s.step, -1));
    refuses(PG_EINVAL, "clip: max_norm is nan", pg_clip(s.step, NAN));
    refuses(PG_EINVAL, "count is missing", pg_count_nonfinite(NULL, few));
    pg_tensor_free(few);
    free_segment(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(clip_scaled, nothing_alive),
                                       cmocka_unit_test_teardown(clip_huge, nothing_alive),
                                       cmocka_unit_test_teardown(clip_ends, nothing_alive),
                                       cmocka_unit_test_teardown(sums_of_squares, nothing_alive),
                                       cmocka_unit_test_teardown(bad_numbers, nothing_alive),
                                       cmocka_unit_test_teardown(adamw_steps, nothing_alive),
                                       cmocka_unit_test_teardown(decay_is_decoupled, nothing_alive),
                                       cmocka_unit_test_teardown(sgd_steps, nothing_alive),
                                       cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
