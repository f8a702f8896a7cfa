/* Cross-entropy of a vocabulary cut over ranks: stats of the parts, joined, against
 * pg_cross_entropy on the whole; the gradient of each part; padding that must not be read;
 * calls that are refused. */
#include "numbers.h"

#define IGNORE   (-100)
#define MOST_CUT 4

/* Ids [first, first + valid) in `columns` columns, the others poisoned. */
typedef struct {
    int64_t first, valid, columns;
    pg_tensor *x, *dx;
} part;

typedef struct {
    int64_t n, v;
    int r, dtype;
    part parts[MOST_CUT];
    pg_tensor *x, *targets, *step;                    /* the whole */
    pg_tensor *out, *rows, *lse, *joined;             /* of the parts; joined [R,2,N] */
    pg_tensor *want_out, *want_rows, *want_lse, *one; /* of the whole */
} cut;

/* Widths of the parts, summing to v; padding columns behind each. */
static cut cut_of(int dtype, int64_t n, int64_t v, int r, const int64_t *widths, int64_t padding) {
    cut k = {.n = n, .v = v, .r = r, .dtype = dtype};
    k.x = noisy(dtype, SHAPE(n, v));
    k.targets = some_ids(PG_I32, v, SHAPE(n));
    for (int64_t i = 1; i < n; i += 3) set(k.targets, i, IGNORE);
    k.out = poisoned(dtype, SHAPE(2)), k.want_out = poisoned(dtype, SHAPE(2));
    k.rows = poisoned(dtype, SHAPE(n)), k.want_rows = poisoned(dtype, SHAPE(n));
    k.lse = poisoned(dtype, SHAPE(n)), k.want_lse = poisoned(dtype, SHAPE(n));
    k.joined = poisoned(dtype, SHAPE(r, 2, n));
    k.one = born(dtype, SHAPE(1));
    set(k.one, 0, 1);
    int64_t first = 0;
    double *x = numbers(k.x);
    for (int p = 0; p < r; p++) {
        part *to = &k.parts[p];
        *to = (part){.first = first, .valid = widths[p], .columns = widths[p] + padding};
        to->x = poisoned(dtype, SHAPE(n, to->columns));
        to->dx = poisoned(dtype, SHAPE(n, to->columns));
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < to->columns; j++)
                if (j < to->valid) set(to->x, i * to->columns + j, x[i * v + first + j]);
                else if (j % 2) set(to->x, i * to->columns + j, 1e30); /* the others stay NaN */
        first += widths[p];
    }
    assert_int_equal(first, v);
    return k;
}

static void join(cut *k) {
    double *stats;
    for (int p = 0; p < k->r; p++) {
        part *a = &k->parts[p];
        pg_tensor *mine = poisoned(k->dtype, SHAPE(2, k->n));
        ok(pg_vocab_stats(mine, a->x, k->targets, a->first, a->valid, k->v, IGNORE));
        stats = numbers(mine);
        for (int64_t i = 0; i < 2 * k->n; i++) set(k->joined, p * 2 * k->n + i, stats[i]);
    }
    ok(pg_vocab_loss(k->out, k->rows, k->lse, k->joined, k->targets, IGNORE, k->step));
}

static void check_cut(cut k, int per_row) {
    int64_t n = k.n, v = k.v;
    pg_tensor *dx = poisoned(k.dtype, SHAPE(n, v)),
              *dloss = per_row ? noisy(k.dtype, SHAPE(n)) : k.one;
    ok(pg_cross_entropy(k.want_out, k.want_rows, k.want_lse, k.x, k.targets, IGNORE, k.step));
    ok(pg_cross_entropy_grad(dx, dloss, k.x, k.targets, k.want_lse, k.want_out, IGNORE, k.step, 0));
    join(&k);
    near_to(k.out, numbers(k.want_out), tolerance(k.dtype));
    near_to(k.rows, numbers(k.want_rows), tolerance(k.dtype));
    near_to(k.lse, numbers(k.want_lse), tolerance(k.dtype));
    double *whole = numbers(dx);
    for (int p = 0; p < k.r; p++) {
        part *a = &k.parts[p];
        int64_t c = a->columns;
        double *want = doubles(n * c), *added = doubles(n * c);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < a->valid; j++) want[i * c + j] = whole[i * v + a->first + j];
        for (int64_t i = 0; i < n * c; i++) added[i] = want[i] + 0.5;
        pg_tensor *half = born(k.dtype, SHAPE(n, c));
        set_all(half, 0.5);
        ok(pg_vocab_grad(a->dx, dloss, a->x, k.targets, k.lse, k.out, a->first, a->valid, IGNORE,
                         k.step, 0));
        ok(pg_vocab_grad(half, dloss, a->x, k.targets, k.lse, k.out, a->first, a->valid, IGNORE,
                         k.step, 1));
        ok(pg_vocab_grad(a->x, dloss, a->x, k.targets, k.lse, k.out, a->first, a->valid, IGNORE,
                         k.step, 0));
        if (n * c == 0) continue;
        near_to(a->dx, want, tolerance(k.dtype));
        near_to(a->x, want, tolerance(k.dtype)); /* in place */
        near_to(half, added, tolerance(k.dtype));
        double *d = numbers(a->dx);
        for (int64_t i = 0; i < n * c; i++)
            if (i % c >= a->valid) assert_true(d[i] == 0); /* padding: exactly */
    }
    numbers_end(NULL);
}

static void parts_agree_with_the_whole(void **state) {
    (void)state;
    static const int64_t widths[][MOST_CUT] = {{13},       {9, 4},    {5, 7, 1},
                                               {0, 13, 0}, {6, 0, 7}, {4, 4, 4, 1}};
    static const int counts[] = {1, 2, 3, 3, 3, 4};
    for (int i = 0; i < 6; i++)
        for (int kind = 0; kind < 8; kind++) {
            cut k = cut_of(kind & 1 ? PG_F64 : PG_F32, 11, 13, counts[i], widths[i],
                           kind & 2 ? 3 : i == 3 || i == 4); /* no part is without columns */
            if (kind & 4) {
                k.step = born(PG_F64, SHAPE(PG_STEP_SIZE));
                set_all(k.step, NAN);
                set(k.step, PG_STEP_INV_TOKENS, 0.01);
            }
            check_cut(k, kind & 2 ? 1 : 0);
        }
    static const int64_t large[] = {700, 333, 467};
    for (int kind = 0; kind < 2; kind++)
        check_cut(cut_of(kind ? PG_F64 : PG_F32, 37, 1500, 3, large, 5), kind);
    static const int64_t none[] = {3, 4};
    check_cut(cut_of(PG_F32, 1, 7, 2, none, 1), 0); /* one row */
}

/* What one part says, number by number. */
static void stats_of_a_part(void **state) {
    (void)state;
    static const int64_t widths[] = {4, 0, 3};
    cut k = cut_of(PG_F64, 5, 7, 3, widths, 2);
    double *x = numbers(k.x), *t = numbers(k.targets);
    join(&k);
    double *got = numbers(k.joined);
    for (int p = 0; p < 3; p++)
        for (int64_t i = 0; i < k.n; i++) {
            part *a = &k.parts[p];
            int64_t at = (int64_t)t[i] - a->first, ignored = (int64_t)t[i] == IGNORE;
            double lse = got[p * 2 * k.n + i], logit = got[(p * 2 + 1) * k.n + i], sum = 0;
            for (int64_t j = 0; j < a->valid; j++) sum += exp(x[i * k.v + a->first + j]);
            if (ignored) assert_true(lse == 0 && logit == 0);
            else if (!a->valid) assert_true(lse == -INFINITY && logit == 0);
            else {
                assert_true(fabs(lse - log(sum)) < TOLERANCE_F64);
                assert_true(logit == (at >= 0 && at < a->valid ? x[i * k.v + (int64_t)t[i]] : 0));
            }
        }
}

/* Logits far apart: the largest part decides, and nothing overflows. */
static void parts_of_large_logits(void **state) {
    (void)state;
    static const int64_t widths[] = {1, 1};
    cut k = cut_of(PG_F32, 3, 2, 2, widths, 0);
    for (int64_t i = 0; i < 3; i++) {
        set(k.parts[0].x, i, i == 2 ? -INFINITY : 3000);
        set(k.parts[1].x, i, i == 2 ? -3000 : 0);
        set(k.targets, i, i == 1 ? 0 : 1);
    }
    join(&k);
    double *rows = numbers(k.rows), *lse = numbers(k.lse);
    assert_true(rows[0] == 3000 && rows[1] == 0 && rows[2] == 0);
    assert_true(lse[0] == 3000 && lse[1] == 3000 && lse[2] == -3000);
}

static void all_rows_ignored(void **state) {
    (void)state;
    static const int64_t widths[] = {2, 3};
    cut k = cut_of(PG_F32, 4, 5, 2, widths, 1);
    set_all(k.targets, IGNORE);
    join(&k);
    double *out = numbers(k.out);
    assert_true(out[0] == 0 && out[1] == 0);
    part *a = &k.parts[1];
    ok(pg_vocab_grad(a->dx, k.one, a->x, k.targets, k.lse, k.out, 2, 3, IGNORE, NULL, 0));
    double *d = numbers(a->dx);
    for (int64_t i = 0; i < 16; i++) assert_true(d[i] == 0);
}

/* Ids that are checked against the whole, wide ones among them, and i64. */
static void wide_ids(void **state) {
    (void)state;
    pg_tensor *x = noisy(PG_F64, SHAPE(2, 3)), *ids = born(PG_I64, SHAPE(2)),
              *stats = born(PG_F64, SHAPE(2, 2));
    ((int64_t *)pg_tensor_data(ids))[0] = INT64_MIN; /* the ignored one */
    ((int64_t *)pg_tensor_data(ids))[1] = (int64_t)1 << 40;
    ok(pg_vocab_stats(stats, x, ids, ((int64_t)1 << 40) - 1, 3, (int64_t)1 << 41, INT64_MIN));
    assert_true(numbers(stats)[3] == numbers(x)[4]);
}

static void bad_calls_are_told(void **state) {
    (void)state;
    static const int64_t widths[] = {4, 3};
    cut k = cut_of(PG_F32, 4, 7, 2, widths, 1);
    part *a = &k.parts[0];
    pg_tensor *stats = born(PG_F32, SHAPE(2, 4)), *few = born(PG_F32, SHAPE(7)),
              *wide = born(PG_F64, SHAPE(2, 4));
    pg_tensor *flat = born(PG_F32, SHAPE(2, 2, 4)), *half = born(PG_BF16, SHAPE(2, 2, 4));
    refuses(PG_EINVAL, "vocab_stats: first is -1",
            pg_vocab_stats(stats, a->x, k.targets, -1, 4, 7, IGNORE));
    refuses(PG_EINVAL, "vocab_stats: valid is 6, logits are [4,5] f32; it must lie in [0,5]",
            pg_vocab_stats(stats, a->x, k.targets, 0, 6, 7, IGNORE));
    refuses(PG_EINVAL, "vocab_stats: valid is -1",
            pg_vocab_stats(stats, a->x, k.targets, 0, -1, 7, IGNORE));
    refuses(PG_EINVAL, "the ids from 4 on, 4 of them, reach past the vocabulary [0,7)",
            pg_vocab_stats(stats, a->x, k.targets, 4, 4, 7, IGNORE));
    refuses(PG_EINVAL, "reach past",
            pg_vocab_stats(stats, a->x, k.targets, INT64_MAX, 4, 7, IGNORE));
    refuses(PG_ESHAPE, "stats is [7] f32; it must hold 8 numbers",
            pg_vocab_stats(few, a->x, k.targets, 0, 4, 7, IGNORE));
    refuses(PG_ESHAPE, "its dtype must be f32",
            pg_vocab_stats(wide, a->x, k.targets, 0, 4, 7, IGNORE));
    set(k.targets, 2, 7);
    refuses(
        PG_EINVAL,
        "vocab_stats: target 7 at row 0, column 2 is outside the vocabulary [0,7) (-100 is ignored)",
        pg_vocab_stats(stats, a->x, k.targets, 0, 4, 7, IGNORE));
    refuses(PG_ESHAPE, "parts are [2,4] f32, targets are [4] i32; parts must be [R,2,N]",
            pg_vocab_loss(k.out, k.rows, k.lse, stats, k.targets, IGNORE, NULL));
    refuses(PG_ESHAPE, "parts are [2,2,4] bf16; they must be f32 or f64",
            pg_vocab_loss(k.out, k.rows, k.lse, half, k.targets, IGNORE, NULL));
    refuses(PG_ESHAPE, "a step block is",
            pg_vocab_loss(k.out, NULL, k.lse, flat, k.targets, IGNORE, few));
    refuses(PG_ESHAPE, "rows is [7] f32",
            pg_vocab_loss(k.out, few, k.lse, flat, k.targets, IGNORE, NULL));
    refuses(PG_EINVAL, "vocab_grad: valid is 9",
            pg_vocab_grad(a->dx, k.one, a->x, k.targets, k.lse, k.out, 0, 9, IGNORE, NULL, 0));
    refuses(PG_EINVAL, "share memory",
            pg_vocab_grad(a->x, k.one, a->x, k.targets, k.lse, k.out, 0, 4, IGNORE, NULL, 1));
    refuses(PG_EINVAL, "vocab_grad: out is missing",
            pg_vocab_grad(a->dx, k.one, a->x, k.targets, k.lse, NULL, 0, 4, IGNORE, NULL, 0));
    refuses(PG_ESHAPE, "vocab_grad: dloss is [7] f32",
            pg_vocab_grad(a->dx, few, a->x, k.targets, k.lse, k.out, 0, 4, IGNORE, NULL, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(parts_agree_with_the_whole, numbers_end),
        cmocka_unit_test_teardown(stats_of_a_part, numbers_end),
        cmocka_unit_test_teardown(parts_of_large_logits, numbers_end),
        cmocka_unit_test_teardown(all_rows_ignored, numbers_end),
        cmocka_unit_test_teardown(wide_ids, numbers_end),
        cmocka_unit_test_teardown(bad_calls_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
