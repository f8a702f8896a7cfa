/* attention_typed.h: the forward pass of one head; see typed_twice.h. */

/* s[0..seen) = exp(s - max), the rest of the row 0; returns 1 / sum and the row's lse. */
PG_CLONES static REAL N(exp_row)(REAL *s, int64_t seen, int64_t n, REAL *lse) {
    REAL m = -INFINITY, sum = 0;
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < seen; j++) m = s[j] > m ? s[j] : m;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        REAL e = M(vexp)(s[j] - m);
        s[j] = e;
        sum += e;
    }
    for (int64_t j = seen; j < n; j++) s[j] = 0;
    *lse = seen > 0 ? (REAL)((double)m + log((double)sum)) : -INFINITY;
    return seen > 0 ? 1 / sum : 0;
}

PG_CLONES static void N(drop_row)(REAL *s, const float *u, int64_t n, float p, REAL factor) {
    for (int64_t j = 0; j < n; j++) s[j] = u[j] >= p ? s[j] * factor : 0;
}

PG_CLONES static void N(scale_row)(REAL *x, int64_t n, REAL factor) {
    for (int64_t j = 0; j < n; j++) x[j] *= factor;
}

/* Rows [from, from + rows) of one head.  s: BLOCK * keys scores. */
static void N(attention_block)(REAL *out, REAL *lse, const REAL *q, const REAL *k, const REAL *v,
                               const pg_attn_args *a, int64_t b, int64_t from, int64_t rows,
                               uint64_t stream, REAL *s, float *u) {
    int64_t ldo = a->heads * a->width, n = attention_seen(a, b, from + rows - 1);
    if (n == 0) {
        for (int64_t i = 0; i < rows; i++) {
            memset(out + i * ldo, 0, (size_t)a->width * sizeof *out);
            lse[i] = -INFINITY;
        }
        return;
    }
    REAL inverse[BLOCK];
    BLAS(gemm)(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)rows, (blasint)n,
               (blasint)a->width, (REAL)a->scale, q, (blasint)a->q_stride, k, (blasint)a->kv_stride,
               0, s, (blasint)n);
    for (int64_t i = 0; i < rows; i++) {
        int64_t seen = pg_min64(n, attention_seen(a, b, from + i));
        inverse[i] = N(exp_row)(s + i * n, seen, n, lse + i);
        if (a->dropout > 0) {
            attention_units(u, stream, from + i, seen);
            N(drop_row)(s + i * n, u, seen, (float)a->dropout, (REAL)(1 / (1 - a->dropout)));
        }
    }
    BLAS(gemm)(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)rows, (blasint)a->width,
               (blasint)n, 1, s, (blasint)n, v, (blasint)a->kv_stride, 0, out, (blasint)ldo);
    for (int64_t i = 0; i < rows; i++) N(scale_row)(out + i * ldo, a->width, inverse[i]);
}

static void N(attention)(REAL *out, REAL *lse, const pg_attn_args *a, char *scratch) {
    int64_t B = a->batch, T = a->rows, H = a->heads, K = a->width, bytes = scratch_bytes(a);
    const REAL *q = a->q, *k = a->k, *v = a->v;
#pragma omp parallel for schedule(dynamic) if (B * H > 1 && B * H * T * a->keys >= CPU_MANY / 8)
    for (int64_t unit = 0; unit < B * H; unit++) {
        int64_t b = unit / H, h = unit % H, g = h / (H / a->kv_heads);
        float *u = (float *)(scratch + omp_get_thread_num() * bytes);
        REAL *s = (REAL *)(u + attention_align(a->dropout > 0 ? a->keys : 0));
        uint64_t stream = attention_stream(a, b, h);
        int64_t key = b * a->keys * a->kv_stride + g * K;
        for (int64_t from = 0; from < T; from += BLOCK)
            N(attention_block)(out + ((b * T + from) * H + h) * K, lse + unit * T + from,
                               q + (b * T + from) * a->q_stride + h * K, k + key, v + key, a, b,
                               from, pg_min64(BLOCK, T - from), stream, s, u);
    }
}
