/* CUDA kernels against their CPU twins: sum of squares, clip, bad numbers, AdamW, SGD with and
 * without masters; and every kernel of the first half on empty tensors.  See twins.h. */
#include "twins.h"

/* A step block as a training step fills it, on an aligned address. */
static twin_array draw_step(int finite) {
    double s[PG_STEP_SIZE] = {0};
    s[PG_STEP_RATE] = draw(1e-4, 1e-1), s[PG_STEP_BIAS1] = draw(0.1, 1);
    s[PG_STEP_BIAS2] = draw(0.05, 1), s[PG_STEP_CLIP] = draw(0.1, 1);
    s[PG_STEP_SCALE] = 1024, s[PG_STEP_FINITE] = finite, s[PG_STEP_SUMSQ] = draw(0, 100);
    return aligned_of(s, PG_STEP_SIZE, PG_F64);
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
    r->ends_on = aligned_of(ends, r->runs, PG_I64);
    r->factors_on = aligned_of(factors, 2 * r->runs, PG_F32);
}

/* ---- without masters: f32, f64 ---- */
static void adamw(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 2; f++)
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

/* How the momentum of case i goes. */
typedef struct {
    double mu, dampening;
    int momentum, nesterov, first;
} sgd_case;

static sgd_case draw_sgd(int i, int finite) {
    int momentum = i % 3;
    return (sgd_case){momentum ? 0.9 : 0, i % 3 == 1 ? 0.2 : 0, momentum, i % 3 == 2,
                      finite && momentum && i > 8};
}

static void sgd(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 2; f++)
        for (int i = 0; i < 14; i++) {
            int64_t n = case_size(i);
            int dtype = floating[f], finite = i != 4;
            sgd_case c = draw_sgd(i, finite);
            runs_case r;
            draw_runs(&r, n);
            twin_array step = draw_step(finite), value = input(n, dtype), grad = input(n, dtype);
            twin_array m = output(n, dtype, !c.first); /* not read the first time */
            cpu_do(sgd, value.host, NULL, grad.host, c.momentum ? m.host : NULL, n, r.ends,
                   r.factors, r.runs, step.host, c.mu, c.dampening, c.nesterov, c.first, PG_F64, -1,
                   PG_F64);
            cuda_do(sgd, value.device, NULL, grad.device, c.momentum ? m.device : NULL, n,
                    r.ends_on.device, r.factors_on.device, r.runs, step.device, c.mu, c.dampening,
                    c.nesterov, c.first, dtype, -1, dtype, dtype);
            near(value, finite ? bound(dtype) : 0);
            near(m, finite && c.momentum ? bound(dtype) : 0);
            twins_free();
        }
}

/* ---- with masters ---- */
/* All that pg.h lists: value, master, gradient, moments. */
static const struct {
    int dtype, master, grad, m;
} mixes[] = {
    {PG_BF16, PG_I16, PG_F32, PG_F32},  {PG_BF16, PG_I16, PG_BF16, PG_F32},
    {PG_BF16, PG_I16, PG_F32, PG_BF16}, {PG_BF16, PG_I16, PG_BF16, PG_BF16},
    {PG_BF16, PG_F32, PG_F32, PG_F32},  {PG_BF16, PG_F32, PG_BF16, PG_F32},
    {PG_BF16, PG_F32, PG_F32, PG_BF16}, {PG_BF16, PG_F32, PG_BF16, PG_BF16},
    {PG_F16, PG_F32, PG_F32, PG_F32},   {PG_F16, PG_F32, PG_F16, PG_F32},
    {PG_F16, PG_F32, PG_F32, PG_BF16},  {PG_F16, PG_F32, PG_F16, PG_BF16},
};
#define MIXES ((int)(sizeof mixes / sizeof *mixes))

/* Numbers in f32 on the host, as doubles, and as value and master on the device. */
typedef struct {
    int64_t n;
    int dtype, dtype_master;
    double *whole;
    twin_array value, master;
} kept_case;

static void *room(int64_t n, int dtype) {
    void *at = malloc((size_t)(n * pg_dtype_size(dtype)) + 1);
    assert_non_null(at);
    return at;
}

static kept_case keep(const float *numbers, int64_t n, int dtype, int dtype_master) {
    kept_case k = {n, dtype, dtype_master, twin_doubles(n), {0}, {0}};
    void *value = room(n, dtype), *master = room(n, dtype_master);
    double *values = twin_doubles(n), *masters = twin_doubles(n);
    ok(twins.cpu->master_split(value, master, numbers, n, dtype, dtype_master, NULL));
    ok(twins.cpu->cast(values, value, n, PG_F64, dtype, NULL));
    ok(twins.cpu->cast(masters, master, n, PG_F64, dtype_master, NULL));
    for (int64_t i = 0; i < n; i++) k.whole[i] = (double)numbers[i];
    k.value = input_of(values, n, dtype);
    k.master = input_of(masters, n, dtype_master);
    free(value), free(master), free(values), free(masters);
    return k;
}

static kept_case draw_kept(int64_t n, int dtype, int dtype_master) {
    float *numbers = room(n, PG_F32);
    for (int64_t i = 0; i < n; i++) numbers[i] = (float)draw(-1, 1);
    kept_case k = keep(numbers, n, dtype, dtype_master);
    free(numbers);
    return k;
}

/* The f32 numbers that the device's value and master stand for; value must be their rounding. */
static float *joined(const kept_case *k) {
    void *value = room(k->n, k->dtype), *master = room(k->n, k->dtype_master);
    void *rounded = room(k->n, k->dtype), *rest = room(k->n, k->dtype_master);
    double *values = device_numbers(&k->value, "value"),
           *masters = device_numbers(&k->master, "master");
    float *whole = room(k->n, PG_F32);
    ok(twins.cpu->cast(value, values, k->n, k->dtype, PG_F64, NULL));
    ok(twins.cpu->cast(master, masters, k->n, k->dtype_master, PG_F64, NULL));
    ok(twins.cpu->master_join(whole, value, master, k->n, k->dtype, k->dtype_master, NULL));
    ok(twins.cpu->master_split(rounded, rest, whole, k->n, k->dtype, k->dtype_master, NULL));
    if (memcmp(rounded, value, (size_t)(k->n * pg_dtype_size(k->dtype))))
        fail_msg("a value is not its master's rounding; PG_TWINS_SEED=%llu",
                 (unsigned long long)twins.seed);
    free(value), free(master), free(rounded), free(rest), free(values), free(masters);
    return whole;
}

/* Within the bound of f32, whatever the value's dtype; finite 0: the very same. */
static void near_kept(const kept_case *k, int finite, int line) {
    float *whole = joined(k);
    double *got = twin_doubles(k->n), limit = finite ? TOLERANCE_F32 : 0;
    for (int64_t i = 0; i < k->n; i++) got[i] = (double)whole[i];
    double error = error_norm(got, k->whole, k->n);
    if (!(error <= limit))
        fail_msg("line %d: master %s of %s [%lld] is off by %.3g; PG_TWINS_SEED=%llu", line,
                 pg_dtype_name(k->dtype_master), pg_dtype_name(k->dtype), (long long)k->n, error,
                 (unsigned long long)twins.seed);
    free(got), free(whole), free(k->whole);
}

static void adamw_with_masters(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < MIXES; f++)
        for (int i = 0; i < 9; i++) {
            int64_t n = case_size(i);
            int dtype = mixes[f].dtype, master = mixes[f].master, finite = i != 4;
            int dtype_grad = mixes[f].grad, dtype_m = mixes[f].m;
            runs_case r;
            draw_runs(&r, n);
            kept_case k = draw_kept(n, dtype, master);
            twin_array step = draw_step(finite), grad = input(n, dtype_grad);
            twin_array m = input(n, dtype_m), v = input_in(n, dtype_m, 0.01, 1);
            /* beside an f32 master the value is written alone */
            if (finite && master == PG_F32) k.value = output(n, dtype, 0);
            cpu_do(adamw, k.whole, NULL, grad.host, m.host, v.host, n, r.ends, r.factors, r.runs,
                   step.host, 0.9, 0.95, 1e-8, PG_F64, -1, PG_F64);
            cuda_do(adamw, k.value.device, k.master.device, grad.device, m.device, v.device, n,
                    r.ends_on.device, r.factors_on.device, r.runs, step.device, 0.9, 0.95, 1e-8,
                    dtype, master, dtype_grad, dtype_m);
            near_kept(&k, finite, __LINE__);
            near(m, finite ? bound(dtype_m) : 0);
            near(v, finite ? bound(dtype_m) : 0);
            twins_free();
        }
}

static void sgd_with_masters(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < MIXES; f++)
        for (int i = 0; i < 12; i++) {
            int64_t n = case_size(i);
            int dtype = mixes[f].dtype, master = mixes[f].master, finite = i != 4;
            sgd_case c = draw_sgd(i, finite);
            runs_case r;
            draw_runs(&r, n);
            kept_case k = draw_kept(n, dtype, master);
            twin_array step = draw_step(finite), grad = input(n, mixes[f].grad);
            twin_array m = output(n, mixes[f].m, !c.first);
            cpu_do(sgd, k.whole, NULL, grad.host, c.momentum ? m.host : NULL, n, r.ends, r.factors,
                   r.runs, step.host, c.mu, c.dampening, c.nesterov, c.first, PG_F64, -1, PG_F64);
            cuda_do(sgd, k.value.device, k.master.device, grad.device, c.momentum ? m.device : NULL,
                    n, r.ends_on.device, r.factors_on.device, r.runs, step.device, c.mu,
                    c.dampening, c.nesterov, c.first, dtype, master, mixes[f].grad, mixes[f].m);
            near_kept(&k, finite, __LINE__);
            near(m, finite && c.momentum ? bound(mixes[f].m) : 0);
            twins_free();
        }
}

/* Half precision without a master is no state that the core lets through. */
static void updates_that_are_refused(void **state) {
    (void)state;
    need_gpu();
    twin_array x = input(8, PG_BF16), step = draw_step(1);
    void *p = x.device;
    refuses(PG_EINVAL, "adamw: bf16 has no such master",
            twins.cuda->adamw(p, NULL, p, p, p, 8, p, p, 1, step.device, 0.9, 0.95, 1e-8, PG_BF16,
                              -1, PG_BF16, PG_BF16, twins.stream));
    refuses(PG_EINVAL, "sgd: f16 has no such master",
            twins.cuda->sgd(p, p, p, p, 8, p, p, 1, step.device, 0.9, 0, 0, 0, PG_F16, PG_I16,
                            PG_F32, PG_F32, twins.stream));
    refuses(PG_EINVAL, "master_join: f32 has no such master",
            twins.cuda->master_join(p, p, p, 8, PG_F32, PG_F32, twins.stream));
}

/* Ties, both zeros, the largest, subnormal and lost numbers among ordinary ones: bit by bit. */
static const uint32_t odd_bits[] = {
    0,          0x80000000, 0x3f808000, 0x3f818000, 0x3f807fff, 0xbf808000, 0x3f808001, 0x7f7fffff,
    0x7f7f8000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7fffffff, 0xffffffff, 0x7f800001,
    0x00000001, 0x00008000, 0x007fffff, 0x807fffff, 0x477fe000, 0x477ff000, 0x33000000, 0x33000001};
#define ODD ((int64_t)(sizeof odd_bits / sizeof *odd_bits))

static void equal_bits(const twin_array *a, const void *want, const char *what) {
    double *got = device_numbers(a, what), *numbers = twin_doubles(a->n);
    ok(twins.cpu->cast(numbers, want, a->n, PG_F64, a->dtype, NULL));
    for (int64_t i = 0; i < a->n; i++)
        if (memcmp(&got[i], &numbers[i], 8) && !(isnan(got[i]) && isnan(numbers[i])))
            fail_msg("%s: number %lld is %.9g, not %.9g; PG_TWINS_SEED=%llu", what, (long long)i,
                     got[i], numbers[i], (unsigned long long)twins.seed);
    free(got), free(numbers);
}

static void masters(void **state) {
    (void)state;
    need_gpu();
    static const int pairs[][2] = {{PG_BF16, PG_I16}, {PG_BF16, PG_F32}, {PG_F16, PG_F32}};
    for (int f = 0; f < 3; f++)
        for (int i = 0; i < 9; i++) {
            int64_t n = case_size(i);
            int dtype = pairs[f][0], dtype_master = pairs[f][1];
            float *numbers = room(n, PG_F32);
            double *as_doubles = twin_doubles(n);
            for (int64_t k = 0; k < n; k++) {
                numbers[k] = ldexpf((float)draw(-1, 1), (int)draw_int(-20, 20));
                if (k < ODD) memcpy(&numbers[k], &odd_bits[k], 4);
                as_doubles[k] = (double)numbers[k];
            }
            twin_array in = input_of(as_doubles, n, PG_F32), out = output(n, PG_F32, 0);
            twin_array value = output(n, dtype, 0), master = output(n, dtype_master, 0);
            void *v = room(n, dtype), *m = room(n, dtype_master);
            cuda_do(master_split, value.device, master.device, in.device, n, dtype, dtype_master);
            ok(twins.cpu->master_split(v, m, numbers, n, dtype, dtype_master, NULL));
            equal_bits(&value, v, "value");
            equal_bits(&master, m, "master");
            cuda_do(master_join, out.device, value.device, master.device, n, dtype, dtype_master);
            equal_bits(&out, numbers, "joined");
            free(numbers), free(as_doubles), free(v), free(m);
            twins_free();
        }
}

/* ---- norms of gradients ---- */
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

/* Each run with its weight; what lies behind the last run counts nothing. */
static void weighted_squares(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 12; i++) {
            int64_t n = case_size(i);
            double w[40];
            float weights[40];
            runs_case r;
            draw_runs(&r, n);
            for (int k = 0; k < 40; k++)
                w[k] = weights[k] = k % 3 == 1 ? 0.5f : k % 7 == 3 ? 0 : (float)draw(0, 2);
            twin_array x = input(n, floating[f]), step = draw_step(1);
            twin_array again = input_of(step.host, PG_STEP_SIZE, PG_F64);
            twin_array on = aligned_of(w, r.runs, PG_F32);
            cpu_do(sumsq, step.host, x.host, n, r.ends, weights, r.runs);
            cuda_do(sumsq, step.device, x.device, n, r.ends_on.device, on.device, r.runs,
                    floating[f]);
            cuda_do(sumsq, again.device, x.device, n, r.ends_on.device, on.device, r.runs,
                    floating[f]);
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
        cuda_do(adamw, x, x, x, x, x, 0, NULL, NULL, 0, step.device, 0.9, 0.95, 1e-8, PG_BF16,
                PG_I16, PG_F32, PG_F32);
        cuda_do(master_join, x, x, x, 0, PG_BF16, PG_I16);
        cuda_do(master_split, x, x, x, 0, PG_BF16, PG_I16);
        assert_int_equal(twins.cuda->count_nonfinite(x, 0, t, twins.stream), 0);
        cuda_do(reduce, y.device, x, PG_SUM, 1, 0, 5, 0, t, t);
        for (int k = 0; k < 5; k++) y.host[k] = 0;
        same(y);
        same(step);
        twins_free();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        twin_test(adamw),
        twin_test(sgd),
        twin_test(adamw_with_masters),
        twin_test(sgd_with_masters),
        twin_test(updates_that_are_refused),
        twin_test(masters),
        twin_test(sum_of_squares),
        twin_test(weighted_squares),
        twin_test(clip),
        twin_test(bad_numbers),
        twin_test(empty),
    };
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
