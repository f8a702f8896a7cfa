/* attention_typed.h: the forward pass of one head; see typed_twice.h. */
#include "attention_product_typed.h"

/* s[0..seen) = exp(s - max), the rest of the row 0; returns 1 / sum and the row's lse.  The row
 * goes on to a whole number of vectors: what lies there counts as unseen too. */
PG_CLONES static REAL N(exp_row)(REAL *s, int64_t seen, int64_t n, REAL *lse) {
    int64_t end = (seen + LANES - 1) / LANES * LANES;
    REAL m = -INFINITY, sum = 0;
    for (int64_t j = seen; j < end; j++) s[j] = -INFINITY;
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < end; j++) m = s[j] > m ? s[j] : m;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < end; j++) {
        REAL e = M(vexp_low)(s[j] - m);
        s[j] = e;
        sum += e;
    }
    for (int64_t j = end; j < n; j++) s[j] = 0;
    *lse = seen > 0 ? m + M(vlog)(sum) : -INFINITY;
    return seen > 0 ? 1 / sum : 0;
}

PG_CLONES static void N(drop_row)(REAL *s, const float *u, int64_t n, float p, REAL factor) {
    for (int64_t j = 0; j < n; j++) s[j] = u[j] >= p ? s[j] * factor : 0;
}

typedef struct { /* one head and the places a thread works on */
    REAL *out, *lse;
    REAL *s, *k, *v, *q; /* scores [ROWS,keys], keys in panels, values, query rows */
    float *u;            /* [keys] */
    uint64_t stream;
} N(attention_head);

/* Rows [from, from + rows) of one head, rows <= ROWS. */
static void N(attention_strip)(const N(attention_head) *t, const REAL *q, const pg_attn_args *a,
                               int64_t b, int64_t from, int64_t rows) {
    int64_t ldo = a->heads * a->width, n = attention_seen(a, b, from + rows - 1);
    int64_t lds = attention_align(n);
    REAL factor[ROWS];
    for (int64_t i = 0; i < rows; i++) factor[i] = (REAL)a->scale;
    N(panel_product)(t->s, lds, q, a->width, t->k, rows, n, a->width, factor);
    for (int64_t i = 0; i < rows; i++) {
        int64_t seen = pg_min64(n, attention_seen(a, b, from + i));
        REAL *s = t->s + i * lds;
        factor[i] = N(exp_row)(s, seen, n, t->lse + from + i);
        if (a->dropout > 0) {
            attention_units(t->u, t->stream, from + i, seen);
            N(drop_row)(s, t->u, seen, (float)a->dropout, (REAL)(1 / (1 - a->dropout)));
        }
    }
    N(product)(t->out + from * ldo, ldo, t->s, lds, 1, t->v, a->width, rows, a->width, n, factor,
               0);
}

/* A thread's scratch, cut up; scratch_bytes says as much. */
static N(attention_head) N(attention_places)(const pg_attn_args *a, char *scratch) {
    int64_t keys = attention_align(a->keys), K = a->width;
    N(attention_head) t = {.s = (REAL *)scratch};
    t.k = t.s + ROWS * keys, t.v = t.k + keys * K, t.q = t.v + keys * K;
    t.u = (float *)(t.q + CHUNK * K);
    return t;
}

/* A unit is CHUNK rows of one head of one sample; each packs the keys that it sees. */
static void N(attention)(REAL *out, REAL *lse, const pg_attn_args *a, char *scratch) {
    int64_t B = a->batch, T = a->rows, H = a->heads, K = a->width, bytes = scratch_bytes(a);
    int64_t chunks = (T + CHUNK - 1) / CHUNK, units = B * H * chunks;
    const REAL *q = a->q, *k = a->k, *v = a->v;
#pragma omp parallel for schedule(dynamic) if (units > 1 && B * H * T * a->keys >= CPU_MANY / 8)
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t head = unit / chunks, b = head / H, h = head % H, g = h / (H / a->kv_heads);
        int64_t key = b * a->keys * a->kv_stride + g * K;
        int64_t from = unit % chunks * CHUNK, rows = pg_min64(T - from, CHUNK);
        int64_t seen = attention_seen(a, b, from + rows - 1);
        N(attention_head) t = N(attention_places)(a, scratch + omp_get_thread_num() * bytes);
        t.out = out + (b * T * H + h) * K, t.lse = lse + head * T;
        t.stream = attention_stream(a, b, h);
        N(pack_rows)(t.q, q + (b * T + from) * a->q_stride + h * K, a->q_stride, rows, K);
        N(pack_rows)(t.v, k + key, a->kv_stride, seen, K);
        N(pack_panels)(t.k, t.v, K, seen, K);
        N(pack_rows)(t.v, v + key, a->kv_stride, seen, K);
        for (int64_t i = 0; i < rows; i += ROWS)
            N(attention_strip)(&t, t.q + i * K, a, b, from + i, pg_min64(ROWS, rows - i));
    }
}
