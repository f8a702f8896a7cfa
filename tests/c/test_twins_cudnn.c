/* Attention on the GPU as the table has it (cuDNN where it serves, else our own) against the CPU's
 * in f64: packed and separate, grouped heads, lengths, causal and not, odd sizes; which calls cuDNN
 * must not get; the same bits twice.  limit: 300 */
#include "../twins.h"

typedef struct {
    int64_t B, T, Tk, H, G, K;
    int packed, causal, lengths, dtype;
    double dropout;
} form;

typedef struct {
    pg_attn_args cpu, cuda;
    twin_array q, k, v, out, lse, dout, dq, dk, dv;
    int32_t lengths[64];
    int64_t parts[3]; /* first numbers of q, k, v where they are packed */
} call;

static int (*by_cudnn)(const pg_attn_args *a, int backward);
static int64_t (*cudnn_version)(void); /* 0: there is none */

static int open_all(void **state) {
    int rc = twins_open(state);
    void *library = twins.cuda ? twins_library() : NULL;
    if (library) *(void **)&by_cudnn = dlsym(library, "cuda_attention_by_cudnn");
    if (library) *(void **)&cudnn_version = dlsym(library, "cuda_attention_cudnn_version");
    return rc;
}

static void *number(const twin_array *a, int64_t i, int on_device) {
    return on_device ? (char *)a->device + i * pg_dtype_size(a->dtype) : (char *)(a->host + i);
}

static pg_attn_args args_of(const call *c, const form *f, int on_device, const void *lengths) {
    int64_t q = f->H * f->K, kv = f->G * f->K;
    if (f->packed) q = kv = q + 2 * kv;
    const twin_array *k = f->packed ? &c->q : &c->k, *v = f->packed ? &c->q : &c->v;
    return (pg_attn_args){.batch = f->B,
                          .rows = f->T,
                          .keys = f->Tk,
                          .heads = f->H,
                          .kv_heads = f->G,
                          .width = f->K,
                          .q = number(&c->q, 0, on_device),
                          .k = number(k, c->parts[1], on_device),
                          .v = number(v, c->parts[2], on_device),
                          .q_stride = q,
                          .kv_stride = kv,
                          .scale = 1 / sqrt((double)f->K),
                          .causal = f->causal,
                          .dtype = on_device ? f->dtype : PG_F64,
                          .lengths = lengths,
                          .dropout = f->dropout,
                          .key = 7,
                          .heads_all = f->H};
}

static void make(call *c, const form *f) {
    int64_t q = f->H * f->K, kv = f->G * f->K, rows = f->B * f->T;
    memset(c, 0, sizeof *c);
    if (f->packed) c->parts[1] = q, c->parts[2] = q + kv;
    c->q = input_in(rows * (f->packed ? q + 2 * kv : q), f->dtype, -2, 2);
    c->k = input_in(f->packed ? 0 : f->B * f->Tk * kv, f->dtype, -2, 2);
    c->v = input(f->packed ? 0 : f->B * f->Tk * kv, f->dtype);
    c->dout = input(rows * q, f->dtype);
    c->out = output(rows * q, f->dtype, 0);
    c->lse = output(rows * f->H, real_dtype(f->dtype), 0);
    double as_doubles[64];
    for (int64_t b = 0; b < f->B; b++) /* none, some, all and too many keys */
        as_doubles[b] = c->lengths[b] = (int32_t)(b == 1 ? 0 : draw_int(1, f->Tk + 3));
    twin_array lengths = input_of(as_doubles, f->B, PG_I32);
    c->cpu = args_of(c, f, 0, f->lengths ? c->lengths : NULL);
    c->cuda = args_of(c, f, 1, f->lengths ? lengths.device : NULL);
}

static void forward_on_cuda(call *c) {
    void *scratch = scratch_of(twins.cuda->attention_scratch(&c->cuda));
    ok(twins.cuda->attention(c->out.device, c->lse.device, &c->cuda, scratch, twins.stream));
}

static void forward(call *c) {
    void *scratch = malloc((size_t)twins.cpu->attention_scratch(&c->cpu) + 1);
    forward_on_cuda(c);
    ok(twins.cpu->attention(c->out.host, c->lse.host, &c->cpu, scratch, NULL));
    free(scratch);
}

/* lse: -infinity at the same places, and close at the others. */
static void near_lse(const call *c) {
    double *got = device_numbers(&c->lse, "lse"), *want = twin_doubles(c->lse.n);
    for (int64_t i = 0; i < c->lse.n; i++) {
        want[i] = c->lse.host[i];
        if (!isinf(want[i])) continue;
        if (got[i] != want[i]) fail_msg("lse[%lld] is %g, not -inf", (long long)i, got[i]);
        got[i] = want[i] = 0;
    }
    double error = error_norm(got, want, c->lse.n);
    if (!(error <= TOLERANCE_F32)) fail_msg("lse is off by %.3g", error);
    free(got), free(want);
}

/* The gradient's inputs are what the device has: out as the forward call rounded it, and its lse.
 * From an unrounded out its sums would be others: where the rows' dot products with dout all but
 * cancel (scores_far_below_zero), those differ by more than the gradient itself may err. */
static void take_from_device(twin_array *a, const char *name) {
    double *got = device_numbers(a, name);
    if (a->n) memcpy(a->host, got, (size_t)a->n * sizeof *got);
    free(got);
}

/* wanted: bit 0 dq, 1 dk, 2 dv */
static void backward(call *c, const form *f, int add, int wanted) {
    take_from_device(&c->out, "out");
    take_from_device(&c->lse, "lse");
    twin_array *d[3] = {&c->dq, &c->dk, &c->dv};
    const twin_array *x[3] = {&c->q, &c->k, &c->v};
    void *device[3], *host[3];
    for (int i = 0; i < 3; i++) {
        if (!f->packed || i == 0) *d[i] = output(x[i]->n, f->dtype, add);
        const twin_array *in = f->packed ? &c->dq : d[i];
        int there = f->packed || wanted >> i & 1;
        device[i] = there ? number(in, c->parts[i], 1) : NULL;
        host[i] = there ? number(in, c->parts[i], 0) : NULL;
    }
    void *scratch = malloc((size_t)twins.cpu->attention_grad_scratch(&c->cpu) + 1);
    ok(twins.cpu->attention_grad(host[0], host[1], host[2], c->dout.host, c->out.host, c->lse.host,
                                 &c->cpu, add, scratch, NULL));
    free(scratch);
    scratch = scratch_of(twins.cuda->attention_grad_scratch(&c->cuda));
    ok(twins.cuda->attention_grad(device[0], device[1], device[2], c->dout.device, c->out.device,
                                  c->lse.device, &c->cuda, add, scratch, twins.stream));
    for (int i = 0; i < 3; i++)
        if (device[i] && d[i]->n) near(*d[i], bound_gradient(f->dtype));
}

static void check(const form *f, int add, int wanted) {
    call c;
    make(&c, f);
    forward(&c);
    near(c.out, bound(f->dtype));
    near_lse(&c);
    backward(&c, f, add, wanted);
    twins_free();
}

/* Says which hand serves, as far as cuDNN is there at all.  from: the version of cuDNN from which
 * on the gradient is right too (0: no version is asked). */
static void served(const form *f, int expected_forward, int expected_backward, int64_t from) {
    call c;
    assert_non_null(by_cudnn);
    assert_non_null(cudnn_version);
    int64_t version = cudnn_version();
    if (version < 91100) printf("no cuDNN of 9.11 or later: our own kernels alone are tested\n");
    if (version < 91100) expected_forward = expected_backward = 0;
    if (version < from) expected_backward = 0;
    make(&c, f);
    assert_int_equal(by_cudnn(&c.cuda, 0), expected_forward);
    assert_int_equal(by_cudnn(&c.cuda, 1), expected_backward);
    twins_free();
}

/* Up to 9.15.0 gradients are wrong unless the keys are whole tiles of 128: then our own serve. */
static int64_t right_from(const form *f) { return f->Tk % 128 ? 91501 : 0; }

static void forms_that_cudnn_serves(void **state) {
    (void)state;
    need_gpu();
    static const form forms[] = {
        {2, 256, 256, 4, 4, 64, 1, 1, 0, PG_BF16, 0},
        {2, 256, 256, 4, 2, 128, 1, 1, 0, PG_BF16, 0},
        {1, 256, 256, 2, 1, 128, 0, 1, 0, PG_F16, 0},
        {2, 128, 256, 4, 4, 64, 0, 0, 0, PG_BF16, 0},
        {3, 200, 200, 3, 1, 64, 1, 1, 0, PG_BF16, 0},
        {2, 17, 17, 2, 2, 32, 1, 1, 0, PG_F16, 0},
        {2, 197, 197, 4, 4, 64, 1, 0, 0, PG_BF16, 0},
        {4, 130, 130, 4, 2, 64, 1, 1, 1, PG_BF16, 0},
        {4, 192, 192, 2, 2, 128, 0, 0, 1, PG_BF16, 0},
        {3, 70, 333, 4, 4, 64, 0, 0, 1, PG_F16, 0},
        {1, 192, 192, 2, 2, 64, 0, 1, 0, PG_BF16, 0},
        {1, 300, 300, 2, 2, 256, 1, 1, 0, PG_BF16, 0},
        {2, 130, 130, 3, 3, 80, 1, 1, 0, PG_BF16, 0},
        {2, 2, 2, 2, 1, 64, 1, 1, 0, PG_BF16, 0},
        {1, 1024, 1024, 8, 2, 128, 1, 1, 0, PG_BF16, 0},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        served(&forms[i], 1, 1, right_from(&forms[i]));
        check(&forms[i], 0, 7);
    }
}

static void random_forms(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < 30; i++) {
        int64_t group = draw_int(1, 3), G = draw_int(1, 3), T = draw_int(1, 300);
        form f = {.B = draw_int(1, 3),
                  .T = T,
                  .Tk = T,
                  .G = G,
                  .H = G * group,
                  .K = 8 * draw_int(1, 16),
                  .packed = (int)draw_int(0, 1),
                  .causal = (int)draw_int(0, 1),
                  .lengths = (int)draw_int(0, 1),
                  .dtype = draw_int(0, 1) ? PG_BF16 : PG_F16};
        if (!f.packed && draw_int(0, 1)) f.Tk = draw_int(1, 300);
        if (f.causal && f.Tk < f.T) f.Tk = f.T;
        check(&f, 0, 7);
    }
}

/* Gradients added to what is there, or some of them not wanted. */
static void added_and_partial_gradients(void **state) {
    (void)state;
    need_gpu();
    static const form packed = {2, 130, 130, 4, 2, 64, 1, 1, 0, PG_BF16, 0};
    static const form apart = {3, 130, 130, 4, 2, 64, 0, 1, 1, PG_BF16, 0};
    check(&packed, 1, 7);
    check(&apart, 1, 7);
    for (int wanted = 1; wanted < 7; wanted++) check(&apart, 0, wanted);
}

static void what_cudnn_must_not_get(void **state) {
    (void)state;
    need_gpu();
    static const struct {
        form f;
        int forward, backward;
        int64_t from;
    } cases[] = {
        {{2, 64, 64, 2, 2, 64, 1, 1, 0, PG_F32, 0}, 0, 0, 0},
        {{2, 64, 64, 2, 2, 64, 1, 1, 0, PG_F64, 0}, 0, 0, 0},
        {{2, 64, 64, 2, 2, 64, 1, 1, 0, PG_BF16, 0.25}, 0, 0, 0}, /* dropout */
        {{2, 64, 64, 2, 2, 20, 1, 1, 0, PG_BF16, 0}, 0, 0, 0},    /* width */
        {{3, 1, 1, 2, 2, 64, 1, 1, 0, PG_BF16, 0}, 0, 0, 0},      /* one row */
        {{3, 1, 50, 2, 2, 64, 0, 1, 0, PG_BF16, 0}, 0, 0, 0},     /* a step of generation */
        {{2, 40, 100, 4, 2, 64, 0, 1, 0, PG_F16, 0}, 0, 0, 0},    /* causal, more keys than rows */
        {{2, 64, 192, 2, 2, 64, 0, 0, 0, PG_BF16, 0}, 1, 1, 92600}, /* NaN in dq below that */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        served(&cases[i].f, cases[i].forward, cases[i].backward, cases[i].from);
        check(&cases[i].f, 0, 7);
    }
}

/* Scores of -100 and below: their exponentials vanish unless the row's largest is taken off. */
static void scores_far_below_zero(void **state) {
    (void)state;
    need_gpu();
    static const form forms[] = {{1, 192, 192, 2, 2, 64, 0, 1, 0, PG_BF16, 0},
                                 {1, 192, 192, 2, 2, 64, 0, 0, 0, PG_BF16, 0}};
    for (int i = 0; i < 2; i++) {
        const form *f = &forms[i];
        call c;
        make(&c, f);
        double *q = twin_doubles(c.q.n), *k = twin_doubles(c.k.n);
        for (int64_t j = 0; j < c.q.n; j++) q[j] = j % f->K ? c.q.host[j] : 30;
        for (int64_t j = 0; j < c.k.n; j++) k[j] = j % f->K ? c.k.host[j] : -30;
        c.q = input_of(q, c.q.n, f->dtype);
        c.k = input_of(k, c.k.n, f->dtype);
        free(q), free(k);
        c.cpu = args_of(&c, f, 0, NULL), c.cuda = args_of(&c, f, 1, NULL);
        forward(&c);
        near(c.out, bound(f->dtype));
        near_lse(&c);
        backward(&c, f, 0, 7);
        twins_free();
    }
}

static void grad_bits(call *c, double *bits) {
    void *scratch = scratch_of(twins.cuda->attention_grad_scratch(&c->cuda));
    ok(twins.cuda->attention_grad(number(&c->dq, 0, 1), number(&c->dq, c->parts[1], 1),
                                  number(&c->dq, c->parts[2], 1), c->dout.device, c->out.device,
                                  c->lse.device, &c->cuda, 0, scratch, twins.stream));
    double *got = device_numbers(&c->dq, "dq");
    memcpy(bits, got, (size_t)c->dq.n * sizeof *bits);
    free(got);
}

static void the_same_bits_where_asked(void **state) {
    (void)state;
    need_gpu();
    static const form f = {2, 640, 640, 4, 2, 128, 1, 1, 0, PG_BF16, 0};
    call c;
    assert_int_equal(pg_deterministic(1), 0);
    make(&c, &f);
    forward(&c);
    backward(&c, &f, 0, 7);
    double *first = twin_doubles(c.dq.n), *again = twin_doubles(c.dq.n);
    double *out = device_numbers(&c.out, "out");
    grad_bits(&c, first);
    for (int i = 0; i < 5; i++) {
        grad_bits(&c, again);
        assert_memory_equal(first, again, (size_t)c.dq.n * sizeof *first);
        forward_on_cuda(&c);
        double *once_more = device_numbers(&c.out, "out");
        assert_memory_equal(out, once_more, (size_t)c.out.n * sizeof *out);
        free(once_more);
    }
    assert_int_equal(pg_deterministic(0), 1);
    free(first), free(again), free(out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        twin_test(forms_that_cudnn_serves),     twin_test(random_forms),
        twin_test(added_and_partial_gradients), twin_test(what_cudnn_must_not_get),
        twin_test(scores_far_below_zero),       twin_test(the_same_bits_where_asked),
    };
    return cmocka_run_group_tests(tests, open_all, NULL);
}
