/* Attention: value against a loop in double, gradients against finite
 * differences, masks, dropout. */
#include <omp.h>
#include "numbers.h"

typedef struct {
    int64_t B, T, Tk, H, G, K;
    int dtype, packed, causal;
    const int32_t *lengths;
} shape;

typedef struct { /* the tensors of one case */
    pg_tensor *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
    pg_attn o;
} attention;

static attention prepare(const shape *c) {
    attention a = {.o = {.heads = c->H, .kv_heads = c->G, .causal = c->causal}};
    int64_t q_columns = (c->H + (c->packed ? 2 * c->G : 0)) * c->K, columns = c->G * c->K;
    a.q = noisy(c->dtype, SHAPE(c->B, c->T, q_columns));
    a.dq = poisoned(c->dtype, SHAPE(c->B, c->T, q_columns));
    if (!c->packed) {
        a.k = noisy(c->dtype, SHAPE(c->B, c->Tk, columns));
        a.v = noisy(c->dtype, SHAPE(c->B, c->Tk, columns));
        a.dk = poisoned(c->dtype, SHAPE(c->B, c->Tk, columns));
        a.dv = poisoned(c->dtype, SHAPE(c->B, c->Tk, columns));
    }
    a.out = poisoned(c->dtype, SHAPE(c->B, c->T, c->H * c->K));
    a.dout = noisy(c->dtype, SHAPE(c->B, c->T, c->H * c->K));
    a.lse = poisoned(c->dtype, SHAPE(c->B, c->H, c->T));
    if (c->lengths) {
        pg_tensor *lengths = born(PG_I32, SHAPE(c->B));
        for (int64_t b = 0; b < c->B; b++) set(lengths, b, c->lengths[b]);
        a.o.lengths = lengths;
    }
    return a;
}

static int forward(attention *a) { return pg_attention(a->out, a->lse, a->q, a->k, a->v, &a->o); }

static int backward(attention *a, int add) {
    return pg_attention_grad(a->dq, a->dk, a->dv, a->dout, a->q, a->k, a->v, a->out, a->lse, &a->o,
                             add);
}

static int sees(const shape *c, int64_t b, int64_t t, int64_t j) {
    if (c->lengths && j >= c->lengths[b]) return 0;
    return !c->causal || j <= t + c->Tk - c->T;
}

/* out and lse of one row of one head, by the formula. */
static void row(const shape *c, const attention *a, int64_t b, int64_t t, int64_t h, double *out,
                double *lse) {
    double *q = numbers(a->q), *k = a->k ? numbers(a->k) : q, *v = a->v ? numbers(a->v) : q;
    int64_t K = c->K, g = h / (c->H / c->G), row_q = (c->H + (c->packed ? 2 * c->G : 0)) * K;
    int64_t row_k = c->packed ? row_q : c->G * K, at_k = c->packed ? c->H * K : 0;
    int64_t at_v = c->packed ? (c->H + c->G) * K : 0;
    double *s = doubles(c->Tk), most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < c->Tk; j++) {
        s[j] = -INFINITY;
        if (!sees(c, b, t, j)) continue;
        s[j] = 0;
        for (int64_t i = 0; i < K; i++)
            s[j] += q[(b * c->T + t) * row_q + h * K + i] *
                    k[(b * c->Tk + j) * row_k + at_k + g * K + i] / sqrt((double)K);
        most = fmax(most, s[j]);
    }
    for (int64_t j = 0; j < c->Tk; j++) sum += s[j] > -INFINITY ? exp(s[j] - most) : 0;
    *lse = sum > 0 ? most + log(sum) : -INFINITY;
    for (int64_t i = 0; i < K; i++) {
        out[i] = 0;
        for (int64_t j = 0; j < c->Tk; j++)
            if (s[j] > -INFINITY)
                out[i] += exp(s[j] - *lse) * v[(b * c->Tk + j) * row_k + at_v + g * K + i];
    }
    while (made.n_blocks > 2) free(made.blocks[--made.n_blocks]);
}

static void check_value(const shape *c) {
    attention a = prepare(c);
    int64_t rows = c->B * c->T * c->H;
    double *want = doubles(rows * c->K), *want_lse = doubles(rows); /* the first two blocks */
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t t = 0; t < c->T; t++)
            for (int64_t h = 0; h < c->H; h++)
                row(c, &a, b, t, h, want + ((b * c->T + t) * c->H + h) * c->K,
                    want_lse + (b * c->H + h) * c->T + t);
    ok(forward(&a));
    near_to(a.out, want, tolerance(c->dtype));
    double *lse = numbers(a.lse);
    for (int64_t i = 0; i < rows; i++) {
        if (want_lse[i] == -INFINITY) assert_true(lse[i] == -INFINITY);
        else assert_true(fabs(lse[i] - want_lse[i]) <= tolerance(c->dtype) * (1 + fabs(lse[i])));
    }
    numbers_end(NULL);
}

static const int32_t short_and_none[] = {5, 0, 70};
static const shape shapes[] = {
    {2, 7, 7, 3, 3, 5, PG_F64, 1, 1, NULL},
    {2, 9, 9, 4, 2, 4, PG_F64, 1, 0, NULL},
    {1, 3, 8, 2, 1, 6, PG_F64, 0, 1, NULL},
    {2, 8, 3, 2, 2, 3, PG_F64, 0, 1, NULL},
    {3, 6, 9, 2, 1, 4, PG_F64, 0, 0, short_and_none},
    {3, 6, 6, 2, 2, 4, PG_F64, 1, 1, short_and_none},
};
#define SHAPES (sizeof shapes / sizeof *shapes)

static void value_agrees_with_a_loop(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        shape c = shapes[i];
        check_value(&c);
        c.dtype = PG_F32;
        check_value(&c);
    }
    const shape large[] = {{2, 130, 130, 3, 1, 8, PG_F32, 1, 1, NULL},
                           {1, 65, 100, 1, 1, 33, PG_F32, 0, 1, NULL},
                           {1, 100, 65, 2, 1, 40, PG_F32, 0, 1, NULL},
                           {1, 300, 300, 2, 2, 32, PG_F32, 1, 1, NULL},
                           {3, 70, 80, 2, 2, 16, PG_F32, 0, 1, short_and_none}};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) check_value(&large[i]);
}

static double weighed_out(void *context) {
    attention *a = context;
    ok(forward(a));
    return weighed(a->out, a->dout);
}

static void check_slopes(attention *a) {
    ok(forward(a));
    ok(backward(a, 0));
    slopes(a->dq, a->q, weighed_out, a);
    if (a->k) slopes(a->dk, a->k, weighed_out, a);
    if (a->k) slopes(a->dv, a->v, weighed_out, a);
}

static void gradients_agree_with_differences(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        attention a = prepare(&shapes[i]);
        check_slopes(&a);
        numbers_end(NULL);
    }
}

static void gradients_are_added(void **state) {
    (void)state;
    shape c = {2, 70, 70, 4, 2, 4, PG_F32, 0, 1, NULL};
    attention a = prepare(&c);
    ok(forward(&a));
    ok(backward(&a, 0));
    pg_tensor *d[] = {a.dq, a.dk, a.dv};
    for (int i = 0; i < 3; i++) {
        double *want = numbers(d[i]);
        for (int64_t j = 0; j < pg_tensor_count(d[i]); j++) want[j] += 0.5;
        set_all(d[i], 0.5);
        pg_tensor *only[3] = {NULL, NULL, NULL};
        only[i] = d[i];
        ok(pg_attention_grad(only[0], only[1], only[2], a.dout, a.q, a.k, a.v, a.out, a.lse, &a.o,
                             1));
        near_to(d[i], want, TOLERANCE_F32);
    }
}

/* Blocks of many rows in f32 against the same in f64. */
static void f32_gradients_agree_with_f64(void **state) {
    (void)state;
    shape c = {2, 150, 150, 4, 2, 16, PG_F64, 1, 1, NULL};
    attention a = prepare(&c);
    c.dtype = PG_F32;
    attention b = prepare(&c);
    ok(pg_copy(b.q, a.q));
    ok(pg_copy(b.dout, a.dout));
    ok(forward(&a));
    ok(backward(&a, 0));
    ok(forward(&b));
    ok(backward(&b, 0));
    near_to(b.dq, numbers(a.dq), TOLERANCE_F32);
}

/* Scores of -2.45e5, all equal, in f32: uniform weights, also in the gradient (of v: dout / n). */
static void large_equal_scores_stay_uniform(void **state) {
    (void)state;
    shape c = {1, 4, 4, 1, 1, 2, PG_F32, 0, 0, NULL};
    attention a = prepare(&c);
    for (int64_t i = 0; i < 8; i++) {
        set(a.q, i, i % 2 ? 0 : -700);
        set(a.k, i, i % 2 ? 0 : 350);
        set(a.dout, i, 1);
    }
    a.o.scale = 1;
    double *v = numbers(a.v), want[8], ones[8];
    for (int64_t i = 0; i < 8; i++) {
        want[i] = (v[i % 2] + v[2 + i % 2] + v[4 + i % 2] + v[6 + i % 2]) / 4;
        ones[i] = 1;
    }
    ok(forward(&a));
    ok(backward(&a, 0));
    near_to(a.out, want, TOLERANCE_F32);
    near_to(a.dv, ones, TOLERANCE_F32);
}

/* v = identity shows the probabilities: each is dropped or 1/(1-p) times its own. */
static void dropout_scales_what_it_keeps(void **state) {
    (void)state;
    shape c = {8, 16, 16, 2, 2, 16, PG_F64, 0, 0, NULL};
    attention a = prepare(&c);
    set_all(a.v, 0);
    for (int64_t i = 0; i < pg_tensor_count(a.v); i++) set(a.v, i, i % 16 == i / 32 % 16);
    ok(forward(&a));
    double *whole = numbers(a.out);
    a.o.dropout = 0.25;
    ok(forward(&a));
    double *some = numbers(a.out), dropped = 0;
    int64_t n = pg_tensor_count(a.out);
    for (int64_t i = 0; i < n; i++) {
        dropped += some[i] == 0;
        assert_true(some[i] == 0 || fabs(some[i] - whole[i] / 0.75) < 1e-12);
    }
    assert_true(fabs(dropped / (double)n - 0.25) < 0.03); /* 4096 draws: 4 deviations */
}

static void dropout_has_a_gradient(void **state) {
    (void)state;
    shape c = {2, 6, 6, 2, 1, 3, PG_F64, 1, 1, NULL};
    attention a = prepare(&c);
    pg_tensor *step = born(PG_F64, SHAPE(PG_STEP_SIZE));
    set_all(step, 0);
    set(step, PG_STEP_RANDOM, 12345);
    a.o.dropout = 0.3, a.o.key = 9, a.o.step = step, a.o.sample0 = 3, a.o.heads_all = 2;
    check_slopes(&a);
}

/* A part of the batch and of the heads drops what the whole drops there. */
static void dropout_follows_sample_and_head(void **state) {
    (void)state;
    shape c = {3, 5, 5, 4, 4, 8, PG_F32, 0, 1, NULL}, part = {1, 5, 5, 2, 2, 8, PG_F32, 0, 1, NULL};
    attention a = prepare(&c), b = prepare(&part);
    pg_tensor *from[] = {a.q, a.k, a.v}, *to[] = {b.q, b.k, b.v};
    for (int i = 0; i < 3; i++) { /* sample 2, heads 1 and 2 */
        double *x = numbers(from[i]);
        for (int64_t t = 0; t < 5; t++)
            for (int64_t j = 0; j < 16; j++) set(to[i], t * 16 + j, x[(10 + t) * 32 + 8 + j]);
    }
    a.o.dropout = b.o.dropout = 0.5;
    b.o.sample0 = 2, b.o.head0 = 1, b.o.heads_all = 4;
    ok(forward(&a));
    ok(forward(&b));
    double *x = numbers(a.out), *want = doubles(80);
    for (int64_t t = 0; t < 5; t++)
        for (int64_t j = 0; j < 16; j++) want[t * 16 + j] = x[(10 + t) * 32 + 8 + j];
    near_to(b.out, want, TOLERANCE_F32);
}

/* One key head: threads share its blocks of rows, and nothing else changes. */
static void threads_do_not_change_the_bits(void **state) {
    (void)state;
    shape c = {1, 150, 150, 2, 1, 32, PG_F32, 1, 1, NULL};
    attention a = prepare(&c);
    double *first[2] = {0};
    int threads = omp_get_max_threads();
    for (int n = 1; n <= 3; n++) {
        omp_set_num_threads(n);
        ok(forward(&a));
        ok(backward(&a, 0));
        double *now[] = {numbers(a.out), numbers(a.dq)};
        for (int i = 0; i < 2; i++) {
            if (n == 1) first[i] = now[i];
            size_t bytes = (size_t)pg_tensor_count(i ? a.dq : a.out) * sizeof(double);
            assert_memory_equal(now[i], first[i], bytes);
        }
    }
    omp_set_num_threads(threads);
}

/* Whatever lies behind a sample's length, even a NaN, reaches no result. */
static void unseen_keys_are_not_read(void **state) {
    (void)state;
    static const int32_t lengths[] = {5, 37};
    shape c = {2, 40, 40, 2, 1, 24, PG_F32, 0, 0, lengths};
    attention a = prepare(&c);
    for (int64_t b = 0; b < 2; b++)
        for (int64_t i = lengths[b] * c.K; i < 40 * c.K; i++)
            set(a.k, b * 40 * c.K + i, NAN), set(a.v, b * 40 * c.K + i, NAN);
    ok(forward(&a));
    ok(backward(&a, 0));
    pg_tensor *results[] = {a.out, a.lse, a.dq, a.dk, a.dv};
    for (int r = 0; r < 5; r++) {
        double *x = numbers(results[r]);
        for (int64_t i = 0; i < pg_tensor_count(results[r]); i++) assert_true(isfinite(x[i]));
    }
}

static void bad_shapes_are_told(void **state) {
    (void)state;
    shape c = {2, 4, 5, 4, 2, 3, PG_F32, 0, 1, NULL};
    attention a = prepare(&c);
    pg_tensor *odd = noisy(PG_F32, SHAPE(2, 5, 7)), *flat = noisy(PG_F32, SHAPE(2, 12));
    a.o.heads = 3;
    refuses(PG_EINVAL, "3 heads, 2 key heads", forward(&a));
    a.o.heads = 4;
    refuses(PG_ESHAPE, "k must be [2,Tk,6]", pg_attention(a.out, a.lse, a.q, odd, odd, &a.o));
    refuses(PG_EINVAL, "both k and v", pg_attention(a.out, a.lse, a.q, a.k, NULL, &a.o));
    refuses(PG_ESHAPE, "packed: heads + 2 kv_heads",
            pg_attention(a.out, a.lse, odd, NULL, NULL, &a.o));
    refuses(PG_ESHAPE, "three dims", pg_attention(a.out, a.lse, flat, NULL, NULL, &a.o));
    refuses(PG_ESHAPE, "out must be [2,4,12]", pg_attention(a.k, a.lse, a.q, a.k, a.v, &a.o));
    refuses(PG_EINVAL, "share memory", pg_attention(a.q, a.lse, a.q, a.k, a.v, &a.o));
    refuses(PG_EINVAL, "options are missing", pg_attention(a.out, a.lse, a.q, a.k, a.v, NULL));
    a.o.dropout = 1;
    refuses(PG_EINVAL, "dropout 1 lies outside [0,1)", forward(&a));
    a.o.dropout = 0, a.o.lengths = odd;
    refuses(PG_ESHAPE, "dtype must be i32", forward(&a));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(value_agrees_with_a_loop, numbers_end),
        cmocka_unit_test_teardown(gradients_agree_with_differences, numbers_end),
        cmocka_unit_test_teardown(gradients_are_added, numbers_end),
        cmocka_unit_test_teardown(f32_gradients_agree_with_f64, numbers_end),
        cmocka_unit_test_teardown(large_equal_scores_stay_uniform, numbers_end),
        cmocka_unit_test_teardown(dropout_scales_what_it_keeps, numbers_end),
        cmocka_unit_test_teardown(dropout_has_a_gradient, numbers_end),
        cmocka_unit_test_teardown(dropout_follows_sample_and_head, numbers_end),
        cmocka_unit_test_teardown(threads_do_not_change_the_bits, numbers_end),
        cmocka_unit_test_teardown(unseen_keys_are_not_read, numbers_end),
        cmocka_unit_test_teardown(bad_shapes_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
