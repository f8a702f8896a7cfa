/* The CUDA kernels of swiglu, rope, embedding, loss and sampling against their CPU twins in f64:
 * see tests/twins.h.  Attention: test_twins_attention.c. */
#include "twins.h"

#define ROUNDS 8 /* random shapes for each dtype */
#define IGNORE (-100)

/* Ids for the host twin; freed by the caller. */
static void *host_ids(const twin_array *ids) {
    void *to = malloc((size_t)twin_size(ids) + 1);
    assert_non_null(to);
    if (ids->n) ok(twins.cpu->cast(to, ids->host, ids->n, ids->dtype, PG_F64, NULL));
    return to;
}

static twin_array some_ids(int64_t n, int64_t v, int dtype, double ignored) {
    double *from = twin_doubles(n);
    for (int64_t i = 0; i < n; i++)
        from[i] = draw(0, 1) < ignored ? IGNORE : (double)draw_int(0, v - 1);
    twin_array ids = input_of(from, n, dtype);
    free(from);
    return ids;
}

static int some_id_dtype(void) { return draw_int(0, 1) ? PG_I32 : PG_I64; }

/* Every dtype, some shapes each, some of them off the 16-byte boundary. */
static void for_shapes(void (*check)(int dtype)) {
    for (int i = 0; i < 4 * ROUNDS; i++) {
        twins.shift = i / 4 % 3 == 2;
        check(floating[i % 4]);
        twins_free();
    }
    twins.shift = 0;
}

/* ---- swiglu, rope ---- */
static void check_swiglu(int dtype) {
    int64_t n = draw_size(70), f = draw_size(700);
    int add = (int)draw_int(0, 1);
    twin_array x = input_in(2 * n * f, dtype, -6, 6), dy = input(n * f, dtype);
    twin_array y = output(n * f, dtype, 0), dx = output(2 * n * f, dtype, add);
    ok(twins.cpu->swiglu(y.host, x.host, n, f, PG_F64, NULL));
    ok(twins.cuda->swiglu(y.device, x.device, n, f, dtype, twins.stream));
    near(y, bound(dtype));
    ok(twins.cpu->swiglu_grad(dx.host, dy.host, x.host, n, f, add, PG_F64, NULL));
    ok(twins.cuda->swiglu_grad(dx.device, dy.device, x.device, n, f, add, dtype, twins.stream));
    near(dx, bound_gradient(dtype));
    ok(twins.cpu->swiglu_grad(x.host, dy.host, x.host, n, f, 0, PG_F64, NULL)); /* in place */
    ok(twins.cuda->swiglu_grad(x.device, dy.device, x.device, n, f, 0, dtype, twins.stream));
    near(x, bound_gradient(dtype));
}
static void swiglu(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_swiglu);
}

static void check_rope_of(int dtype, int64_t b, int64_t t, int64_t half, int64_t heads) {
    int64_t c = 2 * half * heads + (draw_int(0, 1) ? 16 : draw_int(0, 30)), start = draw_int(0, 5);
    int64_t n = b * t * c, lines = (start + t) * half;
    int add = (int)draw_int(0, 1), sign = draw_int(0, 1) ? 1 : -1;
    twin_array x = input(n, dtype), y = output(n, dtype, add);
    twin_array cosine = input(lines, real_dtype(dtype)), sine = input(lines, real_dtype(dtype));
    ok(twins.cpu->rope(y.host, x.host, cosine.host, sine.host, b, t, c, heads, half, start, sign,
                       add, PG_F64, NULL));
    ok(twins.cuda->rope(y.device, x.device, cosine.device, sine.device, b, t, c, heads, half, start,
                        sign, add, dtype, twins.stream));
    near(y, bound(dtype));
    ok(twins.cpu->rope(x.host, x.host, cosine.host, sine.host, b, t, c, heads, half, start, sign, 0,
                       PG_F64, NULL)); /* in place */
    ok(twins.cuda->rope(x.device, x.device, cosine.device, sine.device, b, t, c, heads, half, start,
                        sign, 0, dtype, twins.stream));
    near(x, bound(dtype));
    int64_t first = draw_int(0, 100000);
    twin_array cos2 = output(lines, dtype, 0), sin2 = output(lines, dtype, 0);
    ok(twins.cpu->rope_table(cos2.host, sin2.host, 1e4, first, start + t, half, PG_F64, NULL));
    ok(twins.cuda->rope_table(cos2.device, sin2.device, 1e4, first, start + t, half, dtype,
                              twins.stream));
    near(cos2, bound(dtype));
    near(sin2, bound(dtype));
}
static void check_rope(int dtype) {
    check_rope_of(dtype, draw_int(1, 3), draw_size(40), draw_size(64), draw_int(0, 4));
}
static void rope(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_rope);
    for (int i = 0; i < 4; i++) {
        check_rope_of(floating[i], 2500, 2, 8, 2); /* more samples than are taken side by side */
        check_rope_of(floating[i], 1, 3, 600, 1);  /* more pairs than a launch has turns for */
        twins_free();
    }
}

/* ---- embedding ---- */
/* The table holds v ids; `others` lie on each side of them. */
static void check_embedding_of(int dtype, int64_t n, int64_t v, int64_t d, int64_t others) {
    int add = (int)draw_int(0, 1), ids_dtype = some_id_dtype();
    twin_array table = input(v * d, dtype), dy = input(n * d, dtype), y = output(n * d, dtype, 0);
    twin_array ids = some_ids(n, v + 2 * others, ids_dtype, 0), dtable = output(v * d, dtype, add);
    twin_array again = add ? input_of(dtable.host, v * d, dtype) : output(v * d, dtype, 0);
    void *id = host_ids(&ids), *scratch = scratch_of(twins.cuda->embedding_grad_scratch(n, v));
    ok(twins.cpu->embedding(y.host, table.host, id, n, d, v, others, PG_F64, ids_dtype, NULL));
    ok(twins.cuda->embedding(y.device, table.device, ids.device, n, d, v, others, dtype, ids_dtype,
                             twins.stream));
    same(y);
    ok(twins.cpu->embedding_grad(dtable.host, dy.host, id, n, d, v, others, add, NULL, PG_F64,
                                 PG_F64, ids_dtype, NULL));
    for (int i = 0; i < 2; i++)
        ok(twins.cuda->embedding_grad(i ? again.device : dtable.device, dy.device, ids.device, n, d,
                                      v, others, add, scratch, dtype, dtype, ids_dtype,
                                      twins.stream));
    near(dtable, bound_gradient(dtype));
    double *one = device_numbers(&dtable, "dtable"), *two = device_numbers(&again, "again");
    assert_memory_equal(one, two, (size_t)(v * d) * sizeof *one); /* the same bits */
    free(one), free(two), free(id);
}
static void check_embedding(int dtype) {
    check_embedding_of(dtype, draw_size(600), draw_size(300), draw_size(500),
                       draw_int(0, 1) * draw_size(300));
}
static void embedding(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_embedding);
    for (int i = 0; i < 4; i++) {
        check_embedding_of(floating[i], 3001, 1, 72, 0); /* a line with many positions */
        check_embedding_of(floating[i], 2000, 4, 515, 0);
        check_embedding_of(floating[i], 2000, 4, 515, 2);     /* half of the ids are elsewhere */
        check_embedding_of(floating[i], 300, 5, 40, 1 << 20); /* nearly all are */
        check_embedding_of(floating[i], 9000, 50257, 24, 0);
        check_embedding_of(floating[i], 0, 7, 9, 3);
        twins_free();
    }
    check_embedding_of(PG_BF16, 65536, 128256, 8, 0);
    check_embedding_of(PG_BF16, 65536, 16032, 8, 56112); /* a part in eight */
}

static void ids_outside(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < 20; i++) {
        int64_t n = draw_size(100000), v = draw_size(70000), bad = draw_int(0, n - 1);
        int dtype = some_id_dtype();
        twin_array ids = some_ids(n, v, dtype, 0.1);
        assert_int_equal(twins.cuda->check_ids(ids.device, n, v, IGNORE, dtype, twins.stream), -1);
        double *from = twin_doubles(n);
        memcpy(from, ids.host, (size_t)n * sizeof *from);
        for (int64_t j = bad; j < n; j += 1 + j / 2) from[j] = draw_int(0, 1) ? (double)v : -1;
        twin_array wrong = input_of(from, n, dtype);
        free(from);
        assert_int_equal(twins.cuda->check_ids(wrong.device, n, v, IGNORE, dtype, twins.stream),
                         bad);
        twins_free();
    }
}

/* ---- softmax, loss ---- */
static int64_t some_vocabulary(void) {
    const int64_t known[] = {50257, 128256, 259, 1};
    int64_t pick = draw_int(0, 9);
    return pick < 4 ? known[pick] : draw_size(5000);
}

static void check_softmax(int dtype) {
    int64_t v = some_vocabulary(), n = v > 9999 ? draw_int(1, 5) : draw_size(40);
    for (int logarithm = 0; logarithm < 2; logarithm++) {
        int add = (int)draw_int(0, 1);
        twin_array x = input_in(n * v, dtype, -9, 9), y = output(n * v, dtype, 0);
        ok(twins.cpu->softmax(y.host, x.host, n, v, logarithm, PG_F64, NULL));
        ok(twins.cuda->softmax(y.device, x.device, n, v, logarithm, dtype, twins.stream));
        near(y, bound(dtype));
        twin_array p = input_of(y.host, n * v, dtype), dy = input(n * v, dtype);
        twin_array dx = output(n * v, dtype, add);
        ok(twins.cpu->softmax_grad(dx.host, dy.host, p.host, n, v, logarithm, add, PG_F64, NULL));
        ok(twins.cuda->softmax_grad(dx.device, dy.device, p.device, n, v, logarithm, add, dtype,
                                    twins.stream));
        near(dx, bound_gradient(dtype));
        ok(twins.cpu->softmax_grad(dy.host, dy.host, p.host, n, v, logarithm, 0, PG_F64, NULL));
        ok(twins.cuda->softmax_grad(dy.device, dy.device, p.device, n, v, logarithm, 0, dtype,
                                    twins.stream));
        near(dy, bound_gradient(dtype));
    }
}
static void softmax(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_softmax);
}

static void masked_logits(void **state) {
    (void)state;
    need_gpu();
    double x[70];
    for (int i = 0; i < 70; i++) x[i] = i < 40 ? -INFINITY : i; /* whole packs of nothing first */
    for (int i = 0; i < 4; i++) {
        twin_array logits = input_of(x, 70, floating[i]), y = output(70, floating[i], 0);
        ok(twins.cpu->softmax(y.host, logits.host, 1, 70, 0, PG_F64, NULL));
        ok(twins.cuda->softmax(y.device, logits.device, 1, 70, 0, floating[i], twins.stream));
        near(y, bound(floating[i]));
    }
}

static void check_cross_entropy(int dtype) {
    int64_t v = some_vocabulary(), n = v > 9999 ? draw_int(1, 6) : draw_size(60);
    int kept = real_dtype(dtype), ids_dtype = some_id_dtype(), stepped = (int)draw_int(0, 1);
    int per_row = (int)draw_int(0, 1), add = (int)draw_int(0, 1);
    double numbers[PG_STEP_SIZE];
    for (int i = 0; i < PG_STEP_SIZE; i++) numbers[i] = i == PG_STEP_INV_TOKENS ? 0.037 : NAN;
    twin_array x = input_in(n * v, dtype, -9, 9), step = input_of(numbers, PG_STEP_SIZE, PG_F64);
    twin_array targets = some_ids(n, v, ids_dtype, draw_int(0, 3) ? 0.2 : 1);
    twin_array out = output(2, kept, 0), rows = output(n, kept, 0), lse = output(n, kept, 0);
    twin_array dloss = input(per_row ? n : 1, kept), dx = output(n * v, dtype, add);
    const double *host_step = stepped ? step.host : NULL,
                 *device_step = stepped ? step.device : NULL;
    void *ids = host_ids(&targets);
    double *loss = twin_doubles(n);
    ok(twins.cpu->cross_entropy(out.host, rows.host, lse.host, x.host, ids, n, v, IGNORE, host_step,
                                loss, PG_F64, ids_dtype, NULL));
    ok(twins.cuda->cross_entropy(
        out.device, rows.device, lse.device, x.device, targets.device, n, v, IGNORE, device_step,
        scratch_of(twins.cuda->cross_entropy_scratch(n)), dtype, ids_dtype, twins.stream));
    near(out, bound(kept));
    near(rows, bound(kept));
    near(lse, bound(kept));
    for (int in_place = 0; in_place < 2; in_place++) {
        twin_array *to = in_place ? &x : &dx;
        ok(twins.cpu->cross_entropy_grad(to->host, dloss.host, per_row, x.host, ids, lse.host,
                                         out.host, n, v, 0, v, IGNORE, host_step,
                                         in_place ? 0 : add, PG_F64, ids_dtype, NULL));
        ok(twins.cuda->cross_entropy_grad(
            to->device, dloss.device, per_row, x.device, targets.device, lse.device, out.device, n,
            v, 0, v, IGNORE, device_step, in_place ? 0 : add, dtype, ids_dtype, twins.stream));
        near(*to, bound_gradient(dtype));
    }
    free(ids), free(loss);
}
static void cross_entropy(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_cross_entropy);
}

static void loss_of_no_rows(void **state) {
    (void)state;
    need_gpu();
    twin_array out = output(2, PG_F32, 0), none = input(0, PG_F32), targets = input(0, PG_I32);
    out.host[0] = out.host[1] = 0;
    ok(twins.cuda->cross_entropy(out.device, NULL, none.device, none.device, targets.device, 0, 50,
                                 IGNORE, NULL, scratch_of(8), PG_F32, PG_I32, twins.stream));
    same(out);
}

/* ---- a part of the vocabulary ---- */
/* Logits [n,v] whose columns from valid on are NaN. */
static twin_array padded_logits(int64_t n, int64_t v, int64_t valid, int dtype) {
    double *from = twin_doubles(n * v);
    for (int64_t i = 0; i < n * v; i++) from[i] = i % v < valid ? draw(-9, 9) : (double)NAN;
    twin_array x = input_of(from, n * v, dtype);
    free(from);
    return x;
}

static void check_part(int dtype) {
    int64_t vocab = some_vocabulary(), valid = draw_int(1, vocab), v = valid + draw_int(0, 40);
    int64_t first = draw_int(0, vocab - valid), n = valid > 9999 ? draw_int(1, 6) : draw_size(60);
    int kept = real_dtype(dtype), ids_dtype = some_id_dtype(), add = (int)draw_int(0, 1);
    twin_array x = padded_logits(n, v, valid, dtype), stats = output(2 * n, kept, 0);
    twin_array targets = some_ids(n, vocab, ids_dtype, 0.2), dloss = input(n, kept);
    twin_array lse = input_in(n, kept, 8, 12), dx = output(n * v, dtype, add);
    void *ids = host_ids(&targets);
    ok(twins.cpu->vocab_stats(stats.host, x.host, ids, n, v, first, valid, IGNORE, PG_F64,
                              ids_dtype, NULL));
    ok(twins.cuda->vocab_stats(stats.device, x.device, targets.device, n, v, first, valid, IGNORE,
                               dtype, ids_dtype, twins.stream));
    near(stats, bound(kept));
    for (int in_place = 0; in_place < 2; in_place++) {
        twin_array *to = in_place ? &x : &dx;
        ok(twins.cpu->cross_entropy_grad(to->host, dloss.host, 1, x.host, ids, lse.host, NULL, n, v,
                                         first, valid, IGNORE, NULL, in_place ? 0 : add, PG_F64,
                                         ids_dtype, NULL));
        ok(twins.cuda->cross_entropy_grad(to->device, dloss.device, 1, x.device, targets.device,
                                          lse.device, NULL, n, v, first, valid, IGNORE, NULL,
                                          in_place ? 0 : add, dtype, ids_dtype, twins.stream));
        near(*to, bound_gradient(dtype));
    }
    free(ids);
}
static void part_of_a_vocabulary(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_part);
}

/* A part that is padding alone, among ids that others hold. */
static void part_of_padding(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < 4; i++) {
        int64_t n = 50, v = 70;
        int dtype = floating[i], kept = real_dtype(dtype);
        twin_array x = padded_logits(n, v, 0, dtype), stats = output(2 * n, kept, 0);
        twin_array targets = some_ids(n, 9, PG_I32, 0.2), lse = input(n, kept);
        twin_array one = input(1, kept), out = input_in(2, kept, 1, 2);
        ok(twins.cuda->vocab_stats(stats.device, x.device, targets.device, n, v, 9, 0, IGNORE,
                                   dtype, PG_I32, twins.stream));
        double *got = device_numbers(&stats, "stats");
        for (int64_t j = 0; j < n; j++) {
            assert_true(got[j] == ((int64_t)targets.host[j] == IGNORE ? 0 : -INFINITY));
            assert_true(got[n + j] == 0);
        }
        free(got);
        ok(twins.cuda->cross_entropy_grad(x.device, one.device, 0, x.device, targets.device,
                                          lse.device, out.device, n, v, 9, 0, IGNORE, NULL, 0,
                                          dtype, PG_I32, twins.stream));
        memset(x.host, 0, (size_t)(n * v) * sizeof *x.host);
        same(x);
        twins_free();
    }
}

static void parts_joined(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < 20; i++) {
        int64_t r = draw_int(1, 9), n = draw_size(3000), empty = draw_int(0, r);
        int kept = draw_int(0, 1) ? PG_F32 : PG_F64, ids_dtype = some_id_dtype();
        double *from = twin_doubles(r * 2 * n);
        for (int64_t j = 0; j < r * 2 * n; j++) /* one part, at most, is of padding */
            from[j] = r > 1 && j / n == 2 * empty ? -(double)INFINITY : draw(3, 20);
        twin_array parts = input_of(from, r * 2 * n, kept), out = output(2, kept, 0);
        twin_array targets = some_ids(n, 99, ids_dtype, 0.2);
        twin_array rows = output(n, kept, 0), lse = output(n, kept, 0);
        void *ids = host_ids(&targets);
        double *loss = twin_doubles(n);
        ok(twins.cpu->vocab_loss(out.host, rows.host, lse.host, parts.host, ids, r, n, IGNORE, NULL,
                                 loss, PG_F64, ids_dtype, NULL));
        ok(twins.cuda->vocab_loss(
            out.device, rows.device, lse.device, parts.device, targets.device, r, n, IGNORE, NULL,
            scratch_of(twins.cuda->cross_entropy_scratch(n)), kept, ids_dtype, twins.stream));
        near(out, bound(kept));
        near(rows, bound(kept));
        near(lse, bound(kept));
        free(from), free(ids), free(loss);
        twins_free();
    }
}

/* ---- sampling ---- */
static void check_argmax(int dtype) {
    int64_t v = some_vocabulary(), n = draw_int(1, 9);
    int ids_dtype = some_id_dtype();
    twin_array x = input_in(n * v, dtype, -1, 1), ids = output(n, ids_dtype, 0);
    void *want = malloc((size_t)twin_size(&ids));
    assert_non_null(want);
    ok(twins.cpu->argmax(want, x.host, n, v, PG_F64, ids_dtype, NULL));
    ok(twins.cpu->cast(ids.host, want, n, PG_F64, ids_dtype, NULL));
    ok(twins.cuda->argmax(ids.device, x.device, n, v, dtype, ids_dtype, twins.stream));
    same(ids);
    free(want);
}
static void argmax(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_argmax);
    double odd[] = {NAN, -INFINITY, -INFINITY, NAN, NAN, NAN, 2, NAN, 2}, want[] = {1, 0, 0};
    twin_array x = input_of(odd, 9, PG_F32), ids = output(3, PG_I32, 0);
    memcpy(ids.host, want, sizeof want);
    ok(twins.cuda->argmax(ids.device, x.device, 3, 3, PG_F32, PG_I32, twins.stream));
    same(ids);
}

static void check_sample(int dtype) {
    int64_t v = some_vocabulary(), n = v > 9999 ? 3 : draw_size(40), first = draw_int(0, 1000);
    int64_t top_k = draw_int(0, 2) ? 0 : draw_int(1, v + 1);
    double top_p = draw_int(0, 2) ? 1 : draw(0.05, 0.99);
    double temperature = draw_int(0, 5) ? draw(0.3, 2) : 0;
    uint64_t seed = draw_word(), key = draw_word();
    twin_array x = input_in(n * v, dtype, -6, 6), ids = output(n, PG_I32, 0);
    int32_t *want = malloc((size_t)n * sizeof *want);
    void *room = malloc((size_t)twins.cpu->sample_scratch(n, v));
    ok(twins.cpu->sample(want, x.host, n, v, temperature, top_k, top_p, seed, key, first, room,
                         PG_F64, NULL));
    ok(twins.cpu->cast(ids.host, want, n, PG_F64, PG_I32, NULL));
    ok(twins.cuda->sample(ids.device, x.device, n, v, temperature, top_k, top_p, seed, key, first,
                          scratch_of(twins.cuda->sample_scratch(n, v)), dtype, twins.stream));
    same(ids);
    free(want), free(room);
}
static void sample(void **state) {
    (void)state;
    need_gpu();
    for_shapes(check_sample);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        twin_test(swiglu),
        twin_test(rope),
        twin_test(embedding),
        twin_test(ids_outside),
        twin_test(softmax),
        twin_test(masked_logits),
        twin_test(cross_entropy),
        twin_test(loss_of_no_rows),
        twin_test(part_of_a_vocabulary),
        twin_test(part_of_padding),
        twin_test(parts_joined),
        twin_test(argmax),
        twin_test(sample),
    };
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
