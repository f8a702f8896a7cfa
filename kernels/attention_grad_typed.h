/* attention_grad_typed.h: the backward pass of one head; see typed_twice.h. */

typedef struct {                 /* one head's block of rows, and the places it works on */
    const REAL *q, *k, *v, *out, *dout, *lse;
    REAL *dq, *dk, *dv;
    REAL *p, *ds;                /* BLOCK * keys each */
    float *u;                    /* keys */
    uint64_t stream;
} N(head);

/* s[0..seen) = exp(s - lse), the rest 0; returns 1 / sum.  The sum is 1 but for the rounding of
 * lse, which for scores of size 1e5 is a percent: dividing by it makes it right again. */
PG_CLONES static REAL N(prob_row)(REAL *s, int64_t seen, int64_t n, REAL lse) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        REAL e = M(vexp)(s[j] - lse);
        s[j] = e;
        sum += e;
    }
    for (int64_t j = seen; j < n; j++) s[j] = 0;
    return seen > 0 ? 1 / sum : 0;
}

PG_CLONES static REAL N(dot)(const REAL *x, const REAL *y, int64_t n) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += x[j] * y[j];
    return sum;
}

/* dp becomes ds = p (dp - delta) scale, with p = e * inverse; e becomes p. */
PG_CLONES static void N(slope_row)(REAL *e, REAL *dp, int64_t n, REAL inverse, REAL delta,
                                   REAL scale) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        REAL p = e[j] * inverse;
        dp[j] = p * (dp[j] - delta) * scale;
        e[j] = p;
    }
}

/* The same under dropout: dp goes through the mask, and e becomes the masked p. */
PG_CLONES static void N(slope_drop_row)(REAL *e, REAL *dp, const float *u, int64_t n, REAL inverse,
                                        REAL delta, REAL scale, float drop, REAL factor) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        REAL p = e[j] * inverse, mask = u[j] >= drop ? factor : 0;
        dp[j] = p * (dp[j] * mask - delta) * scale;
        e[j] = p * mask;
    }
}

static void N(product)(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m, int64_t n, int64_t k,
                       double alpha, const REAL *x, int64_t ldx, const REAL *y, int64_t ldy,
                       double beta, REAL *z, int64_t ldz) {
    BLAS(gemm)(CblasRowMajor, ta, tb, (blasint)m, (blasint)n, (blasint)k, (REAL)alpha, x,
               (blasint)ldx, y, (blasint)ldy, (REAL)beta, z, (blasint)ldz);
}

/* Rows [from, from + rows); adds to dk and dv, writes or adds to dq. */
static void N(grad_block)(N(head) t, const pg_attn_args *a, int64_t b, int64_t from, int64_t rows,
                          int add) {
    int64_t K = a->width, ldo = a->heads * K, ldq = a->q_stride, ldk = a->kv_stride;
    int64_t n = attention_seen(a, b, from + rows - 1);
    t.q += from * ldq, t.out += from * ldo, t.dout += from * ldo;
    if (t.dq) t.dq += from * ldq;
    if (n == 0) {
        for (int64_t i = 0; i < rows && t.dq && !add; i++)
            memset(t.dq + i * ldq, 0, (size_t)K * sizeof *t.dq);
        return;
    }
    N(product)(CblasNoTrans, CblasTrans, rows, n, K, a->scale, t.q, ldq, t.k, ldk, 0, t.p, n);
    N(product)(CblasNoTrans, CblasTrans, rows, n, K, 1, t.dout, ldo, t.v, ldk, 0, t.ds, n);
    for (int64_t i = 0; i < rows; i++) {
        REAL *p = t.p + i * n, *ds = t.ds + i * n;
        int64_t seen = pg_min64(n, attention_seen(a, b, from + i));
        REAL inverse = N(prob_row)(p, seen, n, t.lse[from + i]);
        REAL delta = N(dot)(t.dout + i * ldo, t.out + i * ldo, K);
        if (a->dropout > 0) {
            attention_units(t.u, t.stream, from + i, seen);
            N(slope_drop_row)(p, ds, t.u, seen, inverse, delta, (REAL)a->scale, (float)a->dropout,
                              (REAL)(1 / (1 - a->dropout)));
        } else {
            N(slope_row)(p, ds, seen, inverse, delta, (REAL)a->scale);
        }
        memset(ds + seen, 0, (size_t)(n - seen) * sizeof *ds);
    }
    if (t.dv)
        N(product)(CblasTrans, CblasNoTrans, n, K, rows, 1, t.p, n, t.dout, ldo, 1, t.dv, ldk);
    if (t.dk)
        N(product)(CblasTrans, CblasNoTrans, n, K, rows, 1, t.ds, n, t.q, ldq, 1, t.dk, ldk);
    if (t.dq)
        N(product)(CblasNoTrans, CblasNoTrans, rows, K, n, 1, t.ds, n, t.k, ldk, add, t.dq, ldq);
}

static void N(clear)(REAL *x, int64_t rows, int64_t columns, int64_t stride) {
    for (int64_t i = 0; x && i < rows; i++) memset(x + i * stride, 0, (size_t)columns * sizeof *x);
}

/* A unit is one key head of one sample: it sums dk and dv over its query heads and their blocks in
 * one order, so no two threads add to one number. */
static void N(attention_grad)(REAL *dq, REAL *dk, REAL *dv, const REAL *dout, const REAL *out,
                              const REAL *lse, const pg_attn_args *a, int add, char *scratch) {
    int64_t B = a->batch, T = a->rows, H = a->heads, G = a->kv_heads, K = a->width;
    int64_t bytes = scratch_bytes(a), group = H / G;
    const REAL *q = a->q, *k = a->k, *v = a->v;
#pragma omp parallel for schedule(dynamic) if (B * G > 1 && B * H * T * a->keys >= CPU_MANY / 8)
    for (int64_t unit = 0; unit < B * G; unit++) {
        int64_t b = unit / G, g = unit % G, key = b * a->keys * a->kv_stride + g * K;
        N(head) t = {.k = k + key, .v = v + key, .dk = dk ? dk + key : NULL,
                     .dv = dv ? dv + key : NULL};
        t.u = (float *)(scratch + omp_get_thread_num() * bytes);
        t.p = (REAL *)(t.u + attention_align(a->dropout > 0 ? a->keys : 0));
        t.ds = t.p + attention_align(BLOCK * a->keys);
        if (!add) {
            N(clear)(t.dk, a->keys, K, a->kv_stride);
            N(clear)(t.dv, a->keys, K, a->kv_stride);
        }
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            int64_t query = b * T * a->q_stride + h * K, result = (b * T * H + h) * K;
            t.q = q + query, t.dq = dq ? dq + query : NULL;
            t.out = out + result, t.dout = dout + result, t.lse = lse + (b * H + h) * T;
            t.stream = attention_stream(a, b, h);
            for (int64_t from = 0; from < T; from += BLOCK)
                N(grad_block)(t, a, b, from, pg_min64(BLOCK, T - from), add);
        }
    }
}
