/* Our own CUDA attention, forward and back, against its CPU twin in f64: see tests/twins.h.  The
 * table may hand a shape to a library, so the plain kernels are taken from the plug-in by name. */
#include "twins.h"

static struct {
    int64_t (*scratch)(const pg_attn_args *);
    int (*forward)(void *, void *, const pg_attn_args *, void *, pg_stream);
    int64_t (*grad_scratch)(const pg_attn_args *);
    int (*grad)(void *, void *, void *, const void *, const void *, const void *,
                const pg_attn_args *, int, void *, pg_stream);
} plain;

static void find_plain(void) {
    Dl_info where;
    assert_true(dladdr(*(void **)&twins.cuda->swiglu, &where));
    void *library = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    *(void **)&plain.scratch = dlsym(library, "cuda_attention_plain_scratch");
    *(void **)&plain.forward = dlsym(library, "cuda_attention_plain");
    *(void **)&plain.grad_scratch = dlsym(library, "cuda_attention_plain_grad_scratch");
    *(void **)&plain.grad = dlsym(library, "cuda_attention_plain_grad");
    assert_non_null(plain.grad);
}

/* The arguments as the twin of one side sees them. */
typedef struct {
    pg_attn_args a;
    twin_array q, k, v, lengths, step;
    int32_t *host_lengths;
    int packed;
} problem;

static problem draw_problem(pg_attn_args a, int packed, int with_lengths) {
    problem p = {.a = a, .packed = packed};
    int64_t B = a.batch, T = a.rows, H = a.heads, G = a.kv_heads, K = a.width;
    double step[PG_STEP_SIZE] = {0};
    if (packed) p.a.keys = T;
    p.a.q_stride = packed ? (H + 2 * G) * K : H * K;
    p.a.kv_stride = packed ? p.a.q_stride : G * K;
    p.q = input_in(B * T * p.a.q_stride, a.dtype, -2, 2);
    if (!packed) {
        p.k = input_in(B * a.keys * G * K, a.dtype, -2, 2);
        p.v = input(B * a.keys * G * K, a.dtype);
    }
    step[PG_STEP_RANDOM] = (double)draw_int(0, (int64_t)1 << 52);
    p.step = input_of(step, PG_STEP_SIZE, PG_F64);
    if (with_lengths) {
        p.lengths = input_in(B, PG_I32, -2, (double)p.a.keys + 2); /* also none, and too long */
        for (int64_t b = 0; b < B; b++)
            if (p.lengths.host[b] == 1) p.lengths.host[b] = 0; /* see some() */
        p.lengths = input_of(p.lengths.host, B, PG_I32);
        p.host_lengths = malloc((size_t)B * sizeof(int32_t));
        ok(twins.cpu->cast(p.host_lengths, p.lengths.host, B, PG_I32, PG_F64, NULL));
    }
    return p;
}

static void *part(const twin_array *x, int on_host, int64_t first) {
    int64_t size = on_host ? 8 : pg_dtype_size(x->dtype);
    return (char *)(on_host ? (void *)x->host : x->device) + first * size;
}

/* Addresses of q, k, v, or of their gradients. */
static void parts(const problem *p, const twin_array *three, int on_host, void **out) {
    int64_t q = p->a.heads * p->a.width, k = q + p->a.kv_heads * p->a.width;
    out[0] = part(&three[0], on_host, 0);
    out[1] = p->packed ? part(&three[0], on_host, q) : part(&three[1], on_host, 0);
    out[2] = p->packed ? part(&three[0], on_host, k) : part(&three[2], on_host, 0);
}

static pg_attn_args side(const problem *p, int on_host) {
    pg_attn_args a = p->a;
    twin_array three[] = {p->q, p->k, p->v};
    void *at[3];
    parts(p, three, on_host, at);
    a.q = at[0], a.k = at[1], a.v = at[2];
    if (p->host_lengths) a.lengths = on_host ? p->host_lengths : p->lengths.device;
    if (a.step) a.step = on_host ? p->step.host : p->step.device;
    if (on_host) a.dtype = PG_F64;
    return a;
}

/* Rows without a key have -inf on both sides; the others are compared as numbers are. */
static void lse_near(const twin_array *lse, double limit) {
    double *got = device_numbers(lse, "lse");
    for (int64_t i = 0; i < lse->n; i++)
        if (isinf(lse->host[i]) && got[i] == lse->host[i]) got[i] = lse->host[i] = 0;
    double error = error_norm(got, lse->host, lse->n);
    free(got);
    if (!(error <= limit))
        fail_msg("lse is off by %.3g, more than %.3g; PG_TWINS_SEED=%llu", error, limit,
                 (unsigned long long)twins.seed);
}

static void check(pg_attn_args given, int packed, int with_lengths) {
    int dtype = given.dtype, add = (int)draw_int(0, 1);
    problem p = draw_problem(given, packed, with_lengths);
    pg_attn_args host = side(&p, 1), device = side(&p, 0);
    int64_t rows = p.a.batch * p.a.rows * p.a.heads;
    twin_array out = output(rows * p.a.width, dtype, 0), lse = output(rows, real_dtype(dtype), 0);
    char *room = calloc(1, (size_t)pg_max64(twins.cpu->attention_scratch(&host),
                                            twins.cpu->attention_grad_scratch(&host)) +
                               64);
    char *aligned = room + (64 - (uintptr_t)room % 64);
    ok(twins.cpu->attention(out.host, lse.host, &host, aligned, NULL));
    ok(plain.forward(out.device, lse.device, &device, scratch_of(plain.scratch(&device)),
                     twins.stream));
    near(out, bound(dtype));
    twin_array dout = input(rows * p.a.width, dtype), d[3] = {{0}};
    void *to_host[3], *to_device[3];
    d[0] = output(p.q.n, dtype, add);
    if (!packed) d[1] = output(p.k.n, dtype, add), d[2] = output(p.v.n, dtype, add);
    parts(&p, d, 1, to_host);
    parts(&p, d, 0, to_device);
    ok(twins.cpu->attention_grad(to_host[0], to_host[1], to_host[2], dout.host, out.host, lse.host,
                                 &host, add, aligned, NULL));
    void *scratch = scratch_of(plain.grad_scratch(&device));
    ok(plain.grad(to_device[0], to_device[1], to_device[2], dout.device, out.device, lse.device,
                  &device, add, scratch, twins.stream));
    for (int i = 0; i < (packed ? 1 : 3); i++) near(d[i], bound_gradient(dtype));
    lse_near(&lse, bound(real_dtype(dtype)));
    if (!packed && !add) { /* each alone, and the same bits */
        for (int i = 0; i < 3; i++) {
            twin_array one = output(d[i].n, dtype, 0);
            ok(plain.grad(i == 0 ? one.device : NULL, i == 1 ? one.device : NULL,
                          i == 2 ? one.device : NULL, dout.device, out.device, lse.device, &device,
                          0, scratch, twins.stream));
            double *a = device_numbers(&one, "one"), *b = device_numbers(&d[i], "d");
            assert_memory_equal(a, b, (size_t)one.n * sizeof *a);
            free(a), free(b);
        }
    }
    free(room), free(p.host_lengths);
    twins_free();
}

/* Rows that all see one key alone have dq = dk = 0, where any rounding is endlessly large beside
 * the reference: two keys or more, unless packed, where dv lies beside them. */
static pg_attn_args some(int dtype, int64_t rows, int64_t keys, int64_t width) {
    const int64_t groups[] = {1, 1, 2, 4};
    int64_t G = draw_int(1, 3), H = G * groups[draw_int(0, 3)];
    return (pg_attn_args){.batch = draw_int(1, 3),
                          .rows = rows,
                          .keys = keys,
                          .heads = H,
                          .kv_heads = G,
                          .width = width,
                          .scale = 1 / sqrt((double)width),
                          .causal = (int)draw_int(0, 1),
                          .dtype = dtype,
                          .heads_all = H};
}

static void random_shapes(void **state) {
    (void)state;
    need_gpu();
    find_plain();
    const int64_t widths[] = {64, 128, 80, 256, 32, 1, 7, 130};
    for (int i = 0; i < 64; i++) {
        twins.shift = i % 16 == 15;
        int64_t width = widths[i / 4 % 8], rows = draw_size(200), keys = 1 + draw_size(200);
        int packed = rows == 1 || draw_int(0, 1);
        check(some(floating[i % 4], rows, keys, width), packed, (int)draw_int(0, 1));
    }
    twins.shift = 0;
}

static void under_dropout(void **state) {
    (void)state;
    need_gpu();
    find_plain();
    for (int i = 0; i < 24; i++) {
        pg_attn_args a = some(floating[i % 4], draw_size(150), 1 + draw_size(150),
                              i % 3 ? 64 : 128);
        const double given = 0;
        a.dropout = draw(0.05, 0.6);
        a.key = draw_word();
        a.sample0 = draw_int(0, 100);
        a.head0 = draw_int(0, 5);
        a.heads_all = a.heads + a.head0 + draw_int(0, 5);
        a.step = draw_int(0, 1) ? &given : NULL; /* side() puts the address there */
        check(a, (int)draw_int(0, 1), (int)draw_int(0, 1));
    }
}

static void edges(void **state) {
    (void)state;
    need_gpu();
    find_plain();
    for (int i = 0; i < 4; i++) {
        check(some(floating[i], 1, 1, 64), 1, 0);
        check(some(floating[i], 1, at_most(300), 128), 0, 0); /* one new token */
        check(some(floating[i], at_most(64), at_most(64), 64), 0, 0);
        check(some(floating[i], at_most(65), at_most(63), 64), 0,
              1); /* causal rows before all keys */
        check(some(floating[i], at_most(300), 5, 64), 0, 1);
        pg_attn_args steep = some(floating[i], at_most(90), at_most(90), 64);
        steep.scale = 1; /* a few probabilities near 1: the maximum must move */
        if (i < 2) check(steep, 0, 0);
    }
}

static void long_rows(void **state) {
    (void)state;
    need_gpu();
    find_plain();
    for (int i = 0; i < 4; i++) {
        pg_attn_args a = some(floating[i], at_most(1100), at_most(1100), i % 2 ? 128 : 64);
        a.batch = 1, a.heads = a.heads_all = 2, a.kv_heads = 1, a.causal = 1;
        check(a, 1, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        twin_test(random_shapes),
        twin_test(under_dropout),
        twin_test(edges),
        twin_test(long_rows),
    };
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
