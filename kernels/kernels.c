/* kernels.c: the table of the CPU kernels; contracts in kernels.h, prototypes in cpu.h.
 *
 * half_NAME is the door of cpu_NAME for bf16 and f16: it says how many numbers each tensor of the
 * call has, and half.h widens them.  Kernels without a door compute nothing (they move bytes, cast,
 * draw), or know these dtypes themselves. */
#include "half.h"

/* ---- elementwise ---- */
static int half_unary(void *y, const void *x, int64_t n, int kind, int dtype, pg_stream s) {
    WIDENED(cpu_unary(y, x, n, kind, dtype, s), READ(x, n), WRITE(y, n));
}

static int half_unary_grad(void *dx, const void *dy, const void *x, int64_t n, int kind, int add,
                           int dtype, pg_stream s) {
    WIDENED(cpu_unary_grad(dx, dy, x, n, kind, add, dtype, s), READ(dy, n), READ(x, n),
            UPDATE(dx, n, add));
}

static int half_binary(void *y, const void *a, const void *b, int64_t n, int64_t nb, int kind,
                       int add, int dtype, pg_stream s) {
    WIDENED(cpu_binary(y, a, b, n, nb, kind, add, dtype, s), READ(a, n), READ(b, nb),
            UPDATE(y, n, add));
}

static int half_axpby(void *y, const void *x, double alpha, double beta, int64_t n, int dtype_y,
                      int dtype, pg_stream s) {
    WIDENED(cpu_axpby(y, x, alpha, beta, n, dtype, s), READ(x, n),
            UPDATE_AS(y, n, beta != 0, dtype_y));
}

static int half_dropout(void *y, const void *x, int64_t n, double p, const double *step,
                        uint64_t key, pg_index_map map, int add, int dtype, pg_stream s) {
    WIDENED(cpu_dropout(y, x, n, p, step, key, map, add, dtype, s), READ(x, n), UPDATE(y, n, add));
}

/* ---- matmul ---- */
/* Numbers from the first of a batched matrix to its last. */
static int64_t span(int64_t batch, int64_t stride, int64_t rows, int64_t ld, int64_t columns) {
    if (batch < 1 || rows < 1 || columns < 1) return 0;
    return (batch - 1) * stride + (rows - 1) * ld + columns;
}

static int half_gemm(void *c, const void *a, const void *b, const pg_gemm_args *g, pg_stream s) {
    int dtype = g->dtype, dtype_c = g->dtype_c, ta = g->transpose_a, tb = g->transpose_b;
    pg_gemm_args w = *g;
    if (pg_is_half(dtype)) w.dtype = w.dtype_c = PG_F32;
    int64_t n_c = span(g->batch, g->stride_c, g->m, g->ldc, g->n);
    int gaps = n_c != g->batch * g->m * g->n; /* what lies between rows must stay */
    int reads = pg_epilogue_slope(g->epilogue) >= 0;
    WIDENED(cpu_gemm(c, a, b, &w, s),
            READ(a, span(g->batch, g->stride_a, ta ? g->k : g->m, g->lda, ta ? g->m : g->k)),
            READ(b, span(g->batch, g->stride_b, tb ? g->n : g->k, g->ldb, tb ? g->k : g->n)),
            READ(w.bias, g->n), UPDATE_AS(c, n_c, g->beta != 0 || gaps, dtype_c),
            UPDATE_AS(w.aux, n_c, gaps || reads, dtype_c));
}

/* ---- norms ---- */
/* The norm is that of the sum as it is kept: rounded. */
static int half_rmsnorm(void *y, void *sum, void *rstd, const void *x, const void *r, const void *w,
                        double eps, int64_t n, int64_t d, int dtype, pg_stream s) {
    if (r && pg_is_half(dtype)) {
        PG_TRY(half_binary(sum, x, r, n * d, n * d, PG_ADD, 0, dtype, s));
        x = sum, r = sum = NULL;
    }
    WIDENED(cpu_rmsnorm(y, sum, rstd, x, r, w, eps, n, d, dtype, s), READ(x, n * d), READ(w, d),
            WRITE(y, n * d));
}

static int half_rmsnorm_grad(void *dx, void *dw, const void *dy, const void *x, const void *w,
                             const void *rstd, const void *base, int64_t n, int64_t d, int add_x,
                             int add_w, void *scratch, int dtype, int dtype_w, pg_stream s) {
    WIDENED(cpu_rmsnorm_grad(dx, dw, dy, x, w, rstd, base, n, d, add_x, add_w, scratch, dtype, s),
            READ(dy, n * d), READ(x, n * d), READ(w, d), READ(base, n * d),
            UPDATE(dx, n * d, add_x), UPDATE_AS(dw, d, add_w, dtype_w));
}

static int half_layernorm(void *y, void *sum, void *mean, void *rstd, const void *x, const void *r,
                          const void *w, const void *b, double eps, int64_t n, int64_t d, int dtype,
                          pg_stream s) {
    if (r && pg_is_half(dtype)) {
        PG_TRY(half_binary(sum, x, r, n * d, n * d, PG_ADD, 0, dtype, s));
        x = sum, r = sum = NULL;
    }
    WIDENED(cpu_layernorm(y, sum, mean, rstd, x, r, w, b, eps, n, d, dtype, s), READ(x, n * d),
            READ(w, d), READ(b, d), WRITE(y, n * d));
}

static int half_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x,
                               const void *w, const void *mean, const void *rstd, const void *base,
                               int64_t n, int64_t d, int add_x, int add_w, int add_b, void *scratch,
                               int dtype, int dtype_w, pg_stream s) {
    WIDENED(cpu_layernorm_grad(dx, dw, db, dy, x, w, mean, rstd, base, n, d, add_x, add_w, add_b,
                               scratch, dtype, s),
            READ(dy, n * d), READ(x, n * d), READ(w, d), READ(base, n * d),
            UPDATE(dx, n * d, add_x), UPDATE_AS(dw, d, add_w, dtype_w),
            UPDATE_AS(db, d, add_b, dtype_w));
}

/* ---- attention and positions ---- */
static int half_rope_table(void *cos, void *sin, double theta, int64_t first, int64_t t,
                           int64_t half, int dtype, pg_stream s) {
    WIDENED(cpu_rope_table(cos, sin, theta, first, t, half, dtype, s), WRITE(cos, t * half),
            WRITE(sin, t * half));
}

/* cos and sin are f32 here already. */
static int half_rope(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
                     int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add,
                     int dtype, pg_stream s) {
    WIDENED(cpu_rope(y, x, cos, sin, b, t, c, heads, half, start, sign, add, dtype, s),
            READ(x, b * t * c), UPDATE(y, b * t * c, add));
}

static pg_attn_args attention_in_f32(const pg_attn_args *a) {
    pg_attn_args w = *a;
    if (pg_is_half(a->dtype)) w.dtype = PG_F32;
    return w;
}

static int64_t half_attention_scratch(const pg_attn_args *a) {
    pg_attn_args w = attention_in_f32(a);
    return cpu_attention_scratch(&w);
}
static int64_t half_attention_grad_scratch(const pg_attn_args *a) {
    pg_attn_args w = attention_in_f32(a);
    return cpu_attention_grad_scratch(&w);
}

/* Packed keys and values lie within q's rows and go where its copy goes: how many numbers behind q
 * they start; 0: they are apart, or nothing is copied. */
typedef struct {
    int64_t k, v;
} packed;

static packed packed_at(const pg_attn_args *a) {
    int64_t k = ((const uint16_t *)a->k - (const uint16_t *)a->q);
    int64_t v = ((const uint16_t *)a->v - (const uint16_t *)a->q);
    int within = pg_is_half(a->dtype) && a->q_stride == a->kv_stride && k > 0 && k < a->q_stride;
    return within ? (packed){k, v} : (packed){0, 0};
}

static const pg_attn_args *with_keys(pg_attn_args *a, packed at) {
    if (at.k) a->k = (const float *)a->q + at.k, a->v = (const float *)a->q + at.v;
    return a;
}

static int half_attention(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s) {
    int dtype = a->dtype;
    packed at = packed_at(a);
    pg_attn_args w = attention_in_f32(a);
    int64_t keys = at.k ? 0 : a->batch * a->keys * a->kv_stride, rows = a->batch * a->rows;
    WIDENED(cpu_attention(out, lse, with_keys(&w, at), scratch, s), READ(w.q, rows * a->q_stride),
            READ(w.k, keys), READ(w.v, keys), WRITE(out, rows * a->heads * a->width));
}

static int half_attention_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                               const void *lse, const pg_attn_args *a, int add, void *scratch,
                               pg_stream s) {
    int dtype = a->dtype;
    packed at = packed_at(a);
    pg_attn_args w = attention_in_f32(a);
    int64_t keys = at.k ? 0 : a->batch * a->keys * a->kv_stride, rows = a->batch * a->rows;
    int64_t heads = rows * a->heads * a->width;
    WIDENED(cpu_attention_grad(dq, at.k ? (float *)dq + at.k : dk, at.k ? (float *)dq + at.v : dv,
                               dout, out, lse, with_keys(&w, at), add, scratch, s),
            READ(w.q, rows * a->q_stride), READ(w.k, keys), READ(w.v, keys), READ(dout, heads),
            READ(out, heads), UPDATE(dq, rows * a->q_stride, add), UPDATE(dk, keys, add),
            UPDATE(dv, keys, add));
}

static int half_swiglu(void *y, const void *x, int64_t n, int64_t f, int dtype, pg_stream s) {
    WIDENED(cpu_swiglu(y, x, n, f, dtype, s), READ(x, 2 * n * f), WRITE(y, n * f));
}

static int half_swiglu_grad(void *dx, const void *dy, const void *x, int64_t n, int64_t f, int add,
                            int dtype, pg_stream s) {
    WIDENED(cpu_swiglu_grad(dx, dy, x, n, f, add, dtype, s), READ(dy, n * f), READ(x, 2 * n * f),
            UPDATE(dx, 2 * n * f, add));
}

/* ---- softmax, embedding, loss ---- */
static int half_softmax(void *y, const void *x, int64_t n, int64_t v, int log, int dtype,
                        pg_stream s) {
    WIDENED(cpu_softmax(y, x, n, v, log, dtype, s), READ(x, n * v), WRITE(y, n * v));
}

static int half_softmax_grad(void *dx, const void *dy, const void *y, int64_t n, int64_t v, int log,
                             int add, int dtype, pg_stream s) {
    WIDENED(cpu_softmax_grad(dx, dy, y, n, v, log, add, dtype, s), READ(dy, n * v), READ(y, n * v),
            UPDATE(dx, n * v, add));
}

static int half_embedding_grad(void *dtable, const void *dy, const void *ids, int64_t n, int64_t d,
                               int64_t v, int64_t first, int add, void *scratch, int dtype,
                               int dtype_w, int dtype_ids, pg_stream s) {
    WIDENED(cpu_embedding_grad(dtable, dy, ids, n, d, v, first, add, scratch, dtype, dtype_ids, s),
            READ(dy, n * d), UPDATE_AS(dtable, v * d, add, dtype_w));
}

static int half_cross_entropy(void *out, void *rows, void *lse, const void *logits,
                              const void *targets, int64_t n, int64_t v, int64_t ignore,
                              const double *step, void *scratch, int dtype, int dtype_ids,
                              pg_stream s) {
    WIDENED(cpu_cross_entropy(out, rows, lse, logits, targets, n, v, ignore, step, scratch, dtype,
                              dtype_ids, s),
            READ(logits, n * v));
}

static int half_cross_entropy_grad(void *dlogits, const void *dloss, int per_row,
                                   const void *logits, const void *targets, const void *lse,
                                   const void *out, int64_t n, int64_t v, int64_t first,
                                   int64_t valid, int64_t ignore, const double *step, int add,
                                   int dtype, int dtype_ids, pg_stream s) {
    WIDENED(cpu_cross_entropy_grad(dlogits, dloss, per_row, logits, targets, lse, out, n, v, first,
                                   valid, ignore, step, add, dtype, dtype_ids, s),
            READ(logits, n * v), UPDATE(dlogits, n * v, add));
}

static int half_vocab_stats(void *stats, const void *logits, const void *targets, int64_t n,
                            int64_t v, int64_t first, int64_t valid, int64_t ignore, int dtype,
                            int dtype_ids, pg_stream s) {
    WIDENED(
        cpu_vocab_stats(stats, logits, targets, n, v, first, valid, ignore, dtype, dtype_ids, s),
        READ(logits, n * v));
}

static int half_sample(int32_t *ids, const void *logits, int64_t n, int64_t v, double temperature,
                       int64_t top_k, double top_p, uint64_t seed, uint64_t key, int64_t first,
                       void *scratch, int dtype, pg_stream s) {
    WIDENED(cpu_sample(ids, logits, n, v, temperature, top_k, top_p, seed, key, first, scratch,
                       dtype, s),
            READ(logits, n * v));
}

static int half_argmax(void *ids, const void *x, int64_t n, int64_t v, int dtype, int dtype_ids,
                       pg_stream s) {
    WIDENED(cpu_argmax(ids, x, n, v, dtype, dtype_ids, s), READ(x, n * v));
}

/* ---- reductions, rearranging, norms of gradients ---- */
static int half_reduce(void *y, const void *x, int kind, int64_t outer, int64_t n, int64_t inner,
                       int add, int dtype_y, int dtype, pg_stream s) {
    WIDENED(cpu_reduce(y, x, kind, outer, n, inner, add, dtype, s), READ(x, outer * n * inner),
            UPDATE_AS(y, outer * inner, add, dtype_y));
}

static int half_expand(void *y, const void *x, double scale, int64_t outer, int64_t n,
                       int64_t inner, int add, int dtype, pg_stream s) {
    WIDENED(cpu_expand(y, x, scale, outer, n, inner, add, dtype, s), READ(x, outer * inner),
            UPDATE(y, outer * n * inner, add));
}

static int half_reduce_grad(void *dx, const void *dy, const void *x, const void *y, int kind,
                            int64_t outer, int64_t n, int64_t inner, int add, int dtype,
                            pg_stream s) {
    WIDENED(cpu_reduce_grad(dx, dy, x, y, kind, outer, n, inner, add, dtype, s),
            READ(dy, outer * inner), READ(x, outer * n * inner), READ(y, outer * inner),
            UPDATE(dx, outer * n * inner, add));
}

/* Without add, bytes are moved and nothing is widened. */
static int half_move(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx,
                     int64_t x0, int64_t n, int64_t inner, int add, int dtype, pg_stream s) {
    if (!add) return cpu_move(y, x, outer, ny, y0, nx, x0, n, inner, 0, dtype, s);
    WIDENED(cpu_move(y, x, outer, ny, y0, nx, x0, n, inner, add, dtype, s),
            READ(x, outer * nx * inner), UPDATE(y, outer * ny * inner, 1));
}

static int half_permute(void *y, const void *x, int ndim, const int64_t *dims_x,
                        const int32_t *order, int add, int dtype, pg_stream s) {
    if (!add) return cpu_permute(y, x, ndim, dims_x, order, 0, dtype, s);
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= dims_x[i];
    WIDENED(cpu_permute(y, x, ndim, dims_x, order, add, dtype, s), READ(x, n), UPDATE(y, n, 1));
}

static int half_sumsq(double *step, const void *x, int64_t n, const int64_t *ends,
                      const float *weights, int64_t runs, int dtype, pg_stream s) {
    WIDENED(cpu_sumsq(step, x, n, ends, weights, runs, dtype, s), READ(x, n));
}

static const pg_kernels table = {
    .fill = cpu_fill,
    .cast = cpu_cast,
    .random_uniform = cpu_random_uniform,
    .random_normal = cpu_random_normal,
    .unary = half_unary,
    .unary_grad = half_unary_grad,
    .binary = half_binary,
    .axpby = half_axpby,
    .dropout = half_dropout,
    .gemm = half_gemm,
    .rmsnorm = half_rmsnorm,
    .rmsnorm_grad_scratch = cpu_rmsnorm_grad_scratch,
    .rmsnorm_grad = half_rmsnorm_grad,
    .layernorm = half_layernorm,
    .layernorm_grad_scratch = cpu_layernorm_grad_scratch,
    .layernorm_grad = half_layernorm_grad,
    .rope_table = half_rope_table,
    .rope = half_rope,
    .attention_scratch = half_attention_scratch,
    .attention = half_attention,
    .attention_grad_scratch = half_attention_grad_scratch,
    .attention_grad = half_attention_grad,
    .swiglu = half_swiglu,
    .swiglu_grad = half_swiglu_grad,
    .softmax = half_softmax,
    .softmax_grad = half_softmax_grad,
    .check_ids = cpu_check_ids,
    .embedding = cpu_embedding,
    .embedding_grad_scratch = cpu_embedding_grad_scratch,
    .embedding_grad = half_embedding_grad,
    .cross_entropy_scratch = cpu_cross_entropy_scratch,
    .cross_entropy = half_cross_entropy,
    .cross_entropy_grad = half_cross_entropy_grad,
    .vocab_stats = half_vocab_stats,
    .vocab_loss = cpu_vocab_loss,
    .sample_scratch = cpu_sample_scratch,
    .sample = half_sample,
    .argmax = half_argmax,
    .reduce = half_reduce,
    .expand = half_expand,
    .reduce_grad = half_reduce_grad,
    .move = half_move,
    .permute = half_permute,
    .sumsq = half_sumsq,
    .clip = cpu_clip,
    .count_nonfinite = cpu_count_nonfinite,
    .adamw = cpu_adamw,
    .sgd = cpu_sgd,
    .master_join = cpu_master_join,
    .master_split = cpu_master_split,
};

const pg_kernels *pg_kernels_cpu(void) { return &table; }
