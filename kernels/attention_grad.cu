/* attention_grad.cu: gradients of our own attention, the same bits in every run.
 *
 * Formulas: attention_grad.c.  Two passes, so that no two blocks add to one number.  The first has
 * a tile of query rows, walks over the keys and gives dq; the second has a tile of keys of one key
 * head, walks over the heads of its group and their query rows in order and gives dk and dv.  Both
 * work the scores out again from lse.  The first also leaves two numbers of each row for the
 * second: delta, and the inverse of the row's sum, which is 1 but for the rounding of lse.
 * Grid: batch * heads * tiles of rows, then batch * kv_heads * tiles of keys; block: 128 threads
 * (bf16, f16) or 256.  Seven products of tiles where five would do with atomics.
 * Products of tiles: attention_tile.cuh; forward: attention.cu. */
#include "attention_tile.cuh"

template <typename T> struct grad_args {
    pg_attn_args a;
    const T *dout, *out;
    const real<T> *lse;
    T *dq, *dk, *dv;
    real<T> *delta, *inverse; /* [batch,heads,rows] */
    int add, wide;
};

template <typename T> __device__ __forceinline__ void put(T *to, real<T> value, int add) {
    *to = from_real<T>(add ? to_real(*to) + value : value);
}

/* ---- first pass: dq ---- */
/* s becomes ds = e (dp mask - delta), still without scale and inverse; sum grows by the e. */
template <typename T>
__device__ __forceinline__ void
slopes_of_rows(real<T> (&s)[engine<T>::R][engine<T>::C],
               const real<T> (&dp)[engine<T>::R][engine<T>::C], const real<T> (&lse)[engine<T>::R],
               const real<T> (&delta)[engine<T>::R], real<T> (&sum)[engine<T>::R], real<T> scale,
               const attention_sight &sight, const attention_drop &drop, int row0, int key0) {
    typedef engine<T> E;
    uint32_t kept = drop.kept<E>(row0, key0, false);
#pragma unroll
    for (int i = 0; i < E::R; i++) {
        int seen = sight.seen(row0 + E::row(i)) - key0;
#pragma unroll
        for (int j = 0; j < E::C; j++) {
            real<T> mask = kept >> (i * E::C + j) & 1 ? (real<T>)drop.scale : (real<T>)0;
            real<T> e = E::col(j) < seen ? exp_for<T>(s[i][j] * scale - lse[i]) : (real<T>)0;
            sum[i] += e;
            s[i][j] = e * (dp[i][j] * mask - delta[i]);
        }
    }
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(engine<T>::THREADS, attention_blocks<T>(WIDTH) / 2 + 1)
    attention_dq_kernel(const grad_args<T> t) {
    typedef engine<T> E;
    constexpr int N = WIDTH / E::LANES;
    __shared__ typename E::space shared;
    const pg_attn_args &a = t.a;
    int64_t heads = a.batch * a.heads, unit = blockIdx.x % heads, b = unit / a.heads,
            h = unit % a.heads, g = h / (a.heads / a.kv_heads);
    attention_sight sight(a, b);
    int row0 = (int)(gridDim.x / heads - 1 - blockIdx.x / heads) * E::TILE, K = (int)a.width;
    int rows = (int)min((int64_t)E::TILE, a.rows - row0), keys = sight.seen(row0 + rows - 1);
    int64_t result = ((b * a.rows + row0) * a.heads + h) * K, ldo = a.heads * K;
    int64_t query = (b * a.rows + row0) * a.q_stride + h * K;
    const T *k = (const T *)a.k + b * a.keys * a.kv_stride + g * K;
    const T *v = (const T *)a.v + b * a.keys * a.kv_stride + g * K;
    tile_of<T> q = {(const T *)a.q + query, a.q_stride, rows, t.wide};
    tile_of<T> dout = {t.dout + result, ldo, rows, t.wide};
    attention_drop drop(a, b, h);
    real<T> s[E::R][E::C], dp[E::R][E::C], dq[E::R][N] = {};
    real<T> delta[E::R], lse[E::R], sum[E::R] = {};
#pragma unroll
    for (int i = 0; i < E::R; i++) {
        int row = E::row(i);
        delta[i] = 0;
        lse[i] = row < rows ? t.lse[unit * a.rows + row0 + row] : (real<T>)0;
        if (row < rows) /* LANES threads share the row */
            for (int n = threadIdx.x % E::LANES; n < K; n += E::LANES)
                delta[i] += to_real(dout.at[row * ldo + n]) *
                            to_real(t.out[result + row * ldo + n]);
        delta[i] = lanes_sum<E::LANES>(delta[i]);
    }
    for (int key0 = 0; key0 < keys; key0 += E::TILE) {
        int here = min(E::TILE, keys - key0);
        tile_of<T> keys_here = {k + key0 * a.kv_stride, a.kv_stride, here, t.wide};
        E::dot(s, q, keys_here, K, &shared);
        E::dot(dp, dout, {v + key0 * a.kv_stride, a.kv_stride, here, t.wide}, K, &shared);
        slopes_of_rows<T>(s, dp, lse, delta, sum, (real<T>)a.scale, sight, drop, row0, key0);
        E::add(dq, s, keys_here, K, &shared);
    }
#pragma unroll
    for (int i = 0; i < E::R; i++) {
        real<T> all = lanes_sum<E::LANES>(sum[i]), inverse = all > 0 || all != all ? 1 / all : 0;
        int row = E::row(i);
        if (row >= rows) continue;
        if (E::col(0) == 0) {
            t.delta[unit * a.rows + row0 + row] = delta[i];
            t.inverse[unit * a.rows + row0 + row] = inverse;
        }
        if (!t.dq) continue;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (E::col(n) < K)
                put(t.dq + query + row * a.q_stride + E::col(n),
                    dq[i][n] * inverse * (real<T>)a.scale, t.add);
    }
}

/* ---- second pass: dk, dv ---- */
/* Of keys (rows of s) against queries (its columns): s becomes the masked probability, dp the ds
 * without scale.  Rows from `rows` on, outside the tensor, give 0. */
template <typename T>
__device__ __forceinline__ void
slopes_of_keys(real<T> (&s)[engine<T>::R][engine<T>::C], real<T> (&dp)[engine<T>::R][engine<T>::C],
               const grad_args<T> &t, const attention_sight &sight, const attention_drop &drop,
               int64_t unit, int key0, int row0) {
    typedef engine<T> E;
    uint32_t kept = drop.kept<E>(row0, key0, true);
#pragma unroll
    for (int j = 0; j < E::C; j++) {
        int row = row0 + E::col(j);
        bool there = row < t.a.rows;
        int64_t at = unit * t.a.rows + row;
        int seen = there ? sight.seen(row) - key0 : 0;
        real<T> lse = there ? t.lse[at] : 0, delta = there ? t.delta[at] : 0;
        real<T> inverse = there ? t.inverse[at] : 0;
#pragma unroll
        for (int i = 0; i < E::R; i++) {
            real<T> p = 0, mask = kept >> (i * E::C + j) & 1 ? (real<T>)drop.scale : (real<T>)0;
            if (E::row(i) < seen) p = exp_for<T>(s[i][j] * (real<T>)t.a.scale - lse) * inverse;
            s[i][j] = p * mask;
            dp[i][j] = p * (dp[i][j] * mask - delta);
        }
    }
}

/* DK, DV: which of the two this launch gives; at 256 columns only one fits the registers. */
template <typename T, int WIDTH, bool DK, bool DV>
__global__ void __launch_bounds__(engine<T>::THREADS) attention_dkv_kernel(const grad_args<T> t) {
    typedef engine<T> E;
    constexpr int N = WIDTH / E::LANES;
    __shared__ typename E::space shared;
    const pg_attn_args &a = t.a;
    int64_t units = a.batch * a.kv_heads, b = blockIdx.x % units / a.kv_heads,
            g = blockIdx.x % units % a.kv_heads, group = a.heads / a.kv_heads,
            ldo = a.heads * a.width;
    int key0 = (int)(blockIdx.x / units) * E::TILE, K = (int)a.width;
    int keys = (int)min((int64_t)E::TILE, a.keys - key0);
    int64_t key = (b * a.keys + key0) * a.kv_stride + g * K;
    tile_of<T> k = {(const T *)a.k + key, a.kv_stride, keys, t.wide};
    tile_of<T> v = {(const T *)a.v + key, a.kv_stride, keys, t.wide};
    /* rows above see none of these keys; a sample shorter than key0 has no such row */
    int first = a.causal ? (int)max((int64_t)0, key0 - (a.keys - a.rows)) / E::TILE * E::TILE : 0;
    attention_sight sight(a, b);
    if (key0 >= sight.seen((int)a.rows - 1)) first = (int)a.rows;
    real<T> s[E::R][E::C], dp[E::R][E::C], dk[E::R][DK ? N : 1] = {}, dv[E::R][DV ? N : 1] = {};
    for (int64_t h = g * group; h < (g + 1) * group; h++) {
        int64_t unit = b * a.heads + h;
        attention_drop drop(a, b, h);
        for (int row0 = first; row0 < a.rows; row0 += E::TILE) {
            int rows = (int)min((int64_t)E::TILE, a.rows - row0);
            int64_t row = b * a.rows + row0;
            tile_of<T> q = {(const T *)a.q + row * a.q_stride + h * K, a.q_stride, rows, t.wide};
            tile_of<T> dout = {t.dout + row * ldo + h * K, ldo, rows, t.wide};
            E::dot(s, k, q, K, &shared);
            E::dot(dp, v, dout, K, &shared);
            slopes_of_keys<T>(s, dp, t, sight, drop, unit, key0, row0);
            if constexpr (DV) E::add(dv, s, dout, K, &shared);
            if constexpr (DK) E::add(dk, dp, q, K, &shared);
        }
    }
#pragma unroll
    for (int i = 0; i < E::R; i++) {
        if (E::row(i) >= keys) continue;
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (E::col(n) >= K) continue;
            int64_t at = key + E::row(i) * a.kv_stride + E::col(n);
            if (DK && t.dk) put(t.dk + at, dk[i][DK ? n : 0] * (real<T>)a.scale, t.add);
            if (DV && t.dv) put(t.dv + at, dv[i][DV ? n : 0], t.add);
        }
    }
}

/* ---- launching ---- */
int64_t cuda_attention_plain_grad_scratch(const pg_attn_args *a) {
    return 2 * a->batch * a->heads * a->rows * (a->dtype == PG_F64 ? 8 : 4);
}

template <typename T, int WIDTH> static int launch(const grad_args<T> &t, pg_stream stream) {
    const pg_attn_args &a = t.a;
    cudaStream_t s = (cudaStream_t)stream;
    constexpr int TILE = engine<T>::TILE, THREADS = engine<T>::THREADS;
    unsigned rows = cuda_blocks(a.batch * a.heads * ((a.rows + TILE - 1) / TILE));
    unsigned keys = cuda_blocks(a.batch * a.kv_heads * ((a.keys + TILE - 1) / TILE));
    if (rows) attention_dq_kernel<T, WIDTH><<<rows, THREADS, 0, s>>>(t);
    if constexpr (WIDTH <= 128) {
        if (keys && (t.dk || t.dv))
            attention_dkv_kernel<T, WIDTH, true, true><<<keys, THREADS, 0, s>>>(t);
    } else {
        if (keys && t.dk) attention_dkv_kernel<T, WIDTH, true, false><<<keys, THREADS, 0, s>>>(t);
        if (keys && t.dv) attention_dkv_kernel<T, WIDTH, false, true><<<keys, THREADS, 0, s>>>(t);
    }
    return cuda_launched("attention_grad");
}

int cuda_attention_plain_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                              const void *lse, const pg_attn_args *a, int add, void *scratch,
                              pg_stream s) {
    PG_TRY(attention_fits("attention_grad", a));
    if (a->batch * a->heads == 0) return PG_OK;
    CUDA_FLOATING("attention_grad", a->dtype, real<T> *delta = (real<T> *)scratch;
                  grad_args<T> t = {*a, (const T *)dout, (const T *)out, (const real<T> *)lse,
                                    (T *)dq, (T *)dk, (T *)dv, delta,
                                    delta + a->batch * a->heads * a->rows, add,
                                    attention_wide<T>(a, dout)};
                  ATTENTION_WIDTH(T, a->width, return (launch<T, WIDTH>(t, s))))
    return PG_OK;
}
