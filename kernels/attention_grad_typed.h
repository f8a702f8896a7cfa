/* attention_grad_typed.h: the backward pass of one head; see typed_twice.h. */
#include "attention_product_typed.h"

typedef struct { /* one key head of one sample, the query head in turn, and a thread's places */
    const REAL *q, *out, *dout, *lse;
    REAL *dq;
    REAL *k_panels, *v_panels, *k; /* the keys, and the values in panels [keys,K] */
    REAL *dk, *dv;                 /* sums [keys,K] */
    REAL *p, *ds;                  /* a block of rows [BLOCK,keys] */
    REAL *q_block, *dout_block;    /* [BLOCK,K] */
    REAL *delta;                   /* [BLOCK] */
    float *u;                      /* [BLOCK,keys] */
    uint64_t stream;
    int alone;                     /* fewer units than threads: blocks are shared out */
} N(head);

static const REAL N(ones)[ROWS] = {1, 1, 1, 1};

/* delta[i] = sum of dout * out over a row; dout is laid end to end on the way. */
PG_CLONES static void N(take_dout)(REAL *delta, REAL *y, const REAL *dout, const REAL *out,
                                   int64_t ld, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        REAL sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < width; j++) {
            y[i * width + j] = dout[i * ld + j];
            sum += dout[i * ld + j] * out[i * ld + j];
        }
        delta[i] = sum;
    }
}

/* s[0..n) = exp(s - lse); returns 1 / sum.  The sum is 1 but for the rounding of lse, which for
 * scores of size 1e5 is a percent: dividing by it makes it right again. */
PG_INLINE REAL N(exp_lse)(REAL *s, int64_t n, REAL lse) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) {
        REAL e = M(vexp_low)(s[j] - lse);
        s[j] = e;
        sum += e;
    }
    return 1 / sum;
}

/* Scores become p, and dp becomes ds = p (dp - delta) scale, for n whole vectors. */
PG_CLONES static void N(slope_row)(REAL *p, REAL *dp, int64_t n, REAL lse, REAL delta,
                                   REAL scale) {
    REAL inverse = N(exp_lse)(p, n, lse);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        REAL prob = p[j] * inverse;
        dp[j] = prob * (dp[j] - delta) * scale;
        p[j] = prob;
    }
}

/* The same under dropout: dp goes through the mask, and p is the masked one. */
PG_CLONES static void N(slope_drop_row)(REAL *p, REAL *dp, const float *u, int64_t n, REAL lse,
                                        REAL delta, REAL scale, float drop, REAL factor) {
    REAL inverse = N(exp_lse)(p, n, lse);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        REAL prob = p[j] * inverse, mask = u[j] >= drop ? factor : 0;
        dp[j] = prob * (dp[j] * mask - delta) * scale;
        p[j] = prob * mask;
    }
}

/* Row i of a block: p and ds up to `end`, the unseen rest 0. */
static void N(slopes)(const N(head) *t, const pg_attn_args *a, int64_t b, int64_t from, int64_t i,
                      int64_t lds, int64_t end) {
    int64_t seen = pg_min64(end, attention_seen(a, b, from + i));
    int64_t whole = (seen + LANES - 1) / LANES * LANES;
    REAL *p = t->p + i * lds, *ds = t->ds + i * lds, lse = t->lse[from + i], delta = t->delta[i];
    for (int64_t j = seen; j < whole; j++) p[j] = -INFINITY;
    if (a->dropout > 0) {
        float *u = t->u + i * lds;
        attention_units(u, t->stream, from + i, whole);
        N(slope_drop_row)(p, ds, u, whole, lse, delta, (REAL)a->scale, (float)a->dropout,
                          (REAL)(1 / (1 - a->dropout)));
    } else {
        N(slope_row)(p, ds, whole, lse, delta, (REAL)a->scale);
    }
    for (int64_t j = seen; j < end; j++) p[j] = ds[j] = 0;
}

/* Rows [i, i + m) of a block that begins at `from`: p, ds and dq. */
static void N(grad_strip)(const N(head) *t, const pg_attn_args *a, int64_t b, int64_t from,
                          int64_t i, int64_t m, int64_t lds, int add) {
    int64_t K = a->width, n = attention_seen(a, b, from + i + m - 1);
    int64_t end = (n + LANES - 1) / LANES * LANES;
    REAL *p = t->p + i * lds, *ds = t->ds + i * lds, scale[ROWS];
    for (int64_t r = 0; r < m; r++) scale[r] = (REAL)a->scale;
    N(panel_product)(p, lds, t->q_block + i * K, K, t->k_panels, m, n, K, scale);
    N(panel_product)(ds, lds, t->dout_block + i * K, K, t->v_panels, m, n, K, N(ones));
    for (int64_t r = i; r < i + m; r++) N(slopes)(t, a, b, from, r, lds, end);
    if (t->dq)
        N(product)(t->dq + (from + i) * a->q_stride, a->q_stride, ds, lds, 1, t->k, K, m, K, n,
                   N(ones), add);
}

/* Adds a block's share to keys [j, j + m) of dk and dv. */
static void N(grad_keys)(const N(head) *t, const pg_attn_args *a, int64_t from, int64_t rows,
                         int64_t j, int64_t m, int64_t lds) {
    int64_t K = a->width, first = a->causal ? j - (a->keys - a->rows) - from : 0;
    first = pg_max64(first, 0); /* the first row that sees key j */
    if (t->dv)
        N(product)(t->dv + j * K, K, t->p + first * lds + j, 1, lds, t->dout_block + first * K, K,
                   m, K, rows - first, N(ones), 1);
    if (t->dk)
        N(product)(t->dk + j * K, K, t->ds + first * lds + j, 1, lds, t->q_block + first * K, K, m,
                   K, rows - first, N(ones), 1);
}

/* Rows [from, from + rows); adds to dk and dv, writes or adds to dq. */
static void N(grad_block)(const N(head) *t, const pg_attn_args *a, int64_t b, int64_t from,
                          int64_t rows, int add) {
    int64_t K = a->width, n = attention_seen(a, b, from + rows - 1), lds = attention_align(n);
    int64_t ldo = a->heads * K;
    N(pack_rows)(t->q_block, t->q + from * a->q_stride, a->q_stride, rows, K);
    N(take_dout)(t->delta, t->dout_block, t->dout + from * ldo, t->out + from * ldo, ldo, rows, K);
#pragma omp parallel for schedule(dynamic) if (t->alone)
    for (int64_t i = 0; i < rows; i += ROWS)
        N(grad_strip)(t, a, b, from, i, pg_min64(ROWS, rows - i), lds, add);
#pragma omp parallel for schedule(dynamic, 4) if (t->alone)
    for (int64_t j = 0; j < n; j += ROWS)
        N(grad_keys)(t, a, from, rows, j, pg_min64(ROWS, n - j), lds);
}

PG_CLONES static void N(put_rows)(REAL *y, int64_t ldy, const REAL *x, int64_t n, int64_t width,
                                  int add) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < width; j++)
            y[i * ldy + j] = (add ? y[i * ldy + j] : 0) + x[i * width + j];
}

/* A thread's scratch, cut up; scratch_bytes says as much. */
static N(head) N(places)(const pg_attn_args *a, char *scratch) {
    int64_t keys = attention_align(a->keys), block = BLOCK * a->width;
    REAL *at = (REAL *)scratch;
    N(head) t = {.k_panels = at, .v_panels = at + keys * a->width, .k = at + 2 * keys * a->width};
    t.dk = t.k + keys * a->width, t.dv = t.dk + keys * a->width;
    t.q_block = t.dv + keys * a->width, t.dout_block = t.q_block + block;
    t.delta = t.dout_block + block, t.p = t.delta + BLOCK, t.ds = t.p + BLOCK * keys;
    t.u = (float *)(t.ds + BLOCK * keys);
    return t;
}

/* A unit is one key head of one sample: it sums dk and dv over its query heads and their blocks in
 * one order, so no two threads add to one number. */
static void N(attention_grad)(REAL *dq, REAL *dk, REAL *dv, const REAL *dout, const REAL *out,
                              const REAL *lse, const pg_attn_args *a, int add, char *scratch) {
    int64_t B = a->batch, T = a->rows, H = a->heads, G = a->kv_heads, K = a->width;
    int64_t bytes = scratch_bytes(a), group = H / G, stride = a->kv_stride;
    int many = B * H * T * a->keys >= CPU_MANY / 8, alone = many && B * G < omp_get_max_threads();
    const REAL *q = a->q, *k = a->k, *v = a->v;
#pragma omp parallel for schedule(dynamic) if (many && !alone)
    for (int64_t unit = 0; unit < B * G; unit++) {
        int64_t b = unit / G, g = unit % G, key = b * a->keys * stride + g * K;
        int64_t n = attention_seen(a, b, T - 1);
        N(head) t = N(places)(a, scratch + omp_get_thread_num() * bytes);
        t.alone = alone;
        N(pack_rows)(t.k, k + key, stride, n, K);
        N(pack_panels)(t.k_panels, t.k, K, n, K);
        N(pack_panels)(t.v_panels, v + key, stride, n, K);
        memset(t.dk, 0, (size_t)(a->keys * K) * sizeof *t.dk);
        memset(t.dv, 0, (size_t)(a->keys * K) * sizeof *t.dv);
        if (!dk) t.dk = NULL;
        if (!dv) t.dv = NULL;
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            int64_t query = b * T * a->q_stride + h * K, result = (b * T * H + h) * K;
            t.q = q + query, t.dq = dq ? dq + query : NULL;
            t.out = out + result, t.dout = dout + result, t.lse = lse + (b * H + h) * T;
            t.stream = attention_stream(a, b, h);
            for (int64_t from = 0; from < T; from += BLOCK)
                N(grad_block)(&t, a, b, from, pg_min64(BLOCK, T - from), add);
        }
        if (dk) N(put_rows)(dk + key, stride, t.dk, a->keys, K, add);
        if (dv) N(put_rows)(dv + key, stride, t.dv, a->keys, K, add);
    }
}
