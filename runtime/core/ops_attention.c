/* ops_attention.c: rope, attention and swiglu: checks, then one kernel call.
 *
 * Packed queries, keys and values are three starts in one tensor: the kernels see strides only. */
#include <math.h>
#include "ops_nn.h"

int pg_rope_table(pg_tensor *cos, pg_tensor *sin, double theta, int64_t first) {
    PG_POLL();
    PG_GIVEN("rope_table", cos, sin);
    PG_FLOATING("rope_table", cos);
    PG_LIKE("rope_table", sin, cos);
    PG_APART("rope_table", sin, cos);
    if (cos->ndim != 2)
        return pg_fail(PG_ESHAPE, "rope_table: cos is %s; it must be [T,K/2]", pg_shape_text(cos));
    if (!(theta > 0) || !isfinite(theta) || first < 0)
        return pg_fail(PG_EINVAL,
                       "rope_table: theta %g and first %lld; theta must be above 0 and "
                       "first 0 or more",
                       theta, (long long)first);
    PG_OPEN(b, "rope_table", cos, sin);
    return b->kernels->rope_table(pg_tensor_at(cos), pg_tensor_at(sin), theta, first, cos->dims[0],
                                  cos->dims[1], cos->dtype, b->stream);
}

/* cos, sin [lines,K/2] f32 beside half types, else like x. */
static int rope_shapes(const pg_tensor *x, const pg_tensor *cos, const pg_tensor *sin,
                       int64_t heads, int64_t start) {
    if (x->ndim != 3)
        return pg_fail(PG_ESHAPE, "rope: x is %s; it must be [B,T,C]", pg_shape_text(x));
    PG_HAS_DTYPE("rope", cos, kept_dtype(x));
    PG_LIKE("rope", sin, cos);
    if (cos->ndim != 2)
        return pg_fail(PG_ESHAPE, "rope: cos is %s; it must be [T,K/2]", pg_shape_text(cos));
    int64_t width = 2 * cos->dims[1];
    if (heads < 0 || (width > 0 && heads > x->dims[2] / width))
        return pg_fail(PG_ESHAPE,
                       "rope: x is %s, cos is %s; %lld heads of %lld columns do not lie in "
                       "its %lld columns",
                       pg_shape_text(x), pg_shape_text(cos), (long long)heads, (long long)width,
                       (long long)x->dims[2]);
    if (start < 0 || start > cos->dims[0] - x->dims[1])
        return pg_fail(PG_ESHAPE,
                       "rope: positions [%lld,%lld) lie outside the table's %lld lines; a "
                       "longer table is needed",
                       (long long)start, (long long)(start + x->dims[1]), (long long)cos->dims[0]);
    return PG_OK;
}

int pg_rope(pg_tensor *y, const pg_tensor *x, const pg_tensor *cos, const pg_tensor *sin,
            int64_t heads, int64_t start, int sign, int add) {
    PG_POLL();
    PG_GIVEN("rope", y, x, cos, sin);
    PG_FLOATING("rope", x);
    PG_LIKE("rope", y, x);
    PG_TRY(rope_shapes(x, cos, sin, heads, start));
    if (sign != 1 && sign != -1)
        return pg_fail(PG_EINVAL, "rope: sign %d; it must be 1 (forward) or -1 (gradient)", sign);
    if (add) PG_APART("rope", y, x);
    else PG_IN_PLACE("rope", y, x);
    PG_OPEN(b, "rope", y, x, cos, sin);
    return b->kernels->rope(pg_tensor_at(y), pg_tensor_at(x), pg_tensor_at(cos), pg_tensor_at(sin),
                            x->dims[0], x->dims[1], x->dims[2], heads, cos->dims[1], start, sign,
                            add, x->dtype, b->stream);
}

static int attention_options(const char *op, const pg_attn *o, const pg_tensor *q) {
    if (!o) return pg_fail(PG_EINVAL, "%s: options are missing; heads and kv_heads are needed", op);
    if (o->heads < 1 || o->kv_heads < 1 || o->heads % o->kv_heads)
        return pg_fail(PG_EINVAL,
                       "%s: %lld heads, %lld key heads; both must be at least 1 and the "
                       "first a multiple of the second",
                       op, (long long)o->heads, (long long)o->kv_heads);
    if (!(o->dropout >= 0 && o->dropout < 1))
        return pg_fail(PG_EINVAL, "%s: dropout %g lies outside [0,1)", op, o->dropout);
    if (!isfinite(o->scale)) return pg_fail(PG_EINVAL, "%s: scale %g is not finite", op, o->scale);
    int64_t all = o->heads_all ? o->heads_all : o->heads;
    if (o->sample0 < 0 || o->head0 < 0 || o->head0 > all - o->heads)
        return pg_fail(PG_EINVAL,
                       "%s: heads [%lld,%lld) of %lld, sample %lld: a head or sample that "
                       "is not there",
                       op, (long long)o->head0, (long long)(o->head0 + o->heads), (long long)all,
                       (long long)o->sample0);
    if (q->ndim != 3)
        return pg_fail(PG_ESHAPE, "%s: q is %s; it must have three dims: batch, time, columns", op,
                       pg_shape_text(q));
    const pg_tensor *lengths = o->lengths;
    if (lengths) {
        PG_HAS_DTYPE(op, lengths, PG_I32);
        PG_HAS_COUNT(op, lengths, q->dims[0]);
    }
    return pg_check_step(op, o->step);
}

/* Sizes and strides of the call; no address yet. */
static int attention_plan(const char *op, pg_attn_args *g, const pg_tensor *q, const pg_tensor *k,
                          const pg_tensor *v, const pg_attn *o) {
    PG_FLOATING(op, q);
    PG_TRY(attention_options(op, o, q));
    if (!k != !v) return pg_fail(PG_EINVAL, "%s: give both k and v, or neither (q is packed)", op);
    int64_t parts = k ? o->heads : o->heads + 2 * o->kv_heads, columns = q->dims[2];
    if (columns % parts || !columns)
        return pg_fail(PG_ESHAPE, "%s: q is %s; its %lld columns must be a multiple of %lld (%s)",
                       op, pg_shape_text(q), (long long)columns, (long long)parts,
                       k ? "heads" : "packed: heads + 2 kv_heads");
    int64_t width = columns / parts;
    if (k) {
        PG_SAME_DTYPE(op, k, q);
        PG_LIKE(op, v, k);
        if (k->ndim != 3 || k->dims[0] != q->dims[0] || k->dims[2] != o->kv_heads * width)
            return pg_fail(PG_ESHAPE, "%s: q is %s, k is %s; k must be [%lld,Tk,%lld]", op,
                           pg_shape_text(q), pg_shape_text(k), (long long)q->dims[0],
                           (long long)(o->kv_heads * width));
    }
    *g = (pg_attn_args){.batch = q->dims[0],
                        .rows = q->dims[1],
                        .keys = k ? k->dims[1] : q->dims[1],
                        .heads = o->heads,
                        .kv_heads = o->kv_heads,
                        .width = width,
                        .q_stride = columns,
                        .kv_stride = k ? k->dims[2] : columns,
                        .scale = o->scale != 0 ? o->scale : 1 / sqrt((double)width),
                        .causal = o->causal != 0,
                        .dtype = q->dtype,
                        .dropout = o->dropout,
                        .key = o->key,
                        .sample0 = o->sample0,
                        .head0 = o->head0,
                        .heads_all = o->heads_all ? o->heads_all : o->heads};
    return PG_OK;
}

/* Element number i of t, behind element 0; i is 0 unless tensors are packed. */
static char *element(const pg_tensor *t, int64_t i) {
    return t ? (char *)pg_tensor_at(t) + i * pg_dtype_size(t->dtype) : NULL;
}

static void attention_addresses(pg_attn_args *g, const pg_tensor *q, const pg_tensor *k,
                                const pg_tensor *v, const pg_attn *o) {
    int64_t heads = g->heads * g->width, kv_heads = g->kv_heads * g->width;
    g->q = pg_tensor_at(q);
    g->k = k ? pg_tensor_at(k) : element(q, heads);
    g->v = v ? pg_tensor_at(v) : element(q, heads + kv_heads);
    g->lengths = at_or_null(o->lengths);
    g->step = at_or_null(o->step);
}

static int attention_results(const char *op, const pg_tensor *out, const pg_tensor *lse,
                             const pg_tensor *q, const pg_attn_args *g) {
    PG_SAME_DTYPE(op, out, q);
    if (out->ndim != 3 || out->dims[0] != g->batch || out->dims[1] != g->rows ||
        out->dims[2] != g->heads * g->width)
        return pg_fail(PG_ESHAPE, "%s: out is %s, q is %s; out must be [%lld,%lld,%lld]", op,
                       pg_shape_text(out), pg_shape_text(q), (long long)g->batch,
                       (long long)g->rows, (long long)(g->heads * g->width));
    PG_KEPT(op, lse, q, g->batch * g->heads * g->rows);
    return PG_OK;
}

int pg_attention(pg_tensor *out, pg_tensor *lse, const pg_tensor *q, const pg_tensor *k,
                 const pg_tensor *v, const pg_attn *opts) {
    pg_attn_args g;
    PG_POLL();
    PG_GIVEN("attention", out, lse, q);
    PG_TRY(attention_plan("attention", &g, q, k, v, opts));
    PG_TRY(attention_results("attention", out, lse, q, &g));
    PG_APART("attention", out, q);
    if (k) PG_APART("attention", out, k);
    if (v) PG_APART("attention", out, v);
    PG_OPEN(b, "attention", out, lse, q, k, v, opts->lengths, opts->step);
    attention_addresses(&g, q, k, v, opts);
    void *scratch;
    PG_TRY(take_scratch(&scratch, "attention", b->kernels->attention_scratch(&g)));
    return b->kernels->attention(pg_tensor_at(out), pg_tensor_at(lse), &g, scratch, b->stream);
}

#define GRAD_OF(d, x)                                                                              \
    do {                                                                                           \
        if (d && !x)                                                                               \
            return pg_fail(PG_EINVAL,                                                              \
                           "attention_grad: %s without %s; q is packed, and so "                   \
                           "is dq",                                                                \
                           #d, #x);                                                                \
        if (d) {                                                                                   \
            PG_LIKE("attention_grad", d, x);                                                       \
            PG_APART("attention_grad", d, x);                                                      \
            PG_APART("attention_grad", d, dout);                                                   \
            PG_APART("attention_grad", d, out);                                                    \
        }                                                                                          \
    } while (0)

int pg_attention_grad(pg_tensor *dq, pg_tensor *dk, pg_tensor *dv, const pg_tensor *dout,
                      const pg_tensor *q, const pg_tensor *k, const pg_tensor *v,
                      const pg_tensor *out, const pg_tensor *lse, const pg_attn *opts, int add) {
    pg_attn_args g;
    PG_POLL();
    PG_GIVEN("attention_grad", dout, q, out, lse);
    PG_TRY(attention_plan("attention_grad", &g, q, k, v, opts));
    PG_TRY(attention_results("attention_grad", out, lse, q, &g));
    PG_LIKE("attention_grad", dout, out);
    GRAD_OF(dq, q);
    GRAD_OF(dk, k);
    GRAD_OF(dv, v);
    if (!dq && !dk && !dv) return PG_OK;
    PG_OPEN(b, "attention_grad", dq, dk, dv, dout, q, k, v, out, lse, opts->lengths, opts->step);
    attention_addresses(&g, q, k, v, opts);
    void *scratch, *to_k = at_or_null(dk), *to_v = at_or_null(dv);
    if (!k) {
        to_k = element(dq, g.heads * g.width);
        to_v = element(dq, (g.heads + g.kv_heads) * g.width);
    }
    PG_TRY(take_scratch(&scratch, "attention_grad", b->kernels->attention_grad_scratch(&g)));
    return b->kernels->attention_grad(at_or_null(dq), to_k, to_v, pg_tensor_at(dout),
                                      pg_tensor_at(out), pg_tensor_at(lse), &g, add, scratch,
                                      b->stream);
}

/* x holds gate and up: twice the columns of y. */
static int swiglu_shapes(const char *op, const pg_tensor *y, const char *name, const pg_tensor *x) {
    PG_FLOATING(op, x);
    PG_TRY(pg_check_dtype(op, name, y, "x", x));
    if (y->ndim == x->ndim && y->ndim > 0 && x->count == 2 * y->count &&
        pg_last_dim(x) == 2 * pg_last_dim(y))
        return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: %s is %s, x is %s; x must have twice its columns", op, name,
                   pg_shape_text(y), pg_shape_text(x));
}

int pg_swiglu(pg_tensor *y, const pg_tensor *x) {
    PG_POLL();
    PG_GIVEN("swiglu", y, x);
    PG_TRY(swiglu_shapes("swiglu", y, "y", x));
    PG_APART("swiglu", y, x);
    PG_OPEN(b, "swiglu", y, x);
    return b->kernels->swiglu(pg_tensor_at(y), pg_tensor_at(x), rows_of(y), pg_last_dim(y),
                              x->dtype, b->stream);
}

int pg_swiglu_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x, int add) {
    PG_POLL();
    PG_GIVEN("swiglu_grad", dx, dy, x);
    PG_TRY(swiglu_shapes("swiglu_grad", dy, "dy", x));
    PG_LIKE("swiglu_grad", dx, x);
    PG_APART("swiglu_grad", dx, dy);
    if (add) PG_APART("swiglu_grad", dx, x);
    else PG_IN_PLACE("swiglu_grad", dx, x);
    PG_OPEN(b, "swiglu_grad", dx, dy, x);
    return b->kernels->swiglu_grad(pg_tensor_at(dx), pg_tensor_at(dy), pg_tensor_at(x), rows_of(dy),
                                   pg_last_dim(dy), add, x->dtype, b->stream);
}
