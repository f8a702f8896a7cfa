/* norm_grad.cu: the gradients of rmsnorm and layernorm (norm.cu).
 *
 *   dx = base + rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * w; dw += dy * xhat, db += dy
 *
 * A fixed number of blocks share out the rows and each sums its own dw and db in registers into its
 * line of scratch; a second launch adds the lines in order.
 * Rows of whole 16-byte packs go through a ring in shared memory: a thread copies its packs of the
 * rows to come there (cp.async, sm_80 and later), STAGES rows ahead, so that reading never stops
 * for the sums over a row.  It reads only what it has copied itself, so the block waits for nothing
 * but those sums.  Other rows, and very long ones, are read as they come.
 * Bytes moved, for n x d numbers of bf16: 6 n d (dy, x, dx), 8 n d with a base or where dx is added
 * to; and the lines of scratch, PARTS * d * 4 written and read, which mostly
 * stays in the L2 cache. */
#include "common.cuh"

#include <cuda_pipeline.h>

#define PARTS      528   /* blocks at most: four for each of 132 multiprocessors, on any card */
#define LONG_PARTS 264   /* of rows of more than LONG bytes */
#define LONG       4096
#define STAGES     4     /* rows of a ring */
#define RING       98304 /* its bytes, at most: two of them fit a multiprocessor of sm_90 */
#define MOST       512   /* threads of a block with a ring */

template <typename T> struct norm_grad {
    T *dx; /* NULL: not wanted */
    const T *dy, *x, *w, *base; /* w NULL: ones; base NULL: nothing is added (it may be dx) */
    const real<T> *mean, *rstd; /* mean NULL: rmsnorm */
    real<T> *dws, *dbs;         /* [parts,d] of scratch; NULL: not wanted */
    int64_t n, d;
};

/* ---- rows through a ring ---- */

/* The threads' sums a and b, over the block of one row; turn: 0 and 1 by turns, so that one barrier
 * keeps those who read a result apart from those who write the next but one. */
template <typename R>
__device__ __forceinline__ void block_sums(R &a, R &b, R (&space)[2][2][32], int turn) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    a = warp_sum(a), b = warp_sum(b);
    if (warps == 1) return;
    if (lane == 0) space[turn][0][threadIdx.x / 32] = a, space[turn][1][threadIdx.x / 32] = b;
    __syncthreads();
    a = warp_sum(lane < warps ? space[turn][0][lane] : (R)0);
    b = warp_sum(lane < warps ? space[turn][1][lane] : (R)0);
}

/* Mean and rstd of a row, for each warp of the block. */
template <typename T> struct row_stats {
    real<T> mean[MOST / 32], rstd[MOST / 32];
};

/* The rows this thread asks for, one after the other: its packs of x, dy and base, and lane 0 of a
 * warp the row's statistics for the warp. */
template <typename T, int W, int keep> struct asking {
    const T *x, *dy, *base; /* of the next row, at this thread's first pack; base NULL: none */
    const real<T> *mean, *rstd;
    int64_t row, step; /* its number, and from one row to the next of this block */

    __device__ __forceinline__ asking(const norm_grad<T> &a, bool based) {
        row = blockIdx.x, step = gridDim.x;
        int64_t at = row * a.d + threadIdx.x * W;
        x = a.x + at, dy = a.dy + at, base = based ? a.base + at : NULL;
        rstd = a.rstd + row, mean = a.mean ? a.mean + row : NULL;
    }
    /* into: the ring's row, at this thread's first pack; packs: of a row. */
    __device__ __forceinline__ void next(const norm_grad<T> &a, pack<T, W> *into, row_stats<T> *stats,
                                         int packs) {
        if (row < a.n) {
            if (threadIdx.x % 32 == 0) {
                int warp = threadIdx.x / 32;
                __pipeline_memcpy_async(stats->rstd + warp, rstd, sizeof *rstd);
                if (mean) __pipeline_memcpy_async(stats->mean + warp, mean, sizeof *mean);
            }
#pragma unroll
            for (int k = 0; k < keep; k++) {
                int p = k * blockDim.x;
                if (p + (int)threadIdx.x >= packs) continue;
                __pipeline_memcpy_async(into + p, x + p * W, sizeof *into);
                __pipeline_memcpy_async(into + packs + p, dy + p * W, sizeof *into);
                if (base) __pipeline_memcpy_async(into + 2 * packs + p, base + p * W, sizeof *into);
            }
        }
        __pipeline_commit(); /* an empty group at the end keeps the count */
        int64_t apart = step * a.d;
        x += apart, dy += apart, rstd += step, row += step;
        if (base) base += apart;
        if (mean) mean += step;
    }
};

/* Grid: parts; block: threads for keep packs each.  What both turns over a row need stays in
 * registers as real numbers: to widen it again would take as long as to compute with it. */
template <typename T, int W, bool centred, int keep, int stages>
__global__ void __launch_bounds__(MOST) ring_kernel(norm_grad<T> a) {
    typedef real<T> R;
    extern __shared__ __align__(16) char bytes[];
    __shared__ R space[2][2][32];
    __shared__ row_stats<T> stats[stages];
    int packs = (int)(a.d / W), stage = 0, turn = 0;
    bool based = a.dx && a.base;
    int apart = (based ? 3 : 2) * packs; /* from one row of the ring to the next */
    pack<T, W> *ring = reinterpret_cast<pack<T, W> *>(bytes) + threadIdx.x;
    R weight[keep][W], sum_w[keep][W] = {}, sum_b[keep][W] = {}, share = (R)1 / (R)a.d;
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int p = threadIdx.x + k * blockDim.x;
#pragma unroll
        for (int j = 0; j < W; j++) weight[k][j] = 1;
        if (a.w && p < packs) load<T, W>(weight[k], a.w + p * W);
    }
    asking<T, W, keep> ask(a, based);
    for (int s = 0; s < stages; s++) ask.next(a, ring + s * apart, stats + s, packs);
    T *out = a.dx ? a.dx + blockIdx.x * a.d + threadIdx.x * W : NULL;
    int64_t down = gridDim.x * a.d;
    for (int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
        pack<T, W> *row = ring + stage * apart;
        __pipeline_wait_prior(stages - 1);
        __syncwarp(); /* lane 0 has waited for the statistics too */
        R m = centred ? stats[stage].mean[threadIdx.x / 32] : 0;
        R r = stats[stage].rstd[threadIdx.x / 32], one = 0, two = 0, d[keep][W], xhat[keep][W];
#pragma unroll
        for (int k = 0; k < keep; k++) {
            int p = k * blockDim.x;
            if (p + (int)threadIdx.x >= packs) continue;
            pack<T, W> px = row[p], pdy = row[packs + p];
#pragma unroll
            for (int j = 0; j < W; j++) {
                d[k][j] = to_real(pdy.at[j]);
                xhat[k][j] = (to_real(px.at[j]) - m) * r;
                sum_w[k][j] += d[k][j] * xhat[k][j];
                if (centred) sum_b[k][j] += d[k][j];
                d[k][j] *= weight[k][j];
                if (centred) one += d[k][j];
                two += d[k][j] * xhat[k][j];
            }
        }
        if (out) {
            block_sums(one, two, space, turn);
            one *= share, two *= share;
#pragma unroll
            for (int k = 0; k < keep; k++) {
                int p = k * blockDim.x;
                if (p + (int)threadIdx.x >= packs) continue;
                R v[W];
                pack<T, W> more;
                if (based) more = row[2 * packs + p];
#pragma unroll
                for (int j = 0; j < W; j++) {
                    v[j] = r * (d[k][j] - one - xhat[k][j] * two);
                    if (based) v[j] += to_real(more.at[j]);
                }
                store<T, W>(out + p * W, v);
            }
            out += down;
        }
        __syncwarp(); /* all lanes have read this row's statistics */
        ask.next(a, row, stats + stage, packs);
        turn ^= 1;
        stage = stage + 1 < stages ? stage + 1 : 0;
    }
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int p = threadIdx.x + k * blockDim.x;
        if (p >= packs) continue;
        if (a.dws) store<R, W>(a.dws + blockIdx.x * a.d + p * W, sum_w[k]);
        if (centred && a.dbs) store<R, W>(a.dbs + blockIdx.x * a.d + p * W, sum_b[k]);
    }
}

/* ---- any rows ---- */

/* line += v, or = v for a block's first row: each number has one owner. */
template <int W, typename R>
__device__ __forceinline__ void add_to_line(R *line, const R (&v)[W], bool first) {
#pragma unroll
    for (int k = 0; k < W; k++) line[k] = first ? v[k] : line[k] + v[k];
}

/* Grid: parts; a row at a time, read twice. */
template <typename T, int W, bool centred>
__global__ void __launch_bounds__(1024) rows_kernel(norm_grad<T> a) {
    typedef real<T> R;
    __shared__ R space[2][2][32];
    int64_t packs = a.d / W;
    R *dws = a.dws ? a.dws + blockIdx.x * a.d : NULL, *dbs = a.dbs ? a.dbs + blockIdx.x * a.d : NULL;
    int turn = 0;
    for (int64_t i = blockIdx.x; i < a.n; i += gridDim.x, turn ^= 1) {
        const T *x = a.x + i * a.d, *dy = a.dy + i * a.d;
        R m = centred ? a.mean[i] : 0, r = a.rstd[i], one = 0, two = 0;
        /* f(number of the pack, d, g, xhat) */
        auto each = [&](auto f) {
            for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
                R w[W], d[W], g[W], xhat[W];
                if (a.w) load<T, W>(w, a.w + p * W);
                load<T, W>(d, dy + p * W);
                load<T, W>(xhat, x + p * W);
#pragma unroll
                for (int k = 0; k < W; k++) {
                    g[k] = a.w ? d[k] * w[k] : d[k];
                    xhat[k] = (xhat[k] - m) * r;
                }
                f(p, d, g, xhat);
            }
        };
        if (a.dx) {
            each([&](int64_t, const R(&)[W], const R(&g)[W], const R(&xhat)[W]) {
#pragma unroll
                for (int k = 0; k < W; k++) {
                    if (centred) one += g[k];
                    two += g[k] * xhat[k];
                }
            });
            block_sums(one, two, space, turn);
            one /= (R)a.d, two /= (R)a.d;
        }
        each([&](int64_t p, const R(&d)[W], const R(&g)[W], const R(&xhat)[W]) {
            R out[W], product[W];
            if (a.dx && a.base) load<T, W>(out, a.base + i * a.d + p * W);
#pragma unroll
            for (int k = 0; k < W; k++) {
                out[k] = r * (g[k] - one - xhat[k] * two) + (a.dx && a.base ? out[k] : 0);
                product[k] = d[k] * xhat[k];
            }
            if (a.dx) store<T, W>(a.dx + i * a.d + p * W, out);
            if (dws) add_to_line(dws + p * W, product, i == blockIdx.x);
            if (centred && dbs) add_to_line(dbs + p * W, d, i == blockIdx.x);
        });
    }
}

/* ---- adding the lines ---- */

/* out[y] [d] (+)= the sum over `parts` lines of d, in order, y = 0 dw, 1 db: 32 columns a block, a
 * warp takes the lines l, l + 32, ... and thread row 0 adds the 32 results. */
template <typename Y, typename R> struct gathering {
    Y *out[2];
    const R *lines[2];
    int add[2];
};
template <typename Y, typename R>
__global__ void __launch_bounds__(1024) gather_kernel(gathering<Y, R> a, int64_t parts, int64_t d) {
    __shared__ double space[32][33];
    int64_t column = (int64_t)blockIdx.x * 32 + threadIdx.x;
    Y *out = a.out[blockIdx.y];
    const R *lines = a.lines[blockIdx.y];
    double sum = 0;
    if (!out) return;
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < parts; p += 32)
        if (column < d) sum += (double)lines[p * d + column];
    space[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= d) return;
    for (int l = 1; l < 32; l++) sum += space[l][threadIdx.x];
    if (a.add[blockIdx.y]) sum += (double)to_real(out[column]);
    out[column] = from_real<Y>((real<Y>)sum);
}

/* ---- launching ---- */

static int64_t parts_of(int64_t n, int64_t row_bytes) {
    return pg_min64(n, row_bytes > LONG ? LONG_PARTS : PARTS);
}

template <typename T, int W, bool centred, int keep, int stages>
static void launch_ring(const norm_grad<T> &a, int64_t parts, size_t ring, cudaStream_t s) {
    int packs = (int)(a.d / W), threads = ((packs + keep - 1) / keep + 31) / 32 * 32;
    auto kernel = ring_kernel<T, W, centred, keep, stages>;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)ring);
    kernel<<<(unsigned)parts, threads, ring, s>>>(a);
}

/* 1: done; 0: these rows do not fit. */
template <typename T, int W, bool centred>
static int through_ring(const norm_grad<T> &a, int64_t parts, cudaStream_t s) {
    if constexpr (W > 1) {
        int64_t packs = a.d / W, row = 16 * packs * (a.dx && a.base ? 3 : 2);
        if (packs > 2 * MOST || 2 * row > RING) return 0;
        size_t ring = (size_t)((STAGES * row > RING ? 2 : STAGES) * row);
        if (STAGES * row > RING) launch_ring<T, W, centred, 2, 2>(a, parts, ring, s);
        else if (packs > MOST / 2) launch_ring<T, W, centred, 2, STAGES>(a, parts, ring, s);
        else launch_ring<T, W, centred, 1, STAGES>(a, parts, ring, s);
        return 1;
    }
    return 0;
}

/* dw, db: the final ones, of Y, or NULL; scratch: parts_of lines for each that is wanted. */
template <typename T, typename Y, bool centred>
static void grad(norm_grad<T> a, Y *dw, Y *db, int add_w, int add_b, real<T> *scratch,
                 cudaStream_t s) {
    int64_t parts = parts_of(a.n, a.d * (int64_t)sizeof(T));
    a.dws = dw ? scratch : NULL;
    a.dbs = db ? scratch + (dw ? parts * a.d : 0) : NULL;
    if (parts > 0) {
        CUDA_WIDE(cuda_aligned(a.dx, a.dy, a.x, a.w, a.base) && a.d * sizeof(T) % 16 == 0, T,
                  if (!through_ring<T, W, centred>(a, parts, s))
                      rows_kernel<T, W, centred><<<(unsigned)parts, 1024, 0, s>>>(a))
    }
    if (!dw && !db) return;
    gathering<Y, real<T>> g = {{dw, db}, {a.dws, a.dbs}, {add_w, add_b}};
    gather_kernel<<<dim3((unsigned)((a.d + 31) / 32), 2), dim3(32, 32), 0, s>>>(g, parts, a.d);
}

int64_t cuda_rmsnorm_grad_scratch(int64_t n, int64_t d) {
    return pg_min64(n, PARTS) * d * (int64_t)sizeof(double);
}
int64_t cuda_layernorm_grad_scratch(int64_t n, int64_t d) {
    return 2 * cuda_rmsnorm_grad_scratch(n, d);
}

int cuda_rmsnorm_grad(void *dx, void *dw, const void *dy, const void *x, const void *w,
                      const void *rstd, const void *base, int64_t n, int64_t d, int add_x,
                      int add_w, void *scratch, int dtype, int dtype_w, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (d <= 0) return PG_OK;
    if (add_x) base = dx;
    CUDA_MIXED("rmsnorm_grad", dtype, dtype_w,
               norm_grad<T> a = {(T *)dx, (const T *)dy, (const T *)x, (const T *)w,
                                 (const T *)base, NULL, (const real<T> *)rstd, NULL, NULL, n, d};
               grad<T, Y, false>(a, (Y *)dw, (Y *)NULL, add_w, 0, (real<T> *)scratch, s))
    return cuda_launched("rmsnorm_grad");
}

int cuda_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w,
                        const void *mean, const void *rstd, const void *base, int64_t n, int64_t d,
                        int add_x, int add_w, int add_b, void *scratch, int dtype, int dtype_w,
                        pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (d <= 0) return PG_OK;
    if (add_x) base = dx;
    CUDA_MIXED("layernorm_grad", dtype, dtype_w,
               norm_grad<T> a = {(T *)dx, (const T *)dy, (const T *)x, (const T *)w,
                                 (const T *)base, (const real<T> *)mean, (const real<T> *)rstd,
                                 NULL, NULL, n, d};
               grad<T, Y, true>(a, (Y *)dw, (Y *)db, add_w, add_b, (real<T> *)scratch, s))
    return cuda_launched("layernorm_grad");
}
