/* attention.cu: our own attention: out = softmax(scale q k' + mask) v, where no library does it.
 *
 * A block of threads takes a tile of query rows of one head and walks over the keys that they see,
 * keeping a running maximum and sum of each row and rescaling its result when the maximum grows; so
 * the scores never leave registers.  Rows with many keys are begun first.
 * Grid: batch * heads * tiles of rows; block: 128 threads (bf16, f16) or 256.  Reads q once for
 * each tile of keys, and k and v once for each tile of rows, mostly from the L2 cache.
 * Source: Dao et al. 2022, algorithm 1; Milakov and Gimelshein 2018 for the running sum.
 * Products of tiles: attention_tile.cuh; gradients: attention_grad.cu. */
#include "attention_tile.cuh"

/* One tile of scores to probabilities (not yet divided by their sum), with m,
 * l and o kept in step. */
template <typename T, int N>
__device__ __forceinline__ void soften(real<T> (&s)[engine<T>::R][engine<T>::C],
                                       real<T> (&o)[engine<T>::R][N], real<T> (&m)[engine<T>::R],
                                       real<T> (&l)[engine<T>::R], real<T> scale,
                                       const attention_sight &sight, int row0, int key0) {
    typedef engine<T> E;
#pragma unroll
    for (int i = 0; i < E::R; i++) {
        int seen = sight.seen(row0 + E::row(i)) - key0;
        real<T> most = m[i], sum = 0;
#pragma unroll
        for (int j = 0; j < E::C; j++) {
            s[i][j] = E::col(j) < seen ? s[i][j] * scale : -INFINITY;
            most = larger(s[i][j], most);
        }
        most = lanes_max<E::LANES>(most);
        real<T> shrink = most == m[i] ? (real<T>)1 : exp_for<T>(m[i] - most);
#pragma unroll
        for (int j = 0; j < E::C; j++) {
            s[i][j] = E::col(j) < seen ? exp_for<T>(s[i][j] - most) : (real<T>)0;
            sum += s[i][j];
        }
        m[i] = most;
        l[i] = l[i] * shrink + sum;
#pragma unroll
        for (int n = 0; n < N; n++) o[i][n] *= shrink;
    }
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(engine<T>::THREADS, attention_blocks<T>(WIDTH))
    attention_kernel(T *out, real<T> *lse, const pg_attn_args a, int wide) {
    typedef engine<T> E;
    constexpr int N = WIDTH / E::LANES;
    __shared__ typename E::space shared;
    int64_t heads = a.batch * a.heads, unit = blockIdx.x % heads, b = unit / a.heads,
            h = unit % a.heads, g = h / (a.heads / a.kv_heads);
    attention_sight sight(a, b);
    int row0 = (int)(gridDim.x / heads - 1 - blockIdx.x / heads) * E::TILE, K = (int)a.width;
    int rows = (int)min((int64_t)E::TILE, a.rows - row0), keys = sight.seen(row0 + rows - 1);
    const T *k = (const T *)a.k + b * a.keys * a.kv_stride + g * K;
    const T *v = (const T *)a.v + b * a.keys * a.kv_stride + g * K;
    tile_of<T> q = {(const T *)a.q + (b * a.rows + row0) * a.q_stride + h * K, a.q_stride, rows,
                    wide};
    attention_drop drop(a, b, h);
    real<T> s[E::R][E::C], o[E::R][N] = {}, m[E::R], l[E::R] = {};
#pragma unroll
    for (int i = 0; i < E::R; i++) m[i] = -INFINITY;
    for (int key0 = 0; key0 < keys; key0 += E::TILE) {
        int here = min(E::TILE, keys - key0);
        E::dot(s, q, {k + key0 * a.kv_stride, a.kv_stride, here, wide}, K, &shared);
        soften<T, N>(s, o, m, l, (real<T>)a.scale, sight, row0, key0);
        if (a.dropout > 0) {
            uint32_t kept = drop.kept<E>(row0, key0, false);
#pragma unroll
            for (int i = 0; i < E::R * E::C; i++)
                s[i / E::C][i % E::C] *= kept >> i & 1 ? (real<T>)drop.scale : (real<T>)0;
        }
        E::add(o, s, {v + key0 * a.kv_stride, a.kv_stride, here, wide}, K, &shared);
    }
#pragma unroll
    for (int i = 0; i < E::R; i++) {
        real<T> sum = lanes_sum<E::LANES>(l[i]), inverse = sum > 0 || sum != sum ? 1 / sum : 0;
        if (E::row(i) >= rows) continue;
        int64_t row = row0 + E::row(i);
        T *to = out + ((b * a.rows + row) * a.heads + h) * K;
        if (E::col(0) == 0) lse[unit * a.rows + row] = m[i] + log(sum);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (E::col(n) < K) to[E::col(n)] = from_real<T>(o[i][n] * inverse);
    }
}

int64_t cuda_attention_plain_scratch(const pg_attn_args *a) {
    (void)a;
    return 0;
}

template <typename T, int WIDTH>
static int launch(void *out, void *lse, const pg_attn_args *a, pg_stream s) {
    int64_t tiles = (a->rows + engine<T>::TILE - 1) / engine<T>::TILE;
    attention_kernel<T, WIDTH>
        <<<cuda_blocks(a->batch * a->heads * tiles), engine<T>::THREADS, 0, (cudaStream_t)s>>>(
            (T *)out, (real<T> *)lse, *a, attention_wide<T>(a));
    return cuda_launched("attention");
}

int cuda_attention_plain(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s) {
    (void)scratch;
    if (a->batch * a->rows * a->heads == 0) return PG_OK;
    PG_TRY(attention_fits("attention", a));
    CUDA_FLOATING("attention", a->dtype,
                  ATTENTION_WIDTH(T, a->width, return (launch<T, WIDTH>(out, lse, a, s))))
    return PG_OK;
}
