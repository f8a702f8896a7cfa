/* ops_matmul.c: pg_matmul: which of three readings the shapes allow, then one call of gemm.
 *
 * The readings, in the order tried: leading dims of a and b run over a batch; b is one matrix and
 * a's leading dims are more rows; out is one matrix and the leading dims are summed over. */
#include <stdio.h>
#include "ops_nn.h"

static int refuse(const pg_tensor *out, const pg_tensor *a, const pg_tensor *b,
                  const pg_gemm_args *g, const char *rule) {
    return pg_fail(PG_ESHAPE, "matmul: out is %s, a is %s%s, b is %s%s; %s", pg_shape_text(out),
                   pg_shape_text(a), g->transpose_a ? " transposed" : "", pg_shape_text(b),
                   g->transpose_b ? " transposed" : "", rule);
}

static int same_leading(const pg_tensor *x, const pg_tensor *y) {
    if (x->ndim != y->ndim) return 0;
    for (int i = 0; i < x->ndim - 2; i++)
        if (x->dims[i] != y->dims[i]) return 0;
    return 1;
}

/* Sizes of one product, from the last two dims. */
static int inner_sizes(pg_gemm_args *g, const pg_tensor *a, const pg_tensor *b) {
    int64_t rows_a = a->dims[a->ndim - 2], columns_a = pg_last_dim(a);
    int64_t rows_b = b->dims[b->ndim - 2], columns_b = pg_last_dim(b);
    int64_t k = g->transpose_b ? columns_b : rows_b;
    g->m = g->transpose_a ? columns_a : rows_a;
    g->k = g->transpose_a ? rows_a : columns_a;
    g->n = g->transpose_b ? rows_b : columns_b;
    g->lda = pg_max64(columns_a, 1), g->ldb = pg_max64(columns_b, 1), g->ldc = pg_max64(g->n, 1);
    if (g->k == k) return PG_OK;
    return pg_fail(PG_ESHAPE, "matmul: a is %s%s, b is %s%s; inner sizes %lld and %lld differ",
                   pg_shape_text(a), g->transpose_a ? " transposed" : "", pg_shape_text(b),
                   g->transpose_b ? " transposed" : "", (long long)g->k, (long long)k);
}

static int plan(pg_gemm_args *g, const pg_tensor *out, const pg_tensor *a, const pg_tensor *b) {
    if (out->ndim < 2 || a->ndim < 2 || b->ndim < 2)
        return refuse(out, a, b, g, "each needs two dims or more");
    PG_TRY(inner_sizes(g, a, b));
    if (out->dims[out->ndim - 2] != g->m || pg_last_dim(out) != g->n) {
        char rule[80];
        snprintf(rule, sizeof rule, "out must end in [%lld,%lld]", (long long)g->m,
                 (long long)g->n);
        return refuse(out, a, b, g, rule);
    }
    int64_t lead = pg_dims_product(a, 0, a->ndim - 2);
    g->stride_a = g->m * g->k, g->stride_b = g->k * g->n, g->stride_c = g->m * g->n;
    g->batch = 1;
    if (same_leading(a, b) && same_leading(out, a)) {
        g->batch = lead;
    } else if (b->ndim == 2 && !g->transpose_a && same_leading(out, a)) {
        g->m *= lead;
    } else if (out->ndim == 2 && g->transpose_a && !g->transpose_b && same_leading(a, b)) {
        g->k *= lead;
    } else {
        return refuse(out, a, b, g,
                      "leading dims must be equal; or b is one matrix; or out is one "
                      "matrix, a transposed and equal leading dims summed");
    }
    return PG_OK;
}

static int slope_alone(const pg_gemm *o) {
    if (pg_epilogue_slope(o->epilogue) < 0 || (o->aux && !o->bias && o->beta == 0)) return PG_OK;
    return pg_fail(PG_EINVAL, "matmul: the epilogue of a gradient needs aux, no bias and beta 0");
}

static int extras(const pg_gemm *o, const pg_tensor *out, const pg_tensor *a, const pg_tensor *b,
                  int64_t n) {
    const pg_tensor *bias = o->bias, *aux = o->aux, *scale_a = o->scale_a, *scale_b = o->scale_b;
    PG_TRY(pg_check_kind("matmul", o->epilogue, PG_EPILOGUE_GELU_TANH_GRAD + 1));
    PG_TRY(slope_alone(o));
    if (bias) {
        PG_SAME_DTYPE("matmul", bias, a);
        PG_HAS_COUNT("matmul", bias, n);
        PG_APART("matmul", out, bias);
    }
    if (aux) {
        PG_LIKE("matmul", aux, out);
        PG_APART("matmul", aux, out);
        PG_APART("matmul", aux, a);
        PG_APART("matmul", aux, b);
        if (bias) PG_APART("matmul", aux, bias);
    }
    if (scale_a) {
        PG_HAS_DTYPE("matmul", scale_a, PG_F32);
        PG_HAS_COUNT("matmul", scale_a, 1);
    }
    if (scale_b) {
        PG_HAS_DTYPE("matmul", scale_b, PG_F32);
        PG_HAS_COUNT("matmul", scale_b, 1);
    }
    return PG_OK;
}

int pg_matmul(pg_tensor *out, const pg_tensor *a, const pg_tensor *b, const pg_gemm *opts) {
    static const pg_gemm defaults = {.alpha = 1};
    const pg_gemm *o = opts ? opts : &defaults;
    PG_POLL();
    PG_GIVEN("matmul", out, a, b);
    PG_FLOATING("matmul", a);
    PG_SAME_DTYPE("matmul", a, b);
    PG_MIXED("matmul", out, a);
    pg_gemm_args g = {.dtype = a->dtype,
                      .dtype_c = out->dtype,
                      .transpose_a = o->transpose_a != 0,
                      .transpose_b = o->transpose_b != 0,
                      .epilogue = o->epilogue,
                      .alpha = o->alpha,
                      .beta = o->beta};
    PG_TRY(plan(&g, out, a, b));
    PG_TRY(extras(o, out, a, b, g.n));
    PG_APART("matmul", out, a);
    PG_APART("matmul", out, b);
    PG_OPEN(backend, "matmul", out, a, b, o->bias, o->aux, o->scale_a, o->scale_b);
    g.bias = at_or_null(o->bias);
    g.aux = at_or_null(o->aux);
    g.scale_a = at_or_null(o->scale_a);
    g.scale_b = at_or_null(o->scale_b);
    return backend->kernels->gemm(pg_tensor_at(out), pg_tensor_at(a), pg_tensor_at(b), &g,
                                  backend->stream);
}

const char *pg_gemm_choices(void) {
    const pg_backend *b = pg_backend_device();
    return b && b->kernels && b->kernels->gemm_choices ? b->kernels->gemm_choices() : "";
}

int pg_gemm_adopt(const char *text) {
    if (!text) return pg_fail(PG_EINVAL, "gemm_adopt: the text is missing");
    const pg_backend *b = pg_backend_device();
    if (!b) return PG_EDEVICE;
    return b->kernels && b->kernels->gemm_adopt ? b->kernels->gemm_adopt(text) : PG_OK;
}
