/* attention_tile.cuh: products of tiles, for attention.cu and attention_grad.cu.
 *
 * A block of threads holds one tile of scores s [TILE,TILE] and one or two tiles of results o
 * [TILE,WIDTH] in registers; a thread has R rows of each, C of the columns of s and N = WIDTH /
 * LANES of those of o.  Two products are all that attention needs, forward and back:
 *     dot:  s  = x y'    x, y [TILE,K] in device memory
 *     add:  o += s y     y [TILE,K] in device memory, s in registers
 * Both bring their operands through shared memory in pieces, so that no width needs more of it.
 * engine<T> does them with multiply-adds for f32 and f64, and on the tensor cores (mma.sync, sm_80)
 * for bf16 and f16, where s is rounded to T before it is an operand, as
 * other implementations do. */
#ifndef PG_ATTENTION_TILE_CUH
#define PG_ATTENTION_TILE_CUH
#include "philox.h"
#include "rows.cuh"

/* Rows [0,rows) of K numbers, `stride` elements apart; what lies outside reads as 0.
 * wide: every row starts on 16 bytes, and K is a multiple of as many. */
template <typename T> struct tile_of {
    const T *at;
    int64_t stride;
    int rows, wide;
};

template <typename T>
__device__ __forceinline__ T tile_number(tile_of<T> x, int row, int col, int K) {
    return row < x.rows && col < K ? x.at[row * x.stride + col] : from_real<T>(0);
}

/* ---- f32 and f64: 16 x 16 threads of R x R scores, operands of 16 bytes ---- */
template <typename T> struct engine {
    static constexpr int THREADS = 256, LANES = 16; /* neighbours that share their rows */
    static constexpr int R = 16 / sizeof(T), C = R, TILE = 16 * R, DEPTH = 32;
    static constexpr int LINE = TILE + R; /* padded, and still of whole operands */
    struct space {
        alignas(16) T piece[2 * DEPTH > TILE ? 2 * DEPTH : TILE][LINE]; /* x and y, or rows of y */
        alignas(16) T s[TILE][LINE];                                    /* transposed */
    };
    static __device__ __forceinline__ int row(int i) { return threadIdx.x / 16 * R + i; }
    static __device__ __forceinline__ int col(int j) {
        return j / R * TILE + threadIdx.x % 16 * R + j % R;
    }
    static __device__ __forceinline__ void bring(T (*to)[LINE], tile_of<T> x, int from, int K) {
#pragma unroll
        for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
            int e = threadIdx.x + i * THREADS;
            to[e % DEPTH][e / DEPTH] = tile_number(x, e / DEPTH, from + e % DEPTH, K);
        }
    }
    static __device__ __forceinline__ void dot(T (&s)[R][C], tile_of<T> x, tile_of<T> y, int K,
                                               space *shared) {
#pragma unroll
        for (int i = 0; i < R * C; i++) s[i / C][i % C] = 0;
        T(*left)[LINE] = shared->piece, (*right)[LINE] = shared->piece + DEPTH;
        for (int from = 0; from < K; from += DEPTH) {
            __syncthreads();
            bring(left, x, from, K);
            bring(right, y, from, K);
            __syncthreads();
#pragma unroll 8
            for (int k = 0; k < DEPTH; k++) {
                pack<T, R> a = load_pack<R>(&left[k][row(0)]);
                pack<T, R> b = load_pack<R>(&right[k][col(0)]);
#pragma unroll
                for (int i = 0; i < R * C; i++) s[i / C][i % C] += a.at[i / C] * b.at[i % C];
            }
        }
    }
    template <int N>
    static __device__ __forceinline__ void add(T (&o)[R][N], const T (&s)[R][C], tile_of<T> y,
                                               int K, space *shared) {
        T(*piece)[LINE] = shared->piece;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < C; j++) {
            pack<T, R> column;
#pragma unroll
            for (int i = 0; i < R; i++) column.at[i] = s[i][j];
            store_pack<R>(&shared->s[col(j)][row(0)], column);
        }
#pragma unroll
        for (int part = 0; part < N / R; part++) {
            if (part * TILE >= K) break;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < TILE * TILE / THREADS; i++) {
                int e = threadIdx.x + i * THREADS;
                piece[e / TILE][e % TILE] = tile_number(y, e / TILE, part * TILE + e % TILE, K);
            }
            __syncthreads();
#pragma unroll 8
            for (int k = 0; k < TILE; k++) {
                pack<T, R> a = load_pack<R>(&shared->s[k][row(0)]);
                pack<T, R> b = load_pack<R>(&piece[k][col(0)]);
#pragma unroll
                for (int i = 0; i < R * R; i++)
                    o[i / R][part * R + i % R] += a.at[i / R] * b.at[i % R];
            }
        }
    }
};

/* ---- bf16 and f16: four warps of 16 rows, mma.m16n8k16 ---- */
template <typename T> __device__ __forceinline__ uint32_t two_halves(float low, float high) {
    T pair[2] = {from_real<T>(low), from_real<T>(high)};
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return bits;
}
__device__ __forceinline__ void mma(bf16, float &c0, float &c1, float &c2, float &c3,
                                    const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(f16, float &c0, float &c1, float &c2, float &c3,
                                    const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* Four 8 x 8 matrices, their rows named by the lanes; transposed ones in the second form. */
__device__ __forceinline__ void matrices(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ __forceinline__ void matrices_turned(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* The accumulator's layout (PTX ISA, m16n8k16): lane l has rows l/4 and l/4 + 8 of its warp's 16,
 * and of each 8 columns number 2 (l%4) and the next; so two of them are one operand of `add`. */
template <typename T> struct half_engine {
    static constexpr int THREADS = 128, LANES = 4, R = 2, C = 16, TILE = 64;
    static constexpr int LINE = TILE + 8; /* 16 bytes of padding: ldmatrix without conflicts */
    struct space {
        alignas(16) T x[TILE][LINE];
        alignas(16) T y[TILE][LINE];
    };
    static __device__ __forceinline__ int row(int i) {
        return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
    }
    static __device__ __forceinline__ int col(int j) {
        return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
    }
    /* TILE columns of x, from `from` on */
    static __device__ __forceinline__ void bring(T (*to)[LINE], tile_of<T> x, int from, int K) {
        if (x.wide) {
#pragma unroll
            for (int i = 0; i < TILE * TILE / 8 / THREADS; i++) {
                int e = threadIdx.x + i * THREADS, line = e / 8, at = e % 8 * 8;
                pack<T, 8> p = {};
                if (line < x.rows && from + at < K)
                    p = load_pack<8>(x.at + line * x.stride + from + at);
                store_pack<8>(&to[line][at], p);
            }
        } else {
            for (int e = threadIdx.x; e < TILE * TILE; e += THREADS)
                to[e / TILE][e % TILE] = tile_number(x, e / TILE, from + e % TILE, K);
        }
    }
    static __device__ __forceinline__ void dot(float (&s)[R][C], tile_of<T> x, tile_of<T> y, int K,
                                               space *shared) {
        int lane = threadIdx.x % 32;
        const T *a_row = &shared->x[threadIdx.x / 32 * 16 + lane % 16][lane / 16 * 8];
        const T *b_row = &shared->y[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8];
#pragma unroll
        for (int i = 0; i < R * C; i++) s[i / C][i % C] = 0;
        for (int from = 0; from < K; from += TILE) {
            __syncthreads();
            bring(shared->x, x, from, K);
            bring(shared->y, y, from, K);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < TILE; k += 16) {
                if (from + k >= K) break;
                uint32_t a[4], b[4];
                matrices(a, a_row + k);
#pragma unroll
                for (int j = 0; j < C; j += 4) { /* 16 rows of y: 4 numbers of each row of s */
                    matrices(b, b_row + 4 * j * LINE + k);
                    mma(T(), s[0][j], s[0][j + 1], s[1][j], s[1][j + 1], a, b[0], b[1]);
                    mma(T(), s[0][j + 2], s[0][j + 3], s[1][j + 2], s[1][j + 3], a, b[2], b[3]);
                }
            }
        }
    }
    template <int N>
    static __device__ __forceinline__ void add(float (&o)[R][N], const float (&s)[R][C],
                                               tile_of<T> y, int K, space *shared) {
        int lane = threadIdx.x % 32;
        const T *b_row = &shared->y[lane % 16][lane / 16 * 8];
#pragma unroll
        for (int part = 0; part < N / C; part++) {
            if (part * TILE >= K) break;
            __syncthreads();
            bring(shared->y, y, part * TILE, K);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < TILE; k += 16) {
                int at = k / 4;
                uint32_t b[4], a[4] = {two_halves<T>(s[0][at], s[0][at + 1]),
                                       two_halves<T>(s[1][at], s[1][at + 1]),
                                       two_halves<T>(s[0][at + 2], s[0][at + 3]),
                                       two_halves<T>(s[1][at + 2], s[1][at + 3])};
#pragma unroll
                for (int j = 0; j < C; j += 4) {
                    int n = part * C + j;
                    matrices_turned(b, b_row + k * LINE + 4 * j);
                    mma(T(), o[0][n], o[0][n + 1], o[1][n], o[1][n + 1], a, b[0], b[1]);
                    mma(T(), o[0][n + 2], o[0][n + 3], o[1][n + 2], o[1][n + 3], a, b[2], b[3]);
                }
            }
        }
    }
};
template <> struct engine<bf16> : half_engine<bf16> {};
template <> struct engine<f16> : half_engine<f16> {};

/* ---- what the kernels share besides ---- */
/* Blocks that a multiprocessor should hold, by the columns in registers: more hide more latency,
 * fewer have more registers before they spill. */
template <typename T> constexpr int attention_blocks(int width) {
    return sizeof(T) > 2 ? width <= 128 ? 2 : 1 : width <= 64 ? 4 : width <= 128 ? 3 : 2;
}
/* Over the threads that share their rows. */
template <int LANES, typename A> __device__ __forceinline__ A lanes_sum(A v) {
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) v += __shfl_xor_sync(0xffffffffu, v, apart);
    return v;
}
template <int LANES, typename A> __device__ __forceinline__ A lanes_max(A v) {
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2)
        v = larger(v, __shfl_xor_sync(0xffffffffu, v, apart));
    return v;
}

/* How many keys, from the first on, the rows of a sample see; as attention_seen of attention.h. */
struct attention_sight {
    int keys, ahead; /* row t sees keys below t + ahead, and below `keys` */
    __device__ __forceinline__ attention_sight(const pg_attn_args &a, int64_t b) {
        int64_t most = a.lengths ? (int64_t)a.lengths[b] : a.keys;
        keys = (int)max((int64_t)0, min(most, a.keys));
        ahead = (int)(a.causal ? a.keys - a.rows + 1 : a.keys);
    }
    __device__ __forceinline__ int seen(int row) const { return max(0, min(keys, row + ahead)); }
};

/* The dropout of probabilities, by (sample, head, row, column): what the CPU's draws. */
struct attention_drop {
    uint64_t stream;
    float least;  /* kept where the uniform number is at least this */
    double scale; /* 1 / (1 - p) */
    __device__ __forceinline__ attention_drop(const pg_attn_args &a, int64_t b, int64_t h) {
        uint64_t seed = a.step ? (uint64_t)a.step[PG_STEP_RANDOM] : 0;
        uint64_t head = (uint64_t)((a.sample0 + b) * a.heads_all + a.head0 + h);
        stream = pg_philox_stream(pg_philox_stream(seed, a.key), head);
        least = (float)a.dropout;
        scale = 1 / (1 - a.dropout);
    }
    /* Bit i * C + j: score (i,j) of the thread stays.  turned: keys are the rows of the tile.  A
     * loop that stays one: ten rounds of Philox for each score are much code. */
    template <typename E>
    __device__ __forceinline__ uint32_t kept(int row0, int key0, bool turned) const {
        if (!(least > 0)) return ~0u;
        uint32_t bits = 0;
#pragma unroll 1
        for (int i = 0; i < E::R * E::C; i++) {
            int row = E::row(i / E::C), col = E::col(i % E::C);
            uint64_t at = (uint64_t)(row0 + (turned ? col : row)) << 32;
            float u = pg_philox_uniform(stream, (int64_t)at + key0 + (turned ? row : col));
            bits |= (uint32_t)(u >= least) << i;
        }
        return bits;
    }
};

/* 1 where a kernel may take 16 bytes of every row at once. */
template <typename T>
static inline int attention_wide(const pg_attn_args *a, const void *dout = NULL) {
    int64_t many = 16 / (int64_t)sizeof(T);
    return cuda_aligned(a->q, a->k, a->v, dout) && a->width % many == 0 &&
           a->q_stride % many == 0 && a->kv_stride % many == 0;
}

/* Blocks are counted in 32 bits, rows too. */
static inline int attention_fits(const char *op, const pg_attn_args *a) {
    int64_t most = (int64_t)1 << 31, tiles = pg_max64(a->rows, a->keys) / 32 + 1;
    if (a->width <= 256 && a->keys < most && a->rows < most && a->batch * a->heads < most / tiles)
        return PG_OK;
    return pg_fail(
        PG_ESHAPE,
        "%s: batch %lld, %lld heads of %lld columns, %lld rows, %lld keys; a head has at "
        "most 256 columns, and batch * heads * rows / 32 must stay below 2^31",
        op, (long long)a->batch, (long long)a->heads, (long long)a->width, (long long)a->rows,
        (long long)a->keys);
}

/* The statement for WIDTH, the columns of a result's registers: the least that holds `width`.  f32
 * and f64, which are for tests, have fewer of them: every one is a kernel to compile. */
#define ATTENTION_WIDTH(T, width, ...)                                                             \
    if ((width) <= 64) {                                                                           \
        constexpr int WIDTH = sizeof(T) == 2 ? 64 : sizeof(T) == 4 ? 128 : 256;                    \
        __VA_ARGS__;                                                                               \
    } else if ((width) <= 128) {                                                                   \
        constexpr int WIDTH = sizeof(T) <= 4 ? 128 : 256;                                          \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        constexpr int WIDTH = 256;                                                                 \
        __VA_ARGS__;                                                                               \
    }
#endif
