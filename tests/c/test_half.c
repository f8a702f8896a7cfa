/* bf16 and f16 on the CPU: conversions bit for bit, and ops against the f32 op on the same inputs,
 * whose result rounded once is what must come out, bit for bit. */
#include <omp.h>
#include "tensors.h"
#include "../../kernels/cpu.h"

static const int halves[] = {PG_BF16, PG_F16};

/* ---- conversions ---- */
static void all_halves_widen(void **state) {
    (void)state;
    static uint16_t x[65536];
    static float y[65536];
    for (int i = 0; i < 65536; i++) x[i] = (uint16_t)i;
    for (int h = 0; h < 2; h++) {
        cpu_widen(y, x, 65536, halves[h]);
        for (int i = 0; i < 65536; i++) {
            float want = h ? pg_f16_to_f32(x[i]) : pg_bf16_to_f32(x[i]);
            assert_memory_equal(&y[i], &want, 4);
        }
    }
}

/* Random bits, and every f16 with its neighbourhood: ties, subnormals, overflow, NaN. */
static void floats_narrow(void **state) {
    (void)state;
    int n = 65536 * 8;
    uint32_t *bits = malloc((size_t)n * 4);
    uint16_t *y = malloc((size_t)n * 2);
    for (int i = 0; i < n; i++) {
        float near = pg_f16_to_f32((uint16_t)(i >> 3));
        memcpy(&bits[i], &near, 4);
        const uint32_t nudges[] = {0, 1, 0xffffffffu, 0x1000, 0x0fff, 0x1001, 0x8000};
        if ((i & 7) < 7) bits[i] += nudges[i & 7];
        else bits[i] = (uint32_t)(int64_t)(chance() * 0x1p32);
    }
    const float *x = (const float *)(void *)bits;
    for (int h = 0; h < 2; h++) {
        cpu_narrow(y, x, n, halves[h]);
        for (int i = 0; i < n; i++)
            assert_int_equal(y[i], h ? pg_f32_to_f16(x[i]) : pg_f32_to_bf16(x[i]));
    }
    free(bits), free(y);
}

/* ---- ops ---- */
static pg_tensor *like(pg_tensor *t, int dtype) { /* the same numbers in another dtype */
    int64_t n = pg_tensor_count(t);
    pg_tensor *y = tensor(dtype, n);
    ok(pg_copy(y, t));
    return y;
}
static pg_tensor *drawn(int dtype, int64_t n) { return scatter(tensor(dtype, n), 0.1, 1); }
static pg_tensor *shaped(pg_tensor *t, int ndim, const int64_t *dims) {
    pg_tensor *v = NULL;
    ok(pg_tensor_view(&v, t, 0, ndim, dims));
    pg_tensor_free(t);
    return v;
}
#define SHAPED(t, ...)                                                                             \
    shaped(t, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]){__VA_ARGS__})

/* got holds the bits of want, rounded where got is half. */
static void rounded(pg_tensor *got, pg_tensor *want) {
    pg_tensor *w = like(want, pg_tensor_dtype(got));
    assert_memory_equal(pg_tensor_data(got), pg_tensor_data(w),
                        (size_t)(pg_tensor_count(w) * pg_dtype_size(pg_tensor_dtype(w))));
    pg_tensor_free(w);
}
#define FREE(...)                                                                                  \
    do {                                                                                           \
        pg_tensor *all_[] = {__VA_ARGS__};                                                         \
        for (size_t i_ = 0; i_ < sizeof all_ / sizeof *all_; i_++) pg_tensor_free(all_[i_]);       \
    } while (0)

/* Outputs may be f32 beside half inputs; added to, they are read as what they are. */
static void mixed_sums(void **state) {
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int wide = 0; wide < 2; wide++)
            for (int add = 0; add < 2; add++) {
                int64_t n = 40003;
                int dtype = wide ? PG_F32 : halves[h];
                pg_tensor *x = drawn(halves[h], n), *x32 = like(x, PG_F32);
                pg_tensor *y = drawn(dtype, n), *y32 = like(y, PG_F32);
                ok(pg_axpby(y, x, 0.7, add ? -0.3 : 0));
                ok(pg_axpby(y32, x32, 0.7, add ? -0.3 : 0));
                rounded(y, y32);
                pg_tensor *s = drawn(dtype, 1), *s32 = like(s, PG_F32);
                for (int kind = PG_SUM; kind <= PG_MEAN; kind++) {
                    ok(pg_reduce(s, x, kind, -1, add));
                    ok(pg_reduce(s32, x32, kind, -1, add));
                    rounded(s, s32);
                    ok(pg_copy(s32, s));
                }
                FREE(x, x32, y, y32, s, s32);
            }
}

/* 1024 times 1.0 into f32 is 1024; into bf16 itself it stops at 256. */
static void accumulation(void **state) {
    (void)state;
    pg_tensor *x = tensor(PG_BF16, 3), *wide = tensor(PG_F32, 3), *half = tensor(PG_BF16, 3);
    ok(pg_fill(x, 1));
    ok(pg_fill(wide, 0));
    ok(pg_fill(half, 0));
    for (int i = 0; i < 1024; i++) {
        ok(pg_axpby(wide, x, 1, 1));
        ok(pg_axpby(half, x, 1, 1));
    }
    assert_true(at(wide, 1) == 1024 && at(half, 1) == 256);
    FREE(x, wide, half);
}

static void embedding_gradients(void **state) {
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int wide = 0; wide < 2; wide++)
            for (int add = 0; add < 2; add++) {
                pg_tensor *ids = tensor(PG_I32, 300), *dy = SHAPED(drawn(halves[h], 3000), 300, 10);
                for (int i = 0; i < 300; i++) put_at(ids, i, i * i % 7);
                pg_tensor *dy32 = SHAPED(like(dy, PG_F32), 300, 10);
                pg_tensor *t = SHAPED(drawn(wide ? PG_F32 : halves[h], 90), 9, 10);
                pg_tensor *t32 = SHAPED(like(t, PG_F32), 9, 10);
                ok(pg_embedding_grad(t, dy, ids, 0, 0, add));
                ok(pg_embedding_grad(t32, dy32, ids, 0, 0, add));
                rounded(t, t32);
                FREE(ids, dy, dy32, t, t32);
            }
}

/* out f32 or half, with bias, activation, the value before it or at it, and what was there. */
static void products(void **state) {
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 40; i++) {
            int ta = i & 1, tb = i >> 1 & 1, wide = i >> 2 & 1, more = i >> 3;
            int half = halves[h], dtype = wide ? PG_F32 : half;
            int64_t m = 33, n = 47, k = 29;
            pg_tensor *a = SHAPED(drawn(half, 2 * m * k), 2, ta ? k : m, ta ? m : k);
            pg_tensor *b = SHAPED(drawn(half, 2 * n * k), 2, tb ? n : k, tb ? k : n);
            pg_tensor *bias = drawn(half, n), *c = SHAPED(drawn(dtype, 2 * m * n), 2, m, n);
            pg_tensor *aux = SHAPED(drawn(dtype, 2 * m * n), 2, m, n);
            pg_tensor *a32 = SHAPED(like(a, PG_F32), 2, ta ? k : m, ta ? m : k);
            pg_tensor *b32 = SHAPED(like(b, PG_F32), 2, tb ? n : k, tb ? k : n);
            pg_tensor *bias32 = like(bias, PG_F32), *c32 = SHAPED(like(c, PG_F32), 2, m, n);
            pg_tensor *aux32 = SHAPED(like(aux, PG_F32), 2, m, n);
            pg_gemm o = {.transpose_a = ta, .transpose_b = tb, .alpha = 0.5, .beta = more & 1};
            if (more > 1) o.bias = bias, o.aux = aux, o.epilogue = PG_EPILOGUE_GELU;
            if (more == 4) o.bias = NULL, o.epilogue = PG_EPILOGUE_GELU_TANH_GRAD;
            pg_gemm o32 = o;
            if (o.bias) o32.bias = bias32;
            if (o.aux) o32.aux = aux32;
            ok(pg_matmul(c, a, b, &o));
            ok(pg_matmul(c32, a32, b32, &o32));
            rounded(c, c32);
            rounded(aux, aux32);
            FREE(a, b, bias, c, aux, a32, b32, bias32, c32, aux32);
        }
}

/* ---- norms ---- */
typedef struct {
    pg_tensor *x, *r, *w, *b, *sum, *y, *mean, *rstd, *dy, *base, *dx, *dw, *db;
} norm;
#define ALL_OF(p) p.x, p.r, p.w, p.b, p.sum, p.y, p.mean, p.rstd, p.dy, p.base, p.dx, p.dw, p.db

static norm new_norm(int dtype, int dtype_w, int64_t n, int64_t d) {
    norm p = {SHAPED(drawn(dtype, n * d), n, d),
              SHAPED(drawn(dtype, n * d), n, d),
              drawn(dtype, d),
              drawn(dtype, d),
              SHAPED(drawn(dtype, n * d), n, d),
              SHAPED(drawn(dtype, n * d), n, d),
              drawn(PG_F32, n),
              drawn(PG_F32, n),
              SHAPED(drawn(dtype, n * d), n, d),
              SHAPED(drawn(dtype, n * d), n, d),
              SHAPED(drawn(dtype, n * d), n, d),
              drawn(dtype_w, d),
              drawn(dtype_w, d)};
    return p;
}
static norm wider(const norm *p, int64_t n, int64_t d) {
    norm q = {SHAPED(like(p->x, PG_F32), n, d),
              SHAPED(like(p->r, PG_F32), n, d),
              like(p->w, PG_F32),
              like(p->b, PG_F32),
              SHAPED(like(p->sum, PG_F32), n, d),
              SHAPED(like(p->y, PG_F32), n, d),
              like(p->mean, PG_F32),
              like(p->rstd, PG_F32),
              SHAPED(like(p->dy, PG_F32), n, d),
              SHAPED(like(p->base, PG_F32), n, d),
              SHAPED(like(p->dx, PG_F32), n, d),
              like(p->dw, PG_F32),
              like(p->db, PG_F32)};
    return q;
}

static void norm_forward(const norm *p, int layer, int sums) {
    if (layer && sums)
        ok(pg_add_layernorm(p->y, p->sum, p->mean, p->rstd, p->x, p->r, p->w, p->b, 1e-5));
    else if (layer) ok(pg_layernorm(p->y, p->mean, p->rstd, p->x, p->w, p->b, 1e-5));
    else if (sums) ok(pg_add_rmsnorm(p->y, p->sum, p->rstd, p->x, p->r, p->w, 1e-5));
    else ok(pg_rmsnorm(p->y, p->rstd, p->x, p->w, 1e-5));
}
static void norm_back(const norm *p, int layer, const pg_tensor *base, int add) {
    if (layer)
        ok(pg_layernorm_grad(p->dx, p->dw, p->db, p->dy, p->x, p->w, p->mean, p->rstd, base,
                             add && !base, add, add));
    else ok(pg_rmsnorm_grad(p->dx, p->dw, p->dy, p->x, p->w, p->rstd, base, add && !base, add));
}

static void norms(void **state) {
    (void)state;
    int64_t n = 65, d = 70;
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 16; i++) {
            int layer = i & 1, wide = i >> 1 & 1, based = i >> 2 & 1, add = i >> 3;
            norm p = new_norm(halves[h], wide ? PG_F32 : halves[h], n, d), q = wider(&p, n, d);
            norm_forward(&p, layer, 0), norm_forward(&q, layer, 0);
            rounded(p.y, q.y), rounded(p.rstd, q.rstd);
            if (layer) rounded(p.mean, q.mean);
            norm_back(&p, layer, based ? p.base : NULL, add);
            norm_back(&q, layer, based ? q.base : NULL, add);
            rounded(p.dx, q.dx), rounded(p.dw, q.dw);
            if (layer) rounded(p.db, q.db);
            FREE(ALL_OF(p), ALL_OF(q));
        }
}

/* The sum is rounded, and the norm is that of the rounded sum; in every dtype
 * the same as two calls. */
static void norms_of_sums(void **state) {
    (void)state;
    const int dtypes[] = {PG_F32, PG_F64, PG_BF16, PG_F16};
    int64_t n = 65, d = 70;
    for (int t = 0; t < 4; t++)
        for (int layer = 0; layer < 2; layer++) {
            int kept = dtypes[t] == PG_F64 ? PG_F64 : PG_F32;
            norm p = new_norm(dtypes[t], dtypes[t], n, d);
            FREE(p.mean, p.rstd);
            p.mean = drawn(kept, n), p.rstd = drawn(kept, n);
            norm_forward(&p, layer, 1);
            pg_tensor *y = like(p.y, dtypes[t]), *rstd = like(p.rstd, kept);
            ok(pg_binary(p.dx, p.x, p.r, PG_ADD, 0));
            rounded(p.sum, p.dx);
            ok(pg_copy(p.x, p.dx));
            norm_forward(&p, layer, 0);
            rounded(y, p.y), rounded(rstd, p.rstd);
            FREE(ALL_OF(p), y, rstd);
        }
}

/* f32 and f64: a base gives the bits of a copy that is added to. */
static void bases(void **state) {
    (void)state;
    int64_t n = 65, d = 70;
    for (int layer = 0; layer < 2; layer++)
        for (int weights = 0; weights < 2; weights++) {
            norm p = new_norm(PG_F32, PG_F32, n, d);
            pg_tensor *w = p.w;
            if (!weights) p.w = NULL;
            norm_forward(&p, layer, 0);
            norm_back(&p, layer, p.base, 0);
            pg_tensor *dx = like(p.dx, PG_F32);
            ok(pg_copy(p.dx, p.base));
            norm_back(&p, layer, NULL, 1);
            rounded(dx, p.dx);
            p.w = w;
            FREE(ALL_OF(p), dx);
        }
}

/* ---- attention ---- */
/* Packed or apart, and the same tensor for all three: the kernel sees what it would see in f32. */
static void attention(void **state) {
    (void)state;
    int64_t b = 2, t = 37, heads = 4, groups = 2, k = 8, all = heads + 2 * groups;
    for (int h = 0; h < 2; h++)
        for (int add = 0; add < 2; add++) {
            int half = halves[h];
            pg_tensor *q = SHAPED(drawn(half, b * t * all * k), b, t, all * k);
            pg_tensor *q32 = SHAPED(like(q, PG_F32), b, t, all * k);
            pg_tensor *y = SHAPED(drawn(half, b * t * heads * k), b, t, heads * k);
            pg_tensor *y32 = SHAPED(like(y, PG_F32), b, t, heads * k);
            pg_tensor *lse = drawn(PG_F32, b * heads * t), *lse32 = drawn(PG_F32, b * heads * t);
            pg_attn o = {.heads = heads, .kv_heads = groups, .causal = 1};
            ok(pg_attention(y, lse, q, NULL, NULL, &o));
            ok(pg_attention(y32, lse32, q32, NULL, NULL, &o));
            rounded(y, y32), rounded(lse, lse32);
            ok(pg_copy(y32, y)); /* the gradient reads the rounded output */
            pg_tensor *dy = SHAPED(drawn(half, b * t * heads * k), b, t, heads * k);
            pg_tensor *dy32 = SHAPED(like(dy, PG_F32), b, t, heads * k);
            pg_tensor *dq = SHAPED(drawn(half, b * t * all * k), b, t, all * k);
            pg_tensor *dq32 = SHAPED(like(dq, PG_F32), b, t, all * k);
            ok(pg_attention_grad(dq, NULL, NULL, dy, q, NULL, NULL, y, lse, &o, add));
            ok(pg_attention_grad(dq32, NULL, NULL, dy32, q32, NULL, NULL, y32, lse, &o, add));
            rounded(dq, dq32);
            FREE(q, q32, y, y32, lse, lse32, dy, dy32, dq, dq32);
        }
}

static void attention_to_itself(void **state) {
    (void)state;
    int64_t b = 2, t = 9, c = 12;
    pg_tensor *x = SHAPED(drawn(PG_BF16, b * t * c), b, t, c);
    pg_tensor *x32 = SHAPED(like(x, PG_F32), b, t, c);
    pg_tensor *y = SHAPED(drawn(PG_BF16, b * t * c), b, t, c), *lse = drawn(PG_F32, b * 2 * t);
    pg_tensor *dx = SHAPED(drawn(PG_BF16, b * t * c), b, t, c);
    pg_tensor *dx32 = SHAPED(like(dx, PG_F32), b, t, c);
    pg_attn o = {.heads = 2, .kv_heads = 2};
    ok(pg_attention(y, lse, x, x, x, &o));
    pg_tensor *y32 = SHAPED(like(y, PG_F32), b, t, c);
    ok(pg_attention_grad(dx, dx, dx, y, x, x, x, y, lse, &o, 1));
    pg_tensor *dy32 = SHAPED(like(y, PG_F32), b, t, c);
    ok(pg_attention_grad(dx32, dx32, dx32, dy32, x32, x32, x32, y32, lse, &o, 1));
    rounded(dx, dx32);
    FREE(x, x32, y, y32, dy32, lse, dx, dx32);
}

/* ---- in place, threads, memory, messages ---- */
static void in_place(void **state) {
    (void)state;
    for (int h = 0; h < 2; h++) {
        pg_tensor *x = drawn(halves[h], 600), *x32 = like(x, PG_F32);
        ok(pg_unary(x, x, PG_GELU));
        ok(pg_unary(x32, x32, PG_GELU));
        rounded(x, x32);
        ok(pg_copy(x32, x));
        ok(pg_binary(x, x, x, PG_MUL, 0));
        ok(pg_binary(x32, x32, x32, PG_MUL, 0));
        rounded(x, x32);
        ok(pg_copy(x32, x));
        x = SHAPED(x, 2, 5, 60), x32 = SHAPED(x32, 2, 5, 60);
        pg_tensor *cos = tensor(PG_F32, 5, 6), *sin = tensor(PG_F32, 5, 6);
        ok(pg_rope_table(cos, sin, 100, 0));
        ok(pg_rope(x, x, cos, sin, 3, 0, 1, 0));
        ok(pg_rope(x32, x32, cos, sin, 3, 0, 1, 0));
        rounded(x, x32);
        ok(pg_copy(x32, x));
        pg_tensor *dy = SHAPED(drawn(halves[h], 300), 2, 5, 30);
        pg_tensor *dy32 = SHAPED(like(dy, PG_F32), 2, 5, 30);
        ok(pg_swiglu_grad(x, dy, x, 0));
        ok(pg_swiglu_grad(x32, dy32, x32, 0));
        rounded(x, x32);
        FREE(x, x32, cos, sin, dy, dy32);
    }
}

static void same_bits_on_any_threads(void **state) {
    (void)state;
    int64_t n = 300000;
    int before = omp_get_max_threads();
    pg_tensor *x = drawn(PG_BF16, n), *y[2];
    for (int run = 0; run < 2; run++) {
        omp_set_num_threads(run ? 3 : 1);
        y[run] = tensor(PG_BF16, n);
        ok(pg_unary(y[run], x, PG_GELU));
    }
    omp_set_num_threads(before);
    rounded(y[0], y[1]);
    FREE(x, y[0], y[1]);
}

static void no_memory(void **state) {
    (void)state;
    uint16_t x[4] = {0}, y[4] = {1, 2, 3, 4};
    const pg_kernels *k = pg_kernels_cpu();
    refuses(PG_ENOMEM, "unary: no memory for", k->unary(y, x, 1LL << 50, PG_EXP, PG_BF16, NULL));
    assert_true(y[0] == 1 && y[3] == 4);
}

static void refusals(void **state) {
    (void)state;
    pg_tensor *h = tensor(PG_BF16, 2, 3), *f = tensor(PG_F32, 2, 3), *d = tensor(PG_F64, 2, 3);
    pg_tensor *o = tensor(PG_F16, 2, 3), *one = tensor(PG_F32), *three = tensor(PG_F32, 3);
    pg_tensor *rstd = tensor(PG_F32, 2), *y = tensor(PG_BF16, 2, 3), *base = tensor(PG_BF16, 2, 3);
    pg_tensor *w = tensor(PG_BF16, 3);
    refuses(PG_ESHAPE,
            "axpby: y is [2,3] bf16, x is [2,3] f32; the dtype of y must be equal, or f32",
            pg_axpby(h, f, 1, 0));
    refuses(PG_ESHAPE, "y is [2,3] f32, x is [2,3] f64", pg_axpby(f, d, 1, 0));
    refuses(PG_ESHAPE, "y is [2,3] f16, x is [2,3] bf16", pg_axpby(o, h, 1, 0));
    refuses(PG_ESHAPE,
            "max: [2,3] bf16 without dim -1 does not make [] f32; 1 numbers of the same "
            "dtype do",
            pg_reduce(one, h, PG_RMAX, -1, 0));
    refuses(PG_ESHAPE,
            "sum: [2,3] bf16 without dim 0 does not make [] f32; 3 numbers of the same "
            "dtype or f32 do",
            pg_reduce(one, h, PG_SUM, 0, 0));
    refuses(PG_ESHAPE, "rmsnorm_grad: dw is [3] f32, x is [2,3] f64",
            pg_rmsnorm_grad(NULL, three, d, d, NULL, rstd, NULL, 0, 0));
    refuses(PG_ESHAPE, "rmsnorm_grad: w is [3] f32, x is [2,3] bf16; their dtypes must be equal",
            pg_rmsnorm_grad(y, NULL, h, h, three, rstd, NULL, 0, 0));
    refuses(PG_EINVAL, "rmsnorm_grad: base and add_x 1",
            pg_rmsnorm_grad(y, NULL, h, base, NULL, rstd, base, 1, 0));
    refuses(PG_EINVAL, "layernorm_grad: base without dx",
            pg_layernorm_grad(NULL, three, NULL, h, h, NULL, rstd, rstd, base, 0, 0, 0));
    refuses(PG_EINVAL, "rmsnorm_grad: dx [2,3] bf16 and base [2,3] bf16 share memory",
            pg_rmsnorm_grad(y, NULL, h, h, NULL, rstd, y, 0, 0));
    refuses(PG_ESHAPE, "layernorm_grad: dw is [3] f32, db is [3] bf16",
            pg_layernorm_grad(NULL, three, w, h, h, NULL, rstd, rstd, NULL, 0, 0, 0));
    refuses(PG_EINVAL, "add_rmsnorm: sum is missing",
            pg_add_rmsnorm(y, NULL, rstd, h, h, NULL, 1e-5));
    refuses(PG_ESHAPE, "add_rmsnorm: r is [2,3] f32, x is [2,3] bf16",
            pg_add_rmsnorm(y, base, rstd, h, f, NULL, 1e-5));
    refuses(PG_EINVAL, "add_layernorm: sum [2,3] bf16 and x [2,3] bf16 share memory",
            pg_add_layernorm(y, h, rstd, rstd, h, base, NULL, NULL, 1e-5));
    FREE(h, f, d, o, one, three, rstd, y, base, w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(all_halves_widen, nothing_alive),
        cmocka_unit_test_teardown(floats_narrow, nothing_alive),
        cmocka_unit_test_teardown(mixed_sums, nothing_alive),
        cmocka_unit_test_teardown(accumulation, nothing_alive),
        cmocka_unit_test_teardown(embedding_gradients, nothing_alive),
        cmocka_unit_test_teardown(products, nothing_alive),
        cmocka_unit_test_teardown(norms, nothing_alive),
        cmocka_unit_test_teardown(norms_of_sums, nothing_alive),
        cmocka_unit_test_teardown(bases, nothing_alive),
        cmocka_unit_test_teardown(attention, nothing_alive),
        cmocka_unit_test_teardown(attention_to_itself, nothing_alive),
        cmocka_unit_test_teardown(in_place, nothing_alive),
        cmocka_unit_test_teardown(same_bits_on_any_threads, nothing_alive),
        cmocka_unit_test_teardown(no_memory, nothing_alive),
        cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
