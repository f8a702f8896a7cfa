/* CUDA kernels against their CPU twins where tensors of one call have several dtypes or are
 * fused: f32 sums and gradients beside bf16 and f16, sums before norms, bases of their
 * gradients.  See twins.h. */
#include "twins.h"

#define CASES 12

static const int halves[] = {PG_BF16, PG_F16};

/* ---- y = alpha x + beta y, reductions ---- */
static void axpby(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 2; f++)
        for (int i = 0; i < CASES; i++) {
            int64_t n = case_size(i);
            double beta = i % 4 == 0 ? 0 : i % 4 == 1 ? 1 : -0.7; /* 0: y is not read */
            twin_array x = input(n, halves[f]), y = output(n, PG_F32, beta != 0);
            cpu_do(axpby, y.host, x.host, 0.3, beta, n, PG_F64);
            cuda_do(axpby, y.device, x.device, 0.3, beta, n, PG_F32, halves[f]);
            near(y, bound(PG_F32));
            twins_free();
        }
    twin_array x = input(9, PG_F32), y = output(9, PG_F64, 0);
    refuses(PG_EINVAL, "axpby: f64 out of f32",
            twins.cuda->axpby(y.device, x.device, 1, 0, 9, PG_F64, PG_F32, twins.stream));
}

static void sums(void **state) {
    (void)state;
    need_gpu();
    static const int64_t dims[][3] = {{1, LARGE, 1}, {1, 9000, 768}, {700, 333, 1},  {1, 1, 1},
                                      {3, 5000, 17}, {5, 65536, 1},  {2, 999, 4096}, {4096, 64, 1}};
    for (int f = 0; f < 2; f++)
        for (int kind = PG_SUM; kind <= PG_MEAN; kind++)
            for (int i = 0; i < 14; i++) {
                int64_t outer = i < 8 ? at_most(dims[i][0]) : draw_size(40),
                        n = i < 8 ? at_most(dims[i][1]) : draw_size(400);
                int64_t inner = i < 8 ? at_most(dims[i][2]) : draw_size(60);
                twins.shift = i % 3 == 2;
                twin_array x = input(outer * n * inner, halves[f]);
                twin_array y = output(outer * inner, PG_F32, i & 1);
                cpu_do(reduce, y.host, x.host, kind, outer, n, inner, i & 1, PG_F64);
                cuda_do(reduce, y.device, x.device, kind, outer, n, inner, i & 1, PG_F32,
                        halves[f]);
                near(y, bound(PG_F32));
                twins_free();
            }
}

/* ---- norms ---- */
/* Widths of models, odd ones, and those at the borders of what threads keep: 8192 and 8200 of bf16
 * in the gradient, 32768 and more forward. */
static int64_t draw_width(int i) {
    static const int64_t widths[] = {4096,  768,   133,   1,    8192, 8200,
                                     16384, 40001, 70000, 2056, 4104};
    return i < 11 ? at_most(widths[i]) : draw_size(3000);
}

/* x + r as the kernels have it: in their arithmetic, rounded to the dtype. */
static twin_array sum_of(const twin_array *x, const twin_array *r) {
    double *sum = twin_doubles(x->n);
    for (int64_t k = 0; k < x->n; k++) {
        sum[k] = x->host[k] + r->host[k];
        if (x->dtype != PG_F64) sum[k] = (double)(float)sum[k];
    }
    twin_array s = input_of(sum, x->n, x->dtype);
    free(sum);
    return s;
}

static void sums_before_norms(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 20; i++) {
            int64_t d = draw_width(i), n = i == 13    ? 0
                                           : d > 8000 ? draw_int(1, 9)
                                                      : draw_int(1, 700);
            int dtype = floating[f], kept = real_dtype(dtype), weights = i % 4 != 3, bias = i % 3;
            twins.shift = i % 5 == 4;
            twin_array x = input_in(n * d, dtype, -1, 1.6), r = input(n * d, dtype);
            twin_array s = sum_of(&x, &r), sum = output(n * d, dtype, 0),
                       again = output(n * d, dtype, 0);
            twin_array w = input_in(d, dtype, 0.5, 1.5), b = input(d, dtype);
            twin_array y = output(n * d, dtype, 0), z = output(n * d, dtype, 0);
            twin_array rstd = output(n, kept, 0), mean = output(n, kept, 0),
                       rstd_l = output(n, kept, 0);
            double *w_host = weights ? w.host : NULL, *b_host = bias ? b.host : NULL;
            void *w_on = weights ? w.device : NULL, *b_on = bias ? b.device : NULL;
            if (n) memcpy(sum.host, s.host, (size_t)(n * d) * sizeof(double));
            if (n) memcpy(again.host, s.host, (size_t)(n * d) * sizeof(double));
            cpu_do(rmsnorm, y.host, NULL, rstd.host, s.host, NULL, w_host, 1e-5, n, d);
            cuda_do(rmsnorm, y.device, sum.device, rstd.device, x.device, r.device, w_on, 1e-5, n,
                    d, dtype);
            same(sum);
            near(y, bound(dtype));
            near(rstd, bound(kept));
            cpu_do(layernorm, z.host, NULL, mean.host, rstd_l.host, s.host, NULL, w_host, b_host,
                   1e-5, n, d);
            cuda_do(layernorm, z.device, again.device, mean.device, rstd_l.device, x.device,
                    r.device, w_on, b_on, 1e-5, n, d, dtype);
            same(again);
            if (d > 1) near(z, bound(dtype)); /* x - mean is all rounding where d is 1 */
            if (d > 1) near(rstd_l, bound(kept));
            near(mean, bound(kept));
            twins_free();
        }
}

/* What a gradient of a norm reads and writes: a base, or dx that is added to, or neither; dw and db
 * in f32 beside bf16 and f16. */
typedef struct {
    int64_t n, d;
    int dtype, dtype_w, add_x, add_w, based;
    twin_array x, w, dy, mean, rstd, base, dx, dw, db;
} norm_case;

static norm_case draw_norm(int i, int dtype, int mixed) {
    norm_case c = {.d = draw_width(i), .dtype = dtype, .dtype_w = mixed ? PG_F32 : dtype};
    c.n = i == 13 ? 0 : at_most(c.d > 10000 ? draw_int(1, 100) : draw_int(1, 1500));
    c.based = i % 3, c.add_x = i % 3 == 0 && i % 2, c.add_w = (i >> 1) & 1;
    twins.shift = i % 5 == 4;
    int kept = real_dtype(dtype);
    c.x = input(c.n * c.d, dtype), c.dy = input(c.n * c.d, dtype), c.w = input(c.d, dtype);
    c.mean = input_in(c.n, kept, -0.1, 0.1), c.rstd = input_in(c.n, kept, 0.5, 2);
    c.base = input(c.n * c.d, dtype), c.dx = output(c.n * c.d, dtype, c.add_x);
    c.dw = output(c.d, c.dtype_w, c.add_w), c.db = output(c.d, c.dtype_w, c.add_w);
    return c;
}

static void norm_on_cpu(norm_case *c, int layer) {
    void *scratch = malloc((size_t)twins.cpu->layernorm_grad_scratch(c->n, c->d) + 64);
    const double *base = c->based ? c->base.host : NULL;
    assert_non_null(scratch);
    if (layer)
        cpu_do(layernorm_grad, c->dx.host, c->dw.host, c->db.host, c->dy.host, c->x.host, c->w.host,
               c->mean.host, c->rstd.host, base, c->n, c->d, c->add_x, c->add_w, c->add_w, scratch,
               PG_F64);
    else
        cpu_do(rmsnorm_grad, c->dx.host, c->dw.host, c->dy.host, c->x.host, c->w.host, c->rstd.host,
               base, c->n, c->d, c->add_x, c->add_w, scratch, PG_F64);
    free(scratch);
}

static void norm_on_cuda(norm_case *c, int layer) {
    const void *base = c->based ? c->base.device : NULL;
    if (layer)
        cuda_do(layernorm_grad, c->dx.device, c->dw.device, c->db.device, c->dy.device, c->x.device,
                c->w.device, c->mean.device, c->rstd.device, base, c->n, c->d, c->add_x, c->add_w,
                c->add_w, scratch_of(twins.cuda->layernorm_grad_scratch(c->n, c->d)), c->dtype,
                c->dtype_w);
    else
        cuda_do(rmsnorm_grad, c->dx.device, c->dw.device, c->dy.device, c->x.device, c->w.device,
                c->rstd.device, base, c->n, c->d, c->add_x, c->add_w,
                scratch_of(twins.cuda->rmsnorm_grad_scratch(c->n, c->d)), c->dtype, c->dtype_w);
}

/* Sums over rows go to f32 unrounded, so f32 holds them to f32's bound. */
static void check_norm(int i, int dtype, int mixed, int layer) {
    norm_case c = draw_norm(i, dtype, mixed);
    norm_on_cpu(&c, layer);
    norm_on_cuda(&c, layer);
    near(c.dx, bound_gradient(c.dtype));
    near(c.dw, bound_gradient(c.dtype_w));
    if (layer) near(c.db, bound_gradient(c.dtype_w));
    twins_free();
}

static void bases_and_f32_weights(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < 20; i++)
        for (int layer = 0; layer < 2; layer++) {
            for (int f = 0; f < 4; f++) check_norm(i, floating[f], 0, layer);
            for (int f = 0; f < 2; f++) check_norm(i, halves[f], 1, layer);
        }
}

/* The base may be dx itself. */
static void norms_over_their_base(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 8; i++) {
            norm_case c = draw_norm(i, floating[f], 0);
            c.add_x = 0, c.based = 1;
            c.dx = c.base;
            norm_case host = c;
            host.dx = output(c.n * c.d, c.dtype, 0);
            norm_on_cpu(&host, 0);
            norm_on_cuda(&c, 0);
            memcpy(c.dx.host, host.dx.host, (size_t)(c.n * c.d) * sizeof(double));
            near(c.dx, bound_gradient(c.dtype));
            near(c.dw, bound_gradient(c.dtype_w));
            twins_free();
        }
}

/* ---- the table's gradient ---- */
static void check_embedding(int dtype, int64_t n, int64_t v, int64_t d, int add) {
    twin_array dy = input(n * d, dtype), dtable = output(v * d, PG_F32, add);
    int64_t first = draw_int(0, v / 2); /* ids below it are of another table */
    double *from = twin_doubles(n);
    for (int64_t i = 0; i < n; i++) from[i] = (double)draw_int(0, v - 1);
    twin_array ids = input_of(from, n, PG_I64);
    int64_t *id = malloc((size_t)(n + 1) * sizeof *id);
    assert_non_null(id);
    for (int64_t i = 0; i < n; i++) id[i] = (int64_t)from[i];
    void *scratch = scratch_of(twins.cuda->embedding_grad_scratch(n, v));
    ok(twins.cpu->embedding_grad(dtable.host, dy.host, id, n, d, v, first, add, NULL, PG_F64,
                                 PG_F64, PG_I64, NULL));
    ok(twins.cuda->embedding_grad(dtable.device, dy.device, ids.device, n, d, v, first, add,
                                  scratch, dtype, PG_F32, PG_I64, twins.stream));
    near(dtable, bound(PG_F32));
    free(id), free(from);
    twins_free();
}

static void embedding(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 2; f++)
        for (int add = 0; add < 2; add++) {
            for (int i = 0; i < CASES; i++) {
                twins.shift = i % 3 == 2;
                check_embedding(halves[f], draw_size(600), draw_size(300), draw_size(1500), add);
            }
            twins.shift = 0;
            check_embedding(halves[f], 3001, 1, 72, add); /* a line with many positions */
            check_embedding(halves[f], 9000, 50257, 24, add);
            check_embedding(halves[f], 0, 7, 9, add);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        twin_test(axpby),
        twin_test(sums),
        twin_test(sums_before_norms),
        twin_test(bases_and_f32_weights),
        twin_test(norms_over_their_base),
        twin_test(embedding),
    };
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
