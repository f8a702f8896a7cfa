/* norm.cu: rmsnorm and layernorm over rows of d numbers, and their gradients.
 *
 * rmsnorm is layernorm that centres nothing (mean = 0), so both are one template.  A row belongs to
 * 32 to 1024 threads, which keep its packs in registers (KEEP of them a thread, so up to 32,768
 * numbers of bf16 forward); what does not fit is read again from the cache.  Weight gradients: a
 * fixed number of blocks share out the rows, each sums its own in registers into its line of
 * scratch, and a second launch adds the lines in order.  Bytes moved: forward x and y once; gradient
 * dy, x and dx once, and each line of scratch twice, which mostly stays in the L2 cache. */
#include "common.cuh"

#define KEEP     4   /* packs of x a thread keeps, forward */
#define PARTS    264 /* blocks of the gradient: two for each of 132 multiprocessors, on any card */
#define TOGETHER 512 /* threads of such a block, unless a row alone has more */

/* Packs of x and of dy a thread keeps in the gradient, beside as many of sums of dw and, for
 * layernorm, of db: 64 registers in all, so that 1024 threads fit. */
template <bool centred> struct kept_grad { static constexpr int packs = centred ? 1 : 2; };

/* use(pack, its number) for this thread's packs of a row: the kept ones, then those read again. */
template <int keep, int W, typename T, typename F>
__device__ __forceinline__ void each_pack(const pack<T, W> (&kept)[keep], const T *row,
                                          int64_t packs, F use) {
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
        if (p < packs) use(kept[k], p);
    }
    for (int64_t p = threadIdx.x + keep * (int64_t)blockDim.x; p < packs; p += blockDim.x)
        use(load_pack<W>(row + p * W), p);
}
template <int keep, int W, typename T>
__device__ __forceinline__ void keep_packs(pack<T, W> (&kept)[keep], const T *row, int64_t packs) {
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
        if (p < packs) kept[k] = load_pack<W>(row + p * W);
    }
}

/* Makes the compiler take the packs as new, so that it widens bf16 and f16 a second time rather than
 * keep both forms in registers over a barrier: 64 registers a thread, where 100 would be used. */
template <int keep, int W, typename T>
__device__ __forceinline__ void narrow_again(pack<T, W> (&kept)[keep]) {
    if constexpr (sizeof(T) == 2 && W > 1) {
#pragma unroll
        for (int k = 0; k < keep; k++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                asm volatile("" : "+r"(reinterpret_cast<int *>(&kept[k])[j]));
    }
}

/* ---- values ---- */
/* Block: rows x threads by cuda_row_block; grid: all rows.  mean NULL: rmsnorm.  w, b NULL: none. */
template <typename T, int W, bool centred>
__global__ void __launch_bounds__(1024)
    norm_kernel(T *y, real<T> *mean, real<T> *rstd, const T *x, const T *w, const T *b, real<T> eps,
                int64_t n, int64_t d) {
    typedef real<T> R;
    __shared__ R space[256];
    int64_t i = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, packs = d / W;
    bool live = i < n; /* the others of the block wait with it */
    if (!live) i = n - 1;
    const T *row = x + i * d;
    pack<T, W> kept[KEEP];
    keep_packs(kept, row, packs);
    R m = 0, sum = 0;
    if (centred) {
        each_pack(kept, row, packs, [&](const pack<T, W> &p, int64_t) {
#pragma unroll
            for (int k = 0; k < W; k++) sum += to_real(p.at[k]);
        });
        m = row_sum(sum, space) / (R)d;
        sum = 0;
    }
    each_pack(kept, row, packs, [&](const pack<T, W> &p, int64_t) {
#pragma unroll
        for (int k = 0; k < W; k++) {
            R v = to_real(p.at[k]) - m;
            sum += v * v;
        }
    });
    R r = 1 / sqrt(row_sum(sum, space) / (R)d + eps);
    if (!live) return;
    if (threadIdx.x == 0) {
        rstd[i] = r;
        if (centred) mean[i] = m;
    }
    each_pack(kept, row, packs, [&](const pack<T, W> &p, int64_t at) {
        R v[W], scale[W], base[W];
        if (w) load<T, W>(scale, w + at * W);
        if (b) load<T, W>(base, b + at * W);
#pragma unroll
        for (int k = 0; k < W; k++)
            v[k] = (to_real(p.at[k]) - m) * r * (w ? scale[k] : 1) + (b ? base[k] : 0);
        store<T, W>(y + i * d + at * W, v);
    });
}

template <typename T, bool centred>
static void norm(void *y, void *mean, void *rstd, const void *x, const void *w, const void *b,
                 double eps, int64_t n, int64_t d, cudaStream_t s) {
    typedef real<T> R;
    CUDA_WIDE(
        cuda_aligned(y, x, w, b) && d * sizeof(T) % 16 == 0, T,
        dim3 block = cuda_row_block((d / W + KEEP - 1) / KEEP, 1024);
        norm_kernel<T, W, centred><<<(unsigned)((n + block.y - 1) / block.y), block, 0, s>>>(
            (T *)y, (R *)mean, (R *)rstd, (const T *)x, (const T *)w, (const T *)b, (R)eps, n, d))
}

int cuda_rmsnorm(void *y, void *rstd, const void *x, const void *w, double eps, int64_t n,
                 int64_t d, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("rmsnorm", dtype, norm<T, false>(y, NULL, rstd, x, w, NULL, eps, n, d, s))
    return cuda_launched("rmsnorm");
}

int cuda_layernorm(void *y, void *mean, void *rstd, const void *x, const void *w, const void *b,
                   double eps, int64_t n, int64_t d, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("layernorm", dtype, norm<T, true>(y, mean, rstd, x, w, b, eps, n, d, s))
    return cuda_launched("layernorm");
}

/* ---- gradients ---- */
template <typename T> struct norm_grad {
    T *dx;                      /* NULL: not wanted */
    const T *dy, *x, *w;        /* w NULL: ones */
    const real<T> *mean, *rstd; /* mean NULL: rmsnorm */
    real<T> *dws, *dbs;         /* [parts,d] of scratch; NULL: not wanted */
    int64_t n, d;
    int add_x;
};

/* This block's sums of one kind over its rows of threads, in order, into line `out`. */
template <int W, int keep, typename R>
__device__ void give_sums(R *out, const R (&sums)[keep][W], int64_t packs, R *space) {
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
        R *mine = space + (threadIdx.y * blockDim.x + threadIdx.x);
        int apart = blockDim.x * blockDim.y; /* of the W numbers of a thread: no bank conflicts */
        __syncthreads();
#pragma unroll
        for (int j = 0; j < W; j++) mine[j * apart] = sums[k][j];
        __syncthreads();
        if (threadIdx.y || p >= packs) continue;
#pragma unroll
        for (int j = 0; j < W; j++) {
            R all = mine[j * apart];
            for (int l = 1; l < (int)blockDim.y; l++) all += mine[j * apart + l * blockDim.x];
            out[p * W + j] = all;
        }
    }
}

/* The packs of a row that no thread keeps have their sums in scratch: only where a row has the
 * block to itself, so each number has one owner. */
template <int W, typename R>
__device__ __forceinline__ void add_to_line(R *line, const R (&v)[W], bool first) {
#pragma unroll
    for (int k = 0; k < W; k++) line[k] = first ? v[k] : line[k] + v[k];
}

/* dx (+)= rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * w; dw += dy * xhat, db += dy.
 * Grid: parts; part p takes the rows p * y + .., then those a grid further. */
template <typename T, int W, bool centred>
__global__ void __launch_bounds__(1024) norm_grad_kernel(norm_grad<T> a) {
    typedef real<T> R;
    __shared__ R space[256];
    extern __shared__ __align__(16) char more[]; /* W numbers a thread, for give_sums */
    constexpr int keep = kept_grad<centred>::packs;
    int64_t packs = a.d / W, step = (int64_t)gridDim.x * blockDim.y;
    R *dws = a.dws ? a.dws + blockIdx.x * a.d : NULL;
    R *dbs = a.dbs ? a.dbs + blockIdx.x * a.d : NULL;
    R sum_w[keep][W] = {}, sum_b[keep][W] = {};
    for (int64_t start = (int64_t)blockIdx.x * blockDim.y; start < a.n; start += step) {
        int64_t i = start + threadIdx.y;
        bool live = i < a.n, first = start < step;
        if (!live) i = a.n - 1;
        const T *x = a.x + i * a.d, *dy = a.dy + i * a.d;
        pack<T, W> kept_x[keep], kept_dy[keep];
        keep_packs(kept_x, x, packs);
        keep_packs(kept_dy, dy, packs);
        R m = centred ? a.mean[i] : 0, r = a.rstd[i], one = 0, two = 0;
        /* turn: 0 the sums over the row, 1 what is written */
        auto visit = [&](const pack<T, W> &px, const pack<T, W> &pdy, int64_t p, int turn,
                         R(&grad_w)[W], R(&grad_b)[W]) {
            R w[W], out[W];
            if (a.w) load<T, W>(w, a.w + p * W);
#pragma unroll
            for (int k = 0; k < W; k++) {
                R d = to_real(pdy.at[k]), g = a.w ? d * w[k] : d,
                  xhat = (to_real(px.at[k]) - m) * r;
                if (turn == 0) {
                    one += g;
                    two += g * xhat;
                } else {
                    out[k] = r * (g - one - xhat * two);
                    grad_w[k] += d * xhat;
                    if (centred) grad_b[k] += d;
                }
            }
            if (turn && a.dx) give<T, W>(a.dx + i * a.d + p * W, out, a.add_x);
        };
        auto visit_all = [&](int turn) {
#pragma unroll
            for (int k = 0; k < keep; k++) {
                int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
                if (p < packs) visit(kept_x[k], kept_dy[k], p, turn, sum_w[k], sum_b[k]);
            }
            for (int64_t p = threadIdx.x + keep * (int64_t)blockDim.x; p < packs; p += blockDim.x) {
                R grad_w[W] = {}, grad_b[W] = {};
                visit(load_pack<W>(x + p * W), load_pack<W>(dy + p * W), p, turn, grad_w, grad_b);
                if (turn && dws) add_to_line(dws + p * W, grad_w, first);
                if (centred && turn && dbs) add_to_line(dbs + p * W, grad_b, first);
            }
        };
        if (a.dx) {
            visit_all(0);
            one = centred ? row_sum(one, space) / (R)a.d : 0;
            two = row_sum(two, space) / (R)a.d;
            narrow_again(kept_x);
            narrow_again(kept_dy);
        }
        if (live) visit_all(1);
    }
    if (dws) give_sums<W>(dws, sum_w, packs, (R *)more);
    if (centred && dbs) give_sums<W>(dbs, sum_b, packs, (R *)more);
}

/* out [d] (+)= the sum over `parts` lines of d, in order: 32 columns a block, a warp takes the lines
 * l, l + 32, ... and thread row 0 adds the 32 results. */
template <typename T>
__global__ void __launch_bounds__(1024)
    gather_kernel(T *out, const real<T> *lines, int64_t parts, int64_t d, int add) {
    __shared__ double space[32][33];
    int64_t column = (int64_t)blockIdx.x * 32 + threadIdx.x;
    double sum = 0;
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < parts; p += 32)
        if (column < d) sum += (double)lines[p * d + column];
    space[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= d) return;
    for (int l = 1; l < 32; l++) sum += space[l][threadIdx.x];
    out[column] = from_real<T>((real<T>)(add ? (double)to_real(out[column]) + sum : sum));
}

/* dw, db: the final ones, or NULL; scratch: min(n, parts) lines for each. */
template <typename T, bool centred>
static void grad(norm_grad<T> a, void *dw, void *db, int add_w, int add_b, real<T> *scratch,
                 cudaStream_t s) {
    typedef real<T> R;
    int64_t d = a.d, parts = 0;
    a.dws = dw ? scratch : NULL;
    a.dbs = db ? scratch + (dw ? pg_min64(a.n, PARTS) * d : 0) : NULL;
    if (a.n > 0) {
        CUDA_WIDE(cuda_aligned(a.dx, a.dy, a.x, a.w) && d * sizeof(T) % 16 == 0, T,
                  constexpr int keep = kept_grad<centred>::packs;
                  dim3 block = cuda_row_block((d / W + keep - 1) / keep, 1024, TOGETHER);
                  parts = pg_min64((a.n + block.y - 1) / block.y, PARTS);
                  norm_grad_kernel<T, W, centred>
                  <<<(unsigned)parts, block, block.x * block.y * W * sizeof(R), s>>>(a))
    }
    unsigned tiles = (unsigned)((d + 31) / 32);
    if (dw) gather_kernel<T><<<tiles, dim3(32, 32), 0, s>>>((T *)dw, a.dws, parts, d, add_w);
    if (db) gather_kernel<T><<<tiles, dim3(32, 32), 0, s>>>((T *)db, a.dbs, parts, d, add_b);
}

int64_t cuda_rmsnorm_grad_scratch(int64_t n, int64_t d) {
    return pg_min64(n, PARTS) * d * (int64_t)sizeof(double);
}
int64_t cuda_layernorm_grad_scratch(int64_t n, int64_t d) {
    return 2 * cuda_rmsnorm_grad_scratch(n, d);
}

int cuda_rmsnorm_grad(void *dx, void *dw, const void *dy, const void *x, const void *w,
                      const void *rstd, int64_t n, int64_t d, int add_x, int add_w, void *scratch,
                      int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (d <= 0) return PG_OK;
    CUDA_FLOATING("rmsnorm_grad", dtype,
                  norm_grad<T> a = {(T *)dx, (const T *)dy, (const T *)x, (const T *)w, NULL,
                                    (const real<T> *)rstd, NULL, NULL, n, d, add_x};
                  grad<T, false>(a, dw, NULL, add_w, 0, (real<T> *)scratch, s))
    return cuda_launched("rmsnorm_grad");
}

int cuda_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w,
                        const void *mean, const void *rstd, int64_t n, int64_t d, int add_x,
                        int add_w, int add_b, void *scratch, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (d <= 0) return PG_OK;
    CUDA_FLOATING("layernorm_grad", dtype,
                  norm_grad<T> a = {(T *)dx, (const T *)dy, (const T *)x, (const T *)w,
                                    (const real<T> *)mean, (const real<T> *)rstd, NULL, NULL, n, d,
                                    add_x};
                  grad<T, true>(a, dw, db, add_w, add_b, (real<T> *)scratch, s))
    return cuda_launched("layernorm_grad");
}
