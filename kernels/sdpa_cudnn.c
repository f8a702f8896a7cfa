/* sdpa_cudnn.c: attention forward and backward as cuDNN graphs.
 *
 * Letters as in pg.h, and S = scores [B,H,T,Tk], never in memory.  Forward:
 *   S = mask(scale q k');  stats = max + log sum exp(S - max);  P = exp(S - max) / sum;  out = P v
 * Backward, P worked out again from stats:
 *   delta = sum over K of dout * out;  P = exp(mask(scale q k' - stats));  dv = P' dout
 *   dS = scale P (dout v' - delta);  dk = dS' q;  dq = dS k
 * stats is the natural logarithm that pg.h calls lse.  The mask stands before stats in the one and
 * behind them in the other: that is the pattern the engines know.  Source: Dao et al. 2022. */
#include "attention_cudnn.h"

static const cudnnDataType_t F32 = CUDNN_DATA_FLOAT;

static cudnnDataType_t half_type(const sdpa_shape *s) {
    return s->dtype == PG_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;
}

/* [B,heads,n,K] in memory, a row of all heads every `stride`. */
static graph_tensor rows_of(sdpa_graph *g, const sdpa_shape *s, int64_t number, int64_t heads,
                            int64_t n, int64_t stride) {
    return graph_memory(g, number, half_type(s), (dims4){{s->batch, heads, n, s->width}},
                        (dims4){{n * stride, s->width, stride, 1}});
}

/* The same memory as [B,heads,K,n]: the engines want k, and in the backward also v, transposed. */
static graph_tensor columns_of(sdpa_graph *g, const sdpa_shape *s, int64_t number, int64_t heads,
                               int64_t n, int64_t stride) {
    return graph_memory(g, number, half_type(s), (dims4){{s->batch, heads, s->width, n}},
                        (dims4){{n * stride, s->width, 1, stride}});
}

/* A number for each row, f32 [B,H,T,1]. */
static graph_tensor row_numbers(sdpa_graph *g, const sdpa_shape *s, int64_t number) {
    return graph_memory(g, number, F32, (dims4){{s->batch, s->heads, s->rows, 1}},
                        (dims4){{s->heads * s->rows, s->rows, 1, 1}});
}

static graph_tensor virtual_scores(sdpa_graph *g, const sdpa_shape *s) {
    return graph_virtual(g, F32, (dims4){{s->batch, s->heads, s->rows, s->keys}});
}

static graph_tensor virtual_rows(sdpa_graph *g, const sdpa_shape *s) {
    return graph_virtual(g, F32, (dims4){{s->batch, s->heads, s->rows, 1}});
}

static graph_tensor with(sdpa_graph *g, cudnnPointwiseMode_t mode, graph_tensor x, graph_tensor b) {
    graph_tensor y = graph_like(g, F32, x);
    graph_pointwise(g, mode, F32, x, &b, NULL, y, 0);
    return y;
}

static graph_tensor exp_of(sdpa_graph *g, graph_tensor x) {
    graph_tensor y = graph_like(g, F32, x);
    graph_pointwise(g, CUDNN_POINTWISE_EXP, F32, x, NULL, NULL, y, 0);
    return y;
}

/* ---- masks ---- */
typedef struct { /* those of a call; what is not in use stays empty */
    graph_tensor scale, neg_inf, rows, keys;
    const graph_tensor *m, *n; /* rows and keys where samples have lengths of their own */
} masks;

static void masks_make(sdpa_graph *g, const sdpa_shape *s, masks *k) {
    const dims4 dim = {{s->batch, 1, 1, 1}}, stride = {{1, 1, 1, 1}};
    k->scale = graph_number(g, SDPA_SCALE);
    k->m = k->n = NULL;
    if (s->causal || s->lengths) k->neg_inf = graph_number(g, SDPA_NEG_INF);
    if (!s->lengths) return;
    k->rows = graph_memory(g, SDPA_ROWS, CUDNN_DATA_INT32, dim, stride);
    k->keys = graph_memory(g, SDPA_KEYS, CUDNN_DATA_INT32, dim, stride);
    k->m = &k->rows, k->n = &k->keys;
}

static graph_tensor index_of(sdpa_graph *g, graph_tensor x, int64_t axis, cudnnDataType_t compute) {
    graph_tensor y = graph_like(g, CUDNN_DATA_INT32, x);
    graph_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, compute, x, NULL, NULL, y, axis);
    return y;
}

static graph_tensor compare(sdpa_graph *g, cudnnPointwiseMode_t mode, graph_tensor a,
                            graph_tensor b, graph_tensor x) {
    graph_tensor y = graph_like(g, CUDNN_DATA_BOOLEAN, x);
    graph_pointwise(g, mode, CUDNN_DATA_BOOLEAN, a, &b, NULL, y, 0);
    return y;
}

static graph_tensor keep_where(sdpa_graph *g, graph_tensor x, graph_tensor keep, const masks *k) {
    graph_tensor y = graph_like(g, F32, x);
    graph_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, F32, x, &k->neg_inf, &keep, y, 0);
    return y;
}

/* Rows and keys of the sample alone. */
static graph_tensor mask_lengths(sdpa_graph *g, graph_tensor x, const masks *k) {
    graph_tensor row = index_of(g, x, 2, CUDNN_DATA_INT32);
    graph_tensor column = index_of(g, x, 3, CUDNN_DATA_INT32);
    graph_tensor row_in = compare(g, CUDNN_POINTWISE_CMP_LT, row, k->rows, x);
    graph_tensor column_in = compare(g, CUDNN_POINTWISE_CMP_LT, column, k->keys, x);
    return keep_where(g, x, compare(g, CUDNN_POINTWISE_LOGICAL_AND, row_in, column_in, x), k);
}

/* Keys up to the row's own (T = Tk). */
static graph_tensor mask_causal(sdpa_graph *g, graph_tensor x, const masks *k) {
    graph_tensor row = index_of(g, x, 2, F32), column = index_of(g, x, 3, F32);
    return keep_where(g, x, compare(g, CUDNN_POINTWISE_CMP_GE, row, column, x), k);
}

/* scale q k', where sample lengths allow */
static graph_tensor scores(sdpa_graph *g, const sdpa_shape *s, graph_tensor q, graph_tensor kt,
                           const masks *k) {
    graph_tensor x = virtual_scores(g, s);
    graph_matmul(g, q, kt, x, k->m, k->n, NULL);
    x = with(g, CUDNN_POINTWISE_MUL, x, k->scale);
    return s->lengths ? mask_lengths(g, x, k) : x;
}

/* ---- forward ---- */
void sdpa_forward(sdpa_graph *g, const sdpa_shape *s) {
    graph_tensor q = rows_of(g, s, SDPA_Q, s->heads, s->rows, s->q_stride);
    graph_tensor kt = columns_of(g, s, SDPA_K, s->kv_heads, s->keys, s->kv_stride);
    graph_tensor v = rows_of(g, s, SDPA_V, s->kv_heads, s->keys, s->kv_stride);
    graph_tensor out = rows_of(g, s, SDPA_OUT, s->heads, s->rows, s->heads * s->width);
    graph_tensor stats = row_numbers(g, s, SDPA_STATS);
    masks k;
    masks_make(g, s, &k);

    graph_tensor x = scores(g, s, q, kt, &k);
    if (s->causal) x = mask_causal(g, x, &k);
    graph_tensor most = virtual_rows(g, s), sum = virtual_rows(g, s), log_sum = virtual_rows(g, s);
    graph_reduce(g, CUDNN_REDUCE_TENSOR_MAX, x, most);
    graph_tensor e = exp_of(g, with(g, CUDNN_POINTWISE_SUB, x, most));
    graph_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, sum);
    graph_pointwise(g, CUDNN_POINTWISE_LOG, F32, sum, NULL, NULL, log_sum, 0);
    graph_pointwise(g, CUDNN_POINTWISE_ADD, F32, most, &log_sum, NULL, stats, 0);
    graph_tensor p = graph_like(g, half_type(s), x); /* the matmul takes it in the operands' type */
    graph_pointwise(g, CUDNN_POINTWISE_DIV, F32, e, &sum, NULL, p, 0);
    graph_matmul(g, p, v, out, k.m, NULL, k.n);
}

/* ---- backward ---- */
/* out = left' right, where out has the key heads: with grouped heads each query head's part first,
 * then their sum. */
static void by_keys(sdpa_graph *g, const sdpa_shape *s, graph_tensor left, graph_tensor right,
                    graph_tensor out, const masks *k) {
    graph_tensor turned = graph_transposed(g, half_type(s), left), parts = out;
    graph_reshape(g, left, turned);
    if (s->heads != s->kv_heads)
        parts = graph_virtual(g, half_type(s), (dims4){{s->batch, s->heads, s->keys, s->width}});
    graph_matmul(g, turned, right, parts, k->n, NULL, k->m);
    if (s->heads != s->kv_heads) graph_reduce(g, CUDNN_REDUCE_TENSOR_ADD, parts, out);
}

/* delta = sum over K of dout * out, times one (with dropout it would be 1 - p) */
static graph_tensor delta_of(sdpa_graph *g, const sdpa_shape *s, graph_tensor dout,
                             graph_tensor out) {
    graph_tensor delta = row_numbers(g, s, SDPA_DELTA), one = graph_number(g, SDPA_ONE);
    graph_tensor product = graph_like(g, F32, dout), sum = virtual_rows(g, s);
    graph_pointwise(g, CUDNN_POINTWISE_MUL, F32, dout, &out, NULL, product, 0);
    graph_reduce(g, CUDNN_REDUCE_TENSOR_ADD, product, sum);
    graph_pointwise(g, CUDNN_POINTWISE_MUL, F32, sum, &one, NULL, delta, 0);
    return delta;
}

/* dq = dS k: tiles are added into an f32 tensor in the order they come, or (deterministic) the
 * engine keeps them apart in its workspace, 2 B H T Tk bytes of it on Hopper. */
static void by_rows(sdpa_graph *g, const sdpa_shape *s, graph_tensor ds, graph_tensor kt,
                    graph_tensor dq, const masks *k) {
    graph_tensor keys = graph_transposed(g, F32, kt); /* in type like ds, as the pattern has it */
    graph_reshape(g, kt, keys);
    if (s->deterministic) {
        graph_matmul(g, ds, keys, dq, k->m, NULL, k->n);
        return;
    }
    int64_t head = s->rows * s->width;
    graph_tensor sum = graph_memory(g, SDPA_DQ_SUM, F32,
                                    (dims4){{s->batch, s->heads, s->rows, s->width}},
                                    (dims4){{s->heads * head, head, s->width, 1}});
    graph_matmul(g, ds, keys, sum, k->m, NULL, k->n);
    graph_pointwise(g, CUDNN_POINTWISE_IDENTITY, F32, sum, NULL, NULL, dq, 0);
}

void sdpa_backward(sdpa_graph *g, const sdpa_shape *s) {
    int64_t H = s->heads, G = s->kv_heads, T = s->rows, Tk = s->keys, row = H * s->width;
    graph_tensor q = rows_of(g, s, SDPA_Q, H, T, s->q_stride);
    graph_tensor kt = columns_of(g, s, SDPA_K, G, Tk, s->kv_stride);
    graph_tensor vt = columns_of(g, s, SDPA_V, G, Tk, s->kv_stride);
    graph_tensor out = rows_of(g, s, SDPA_OUT, H, T, row);
    graph_tensor dout = rows_of(g, s, SDPA_DOUT, H, T, row);
    graph_tensor stats = row_numbers(g, s, SDPA_STATS);
    graph_tensor dq = rows_of(g, s, SDPA_DQ, H, T, s->dq_stride);
    graph_tensor dk = rows_of(g, s, SDPA_DK, G, Tk, s->dkv_stride);
    graph_tensor dv = rows_of(g, s, SDPA_DV, G, Tk, s->dkv_stride);
    masks k;
    masks_make(g, s, &k);

    graph_tensor delta = delta_of(g, s, dout, out);
    graph_tensor x = with(g, CUDNN_POINTWISE_SUB, scores(g, s, q, kt, &k), stats);
    graph_tensor p = exp_of(g, s->causal ? mask_causal(g, x, &k) : x);
    by_keys(g, s, p, dout, dv, &k);

    graph_tensor dp = virtual_scores(g, s);
    graph_matmul(g, dout, vt, dp, k.m, k.n, NULL);
    graph_tensor ds = with(g, CUDNN_POINTWISE_MUL, with(g, CUDNN_POINTWISE_SUB, dp, delta), p);
    ds = with(g, CUDNN_POINTWISE_MUL, ds, k.scale);
    by_keys(g, s, ds, q, dk, &k);
    by_rows(g, s, ds, kt, dq, &k);
}
