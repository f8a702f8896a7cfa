/* Half-precision weights with masters: joining and splitting bit for bit, and the updates of AdamW
 * and SGD against those of f32 weights, whose bits the masters must have. */
#include "tensors.h"

/* ---- join and split ---- */
static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static void joined_bits(void **state) {
    (void)state;
    int64_t n = 300000;
    pg_tensor *x = tensor(PG_F32, n), *value = tensor(PG_BF16, n), *low = tensor(PG_I16, n);
    pg_tensor *back = tensor(PG_F32, n);
    const uint32_t ends[] = {0x3f808000, 0xbf808000, 0x3f818000, 0x3f807fff, 0x00000001, 0x80000001,
                             0x00008000, 0x80008000, 0x007fffff, 0x7f7fffff, 0xff7fffff, 0x7f800000,
                             0xff800000, 0x00000000, 0x80000000, 0x7f7f8000};
    const uint32_t nans[] = {0x7fffffff, 0xffffffff, 0x7fff8000,
                             0x7f800001, 0xffc00000, 0xff80ffff};
    uint32_t *bits = pg_tensor_data(x);
    for (int64_t i = 0; i < n; i++) {
        do bits[i] = (uint32_t)(int64_t)(chance() * 0x1p32);
        while ((bits[i] & 0x7fffffff) > 0x7f800000);               /* NaNs below */
        if (i % 5 == 0) bits[i] = (bits[i] & 0xffff0000) | 0x8000; /* ties */
    }
    memcpy(bits, ends, sizeof ends);
    ok(pg_master_split(value, low, x));
    ok(pg_master_join(back, value, low));
    assert_memory_equal(pg_tensor_data(back), bits, (size_t)n * 4);
    const uint16_t *v = pg_tensor_data(value);
    for (int64_t i = 0; i < n; i++) assert_int_equal(v[i], (bits[i] + 0x8000) >> 16 & 0xffff);
    memcpy(bits, nans, sizeof nans);
    ok(pg_master_split(value, low, x));
    ok(pg_master_join(back, value, low));
    for (int i = 0; i < 6; i++) assert_true(isnan(at(value, i)) && isnan(at(back, i)));
    pg_tensor_free(x), pg_tensor_free(value), pg_tensor_free(low), pg_tensor_free(back);
}

/* A master of f32 is the number itself; the value is its rounding to nearest even. */
static void wide_masters(void **state) {
    (void)state;
    for (int dtype = PG_BF16; dtype <= PG_F16; dtype++) {
        int64_t n = 1000;
        pg_tensor *x = scatter(tensor(PG_F32, n), 0, 2), *value = tensor(dtype, n);
        pg_tensor *master = tensor(PG_F32, n), *back = tensor(PG_F32, n), *want = tensor(dtype, n);
        put_at(x, 0, 257), put_at(x, 1, 2049), put_at(x, 2, NAN);
        ok(pg_master_split(value, master, x));
        ok(pg_master_join(back, value, master));
        ok(pg_copy(want, x));
        assert_memory_equal(pg_tensor_data(back), pg_tensor_data(x), (size_t)n * 4);
        assert_memory_equal(pg_tensor_data(value), pg_tensor_data(want), (size_t)n * 2);
        assert_true(dtype == PG_BF16 ? at(value, 0) == 256 : at(value, 1) == 2048);
        pg_tensor_free(x), pg_tensor_free(value), pg_tensor_free(master);
        pg_tensor_free(back), pg_tensor_free(want);
    }
}

/* ---- updates ---- */
typedef struct { /* a segment of three runs; master NULL: plain f32 */
    int64_t n;
    pg_tensor *value, *master, *grad, *m, *v, *ends, *factors, *step;
} segment;

static segment new_segment(int64_t n, int dtype, int master, int grad, int moments) {
    segment s = {n,
                 tensor(dtype, n),
                 master < 0 ? NULL : tensor(master, n),
                 tensor(grad, n),
                 tensor(moments, n),
                 tensor(moments, n),
                 tensor(PG_I64, 3),
                 tensor(PG_F32, 3, 2),
                 tensor(PG_F64, PG_STEP_SIZE)};
    const double ends[] = {(double)(n / 3), (double)(n / 2), (double)n};
    const double factors[] = {0.1, 1, 0, 2, 0.01, 0.5};
    for (int r = 0; r < 3; r++) put_at(s.ends, r, ends[r]);
    for (int r = 0; r < 6; r++) put_at(s.factors, r, factors[r]);
    ok(pg_fill(s.m, 0));
    ok(pg_fill(s.v, 0));
    ok(pg_fill(s.step, 0));
    put_at(s.step, PG_STEP_RATE, 0.01), put_at(s.step, PG_STEP_CLIP, 0.5);
    put_at(s.step, PG_STEP_SCALE, 1), put_at(s.step, PG_STEP_FINITE, 1);
    return s;
}
static void free_segment(segment *s) {
    pg_tensor *all[] = {s->value, s->grad, s->m, s->v, s->ends, s->factors, s->step};
    for (int i = 0; i < 7; i++) pg_tensor_free(all[i]);
    if (s->master) pg_tensor_free(s->master);
}
static void set(segment *s, pg_tensor *numbers) {
    if (s->master) ok(pg_master_split(s->value, s->master, numbers));
    else ok(pg_copy(s->value, numbers));
}
static void adamw(segment *s, int t) {
    put_at(s->step, PG_STEP_BIAS1, 1 - pow(0.9, t)),
        put_at(s->step, PG_STEP_BIAS2, 1 - pow(0.95, t));
    ok(pg_adamw(s->value, s->master, s->grad, s->m, s->v, s->ends, s->factors, s->step, 0.9, 0.95,
                1e-8));
}
static void same_bits(pg_tensor *a, pg_tensor *b) {
    assert_int_equal(pg_tensor_dtype(a), pg_tensor_dtype(b));
    assert_memory_equal(pg_tensor_data(a), pg_tensor_data(b),
                        (size_t)(pg_tensor_count(a) * pg_dtype_size(pg_tensor_dtype(a))));
}

static const struct {
    int dtype, master;
} kinds[] = {{PG_BF16, PG_I16}, {PG_BF16, PG_F32}, {PG_F16, PG_F32}};

/* The numbers of s, joined, are those of the f32 segment; and the value is their rounding. */
static void same_numbers(const segment *s, const segment *plain) {
    pg_tensor *now = tensor(PG_F32, s->n), *value = tensor(pg_tensor_dtype(s->value), s->n);
    pg_tensor *low = tensor(pg_tensor_dtype(s->master), s->n);
    ok(pg_master_join(now, s->value, s->master));
    same_bits(now, plain->value);
    ok(pg_master_split(value, low, plain->value));
    same_bits(value, s->value);
    pg_tensor_free(now), pg_tensor_free(value), pg_tensor_free(low);
}

/* 20 steps of AdamW: master and moments have the bits of a run in f32 with the same gradients. */
static void adamw_bits(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 515, 50003};
    for (int k = 0; k < 3; k++)
        for (int wide = 0; wide < 2; wide++)
            for (int i = 0; i < 3; i++) {
                int64_t n = sizes[i];
                int grad = wide ? PG_F32 : kinds[k].dtype;
                segment s = new_segment(n, kinds[k].dtype, kinds[k].master, grad, PG_F32);
                segment plain = new_segment(n, PG_F32, -1, PG_F32, PG_F32);
                pg_tensor *start = scatter(tensor(PG_F32, n), 0, 1);
                set(&s, start), set(&plain, start);
                for (int t = 1; t <= 20; t++) {
                    scatter(s.grad, 0, 0.1);
                    ok(pg_copy(plain.grad, s.grad));
                    adamw(&s, t), adamw(&plain, t);
                }
                same_numbers(&s, &plain);
                same_bits(s.m, plain.m), same_bits(s.v, plain.v);
                free_segment(&s), free_segment(&plain), pg_tensor_free(start);
            }
}

/* bf16 moments are widened, updated in f32 and rounded to nearest even. */
static void half_moments(void **state) {
    (void)state;
    int64_t n = 2000;
    segment s = new_segment(n, PG_BF16, PG_I16, PG_F32, PG_BF16);
    segment plain = new_segment(n, PG_F32, -1, PG_F32, PG_F32);
    pg_tensor *start = scatter(tensor(PG_F32, n), 0, 1), *m = tensor(PG_BF16, n);
    set(&s, start), set(&plain, start);
    for (int t = 1; t <= 5; t++) {
        scatter(s.grad, 0, 0.1);
        ok(pg_copy(plain.grad, s.grad));
        adamw(&s, t), adamw(&plain, t);
        pg_tensor *moments[] = {plain.m, plain.v}, *halves[] = {s.m, s.v};
        for (int i = 0; i < 2; i++) {
            ok(pg_copy(m, moments[i]));
            same_bits(m, halves[i]);
            ok(pg_copy(moments[i], m));
        }
    }
    same_numbers(&s, &plain);
    free_segment(&s), free_segment(&plain), pg_tensor_free(start), pg_tensor_free(m);
}

static void sgd_bits(void **state) {
    (void)state;
    for (int k = 0; k < 3; k++)
        for (int momentum = 0; momentum < 3; momentum++) {
            int64_t n = 1537;
            int moments = momentum == 2 ? PG_BF16 : PG_F32;
            segment s = new_segment(n, kinds[k].dtype, kinds[k].master, PG_F32, moments);
            segment plain = new_segment(n, PG_F32, -1, PG_F32, PG_F32);
            pg_tensor *start = scatter(tensor(PG_F32, n), 0, 1);
            set(&s, start), set(&plain, start);
            for (int t = 0; t < 5; t++) {
                scatter(s.grad, 0, 0.1);
                ok(pg_copy(plain.grad, s.grad));
                double mu = momentum ? 0.9 : 0;
                ok(pg_sgd(s.value, s.master, s.grad, momentum ? s.m : NULL, s.ends, s.factors,
                          s.step, mu, 0, momentum, t == 0));
                ok(pg_sgd(plain.value, NULL, plain.grad, momentum ? plain.m : NULL, plain.ends,
                          plain.factors, plain.step, mu, 0, momentum, t == 0));
                if (moments == PG_BF16) {
                    ok(pg_copy(s.v, plain.m));
                    ok(pg_copy(plain.m, s.v));
                }
            }
            same_numbers(&s, &plain);
            if (moments == PG_F32) same_bits(s.m, plain.m);
            free_segment(&s), free_segment(&plain), pg_tensor_free(start);
        }
}

/* Weight 1, 100 updates with gradient 1 and rate 6e-4: without a master bf16
 * would stay 1 for ever. */
static void small_steps_add_up(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        segment s = new_segment(3, PG_BF16, kinds[k].master, PG_BF16, PG_F32);
        segment plain = new_segment(3, PG_F32, -1, PG_F32, PG_F32);
        pg_tensor *one = tensor(PG_F32, 3), *now = tensor(PG_F32, 3);
        ok(pg_fill(one, 1));
        segment *both[] = {&s, &plain};
        for (int i = 0; i < 2; i++) {
            set(both[i], one);
            ok(pg_fill(both[i]->grad, 1));
            for (int r = 0; r < 3; r++)
                put_at(both[i]->factors, 2 * r, 0), put_at(both[i]->factors, 2 * r + 1, 1);
            put_at(both[i]->step, PG_STEP_RATE, 6e-4), put_at(both[i]->step, PG_STEP_CLIP, 1);
            for (int t = 1; t <= 100; t++) adamw(both[i], t);
        }
        ok(pg_master_join(now, s.value, s.master));
        assert_true(fabs(at(now, 0) - 0.94) < TOLERANCE_F32 && at(s.value, 0) == 0.94140625);
        assert_true(bits_of((float)at(now, 2)) == bits_of((float)at(plain.value, 2)));
        same_numbers(&s, &plain);
        free_segment(&s), free_segment(&plain), pg_tensor_free(one), pg_tensor_free(now);
    }
}

/* Nothing moves in a step whose norm is not finite; a NaN that gets in is seen in the value. */
static void bad_steps(void **state) {
    (void)state;
    segment s = new_segment(6, PG_BF16, PG_I16, PG_BF16, PG_F32);
    pg_tensor *one = tensor(PG_F32, 6), *now = tensor(PG_F32, 6);
    ok(pg_fill(one, 1.0001));
    ok(pg_fill(s.grad, NAN));
    set(&s, one);
    put_at(s.step, PG_STEP_FINITE, 0);
    adamw(&s, 1);
    ok(pg_master_join(now, s.value, s.master));
    same_bits(now, one);
    put_at(s.step, PG_STEP_FINITE, 1);
    adamw(&s, 1);
    for (int i = 0; i < 6; i++) assert_true(isnan(at(s.value, i)));
    free_segment(&s), pg_tensor_free(one), pg_tensor_free(now);
}

/* ---- weighted sums of squares ---- */
static void weighted_squares(void **state) {
    (void)state;
    const int dtypes[] = {PG_F32, PG_F64, PG_BF16, PG_F16};
    const double ends[] = {10, 10, 40010, 50000}, weights[] = {0.5, 3, 1, 0.25};
    for (int d = 0; d < 4; d++) {
        pg_tensor *x = scatter(tensor(dtypes[d], 50000), 0.1, 1), *e = tensor(PG_I64, 4);
        pg_tensor *w = tensor(PG_F32, 4), *step = tensor(PG_F64, PG_STEP_SIZE);
        put(e, ends), put(w, weights);
        ok(pg_fill(step, 0));
        double want = 0;
        int64_t i = 0;
        for (int r = 0; r < 4; r++)
            for (; i < (int64_t)ends[r]; i++) want += weights[r] * at(x, i) * at(x, i);
        ok(pg_sumsq(step, x, e, w));
        assert_true(fabs(at(step, PG_STEP_SUMSQ) - want) <= TOLERANCE_F64 * want);
        ok(pg_sumsq(step, x, e, w)); /* adds */
        assert_true(fabs(at(step, PG_STEP_SUMSQ) - 2 * want) <= TOLERANCE_F64 * want);
        pg_tensor *all = tensor(PG_I64, 1), *once = tensor(PG_F32, 1);
        put_at(all, 0, 50000), put_at(once, 0, 1);
        ok(pg_fill(step, 0));
        ok(pg_sumsq(step, x, NULL, NULL));
        double plain = at(step, PG_STEP_SUMSQ);
        ok(pg_fill(step, 0));
        ok(pg_sumsq(step, x, all, once));
        assert_true(at(step, PG_STEP_SUMSQ) == plain);
        pg_tensor_free(x), pg_tensor_free(e), pg_tensor_free(w), pg_tensor_free(step);
        pg_tensor_free(all), pg_tensor_free(once);
    }
}

static void refusals(void **state) {
    (void)state;
    segment s = new_segment(6, PG_BF16, PG_I16, PG_F32, PG_F32);
    pg_tensor *f = tensor(PG_F32, 6), *h = tensor(PG_F16, 6), *few = tensor(PG_I16, 5);
    pg_tensor *d = tensor(PG_F64, 6), *b = tensor(PG_BF16, 6), *one = tensor(PG_F32, 1);
#define ADAMW(value, master, grad, m, v)                                                           \
    pg_adamw(value, master, grad, m, v, s.ends, s.factors, s.step, 0.9, 0.9, 0)
    refuses(PG_ESHAPE, "adamw: value is [6] bf16; without a master it must be f32 or f64",
            ADAMW(s.value, NULL, s.grad, s.m, s.v));
    refuses(PG_ESHAPE,
            "adamw: value is [6] f16, master is [6] i16; bf16 goes with i16 or f32, f16 with f32",
            ADAMW(h, s.master, s.grad, s.m, s.v));
    refuses(PG_ESHAPE, "value is [6] f32, master is [6] f32", ADAMW(f, s.grad, s.grad, s.m, s.v));
    refuses(PG_ESHAPE, "adamw: master is [5] i16, value is [6] bf16; they must hold equally many",
            ADAMW(s.value, few, s.grad, s.m, s.v));
    refuses(PG_ESHAPE, "adamw: grad is [6] f64, value is [6] bf16; the dtype of grad must be equal",
            ADAMW(s.value, s.master, d, s.m, s.v));
    refuses(PG_ESHAPE, "adamw: m is [6] f16; with a master it must be f32 or bf16",
            ADAMW(s.value, s.master, s.grad, h, s.v));
    refuses(PG_ESHAPE, "adamw: m is [6] bf16, v is [6] f32; their dtypes",
            ADAMW(s.value, s.master, s.grad, b, s.v));
    refuses(PG_ESHAPE, "sgd: value is [6] bf16; without a master",
            pg_sgd(s.value, NULL, s.grad, NULL, s.ends, s.factors, s.step, 0, 0, 0, 1));
    refuses(PG_EINVAL, "master_join: master is missing", pg_master_join(f, s.value, NULL));
    refuses(PG_ESHAPE, "master_join: out is [6] f64; its dtype must be f32",
            pg_master_join(d, s.value, s.master));
    refuses(PG_ESHAPE, "master_split: value is [6] f32, master is [6] i16",
            pg_master_split(f, s.master, s.grad));
    refuses(PG_EINVAL, "master_split: master [6] f32 and in [6] f32 share memory",
            pg_master_split(s.value, f, f));
    refuses(PG_EINVAL, "sumsq: ends without weights; give both",
            pg_sumsq(s.step, s.value, s.ends, NULL));
    refuses(PG_ESHAPE, "sumsq: weights is [1] f32, ends is [3] i64",
            pg_sumsq(s.step, s.value, s.ends, one));
    pg_tensor *three = tensor(PG_F32, 3);
    refuses(PG_ESHAPE, "sumsq: the runs end at 6, x is [1] f32; they must cover it",
            pg_sumsq(s.step, one, s.ends, three));
    free_segment(&s);
    pg_tensor_free(f), pg_tensor_free(h), pg_tensor_free(few), pg_tensor_free(d);
    pg_tensor_free(b), pg_tensor_free(one), pg_tensor_free(three);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(joined_bits, nothing_alive),
                                       cmocka_unit_test_teardown(wide_masters, nothing_alive),
                                       cmocka_unit_test_teardown(adamw_bits, nothing_alive),
                                       cmocka_unit_test_teardown(half_moments, nothing_alive),
                                       cmocka_unit_test_teardown(sgd_bits, nothing_alive),
                                       cmocka_unit_test_teardown(small_steps_add_up, nothing_alive),
                                       cmocka_unit_test_teardown(bad_steps, nothing_alive),
                                       cmocka_unit_test_teardown(weighted_squares, nothing_alive),
                                       cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
