/* norm.cu: rmsnorm and layernorm over rows of d numbers, and their gradients.
 *
 * rmsnorm is layernorm that centres nothing (mean = 0), so both are one template.  A row belongs to
 * 32 to 1024 threads, which keep its packs in registers (KEEP of them a thread, so up to 32,768
 * numbers of bf16 forward); what does not fit is read again from the cache.  Weight gradients: a
 * fixed number of blocks share out the rows, each sums its own in registers into its line of
 * scratch, and a second launch adds the lines in order.  In the gradient of all but very long rows a
 * thread asks for its packs of the next row before it works on this one, so that reading never stops
 * for the sums over a row.
 * Bytes moved, for n x d numbers of bf16: forward 4 n d (x, y); 8 n d with sum = x + r (x, r, sum, y).
 * Gradient 6 n d (dy, x, dx), 8 n d with a base or where dx is added to; and the lines of scratch,
 * at most PARTS * d * 4 written and read, which mostly stays in the L2 cache (4.3 MB of each at
 * d = 4096, beside 201 MB of 6 n d at 8192 rows). */
#include "common.cuh"

#define KEEP     4   /* packs of x a thread keeps, forward */
#define PARTS    264 /* blocks of the gradient: two for each of 132 multiprocessors, on any card */

/* Rows that PACED threads can keep whole, PACED_KEEP packs of x and dy each, are asked for ahead: with
 * the next row's packs, the base's and the sums of dw and db that is up to 128 registers a thread. */
#define PACED      512
#define PACED_KEEP 2

/* Packs of x and of dy a thread keeps in the gradient of longer rows, beside as many of sums of dw and,
 * for layernorm, of db: 64 registers in all, so that 1024 threads fit. */
template <bool centred, bool paced> struct kept_grad {
    static constexpr int packs = paced ? PACED_KEEP : centred ? 1 : 2;
};

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
template <typename T> struct norm_value {
    T *y, *sum;           /* sum NULL: y is the norm of x */
    real<T> *mean, *rstd; /* mean NULL: rmsnorm */
    const T *x, *r, *w, *b;
    real<T> eps;
    int64_t n, d;
};

/* sum = x + r, rounded; the kept packs of x become the sum's.  What is not kept is read again from
 * sum, by the thread that wrote it. */
template <int keep, int W, typename T>
__device__ __forceinline__ void add_row(pack<T, W> (&kept)[keep], T *sum, const T *x, const T *r,
                                        int64_t packs, bool live) {
    auto add = [&](pack<T, W> &p, const pack<T, W> &q, int64_t at) {
#pragma unroll
        for (int k = 0; k < W; k++) p.at[k] = from_real<T>(to_real(p.at[k]) + to_real(q.at[k]));
        if (live) store_pack<W>(sum + at * W, p);
    };
    pack<T, W> other[keep];
    keep_packs(other, r, packs);
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
        if (p < packs) add(kept[k], other[k], p);
    }
    for (int64_t p = threadIdx.x + keep * (int64_t)blockDim.x; p < packs; p += blockDim.x) {
        pack<T, W> more = load_pack<W>(x + p * W);
        add(more, load_pack<W>(r + p * W), p);
    }
}

/* Block: rows x threads by cuda_row_block; grid: all rows. */
template <typename T, int W, bool centred>
__global__ void __launch_bounds__(1024) norm_kernel(norm_value<T> a) {
    typedef real<T> R;
    __shared__ R space[256];
    int64_t i = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, packs = a.d / W;
    bool live = i < a.n; /* the others of the block wait with it */
    if (!live) i = a.n - 1;
    const T *row = a.x + i * a.d;
    pack<T, W> kept[KEEP];
    keep_packs(kept, row, packs);
    if (a.sum) {
        add_row(kept, a.sum + i * a.d, row, a.r + i * a.d, packs, live);
        row = a.sum + i * a.d;
    }
    R m = 0, sum = 0;
    if (centred) {
        each_pack(kept, row, packs, [&](const pack<T, W> &p, int64_t) {
#pragma unroll
            for (int k = 0; k < W; k++) sum += to_real(p.at[k]);
        });
        m = row_sum(sum, space) / (R)a.d;
        sum = 0;
    }
    each_pack(kept, row, packs, [&](const pack<T, W> &p, int64_t) {
#pragma unroll
        for (int k = 0; k < W; k++) {
            R v = to_real(p.at[k]) - m;
            sum += v * v;
        }
    });
    R r = 1 / sqrt(row_sum(sum, space) / (R)a.d + a.eps);
    if (!live) return;
    if (threadIdx.x == 0) {
        a.rstd[i] = r;
        if (centred) a.mean[i] = m;
    }
    each_pack(kept, row, packs, [&](const pack<T, W> &p, int64_t at) {
        R v[W], scale[W], shift[W];
        if (a.w) load<T, W>(scale, a.w + at * W);
        if (a.b) load<T, W>(shift, a.b + at * W);
#pragma unroll
        for (int k = 0; k < W; k++)
            v[k] = (to_real(p.at[k]) - m) * r * (a.w ? scale[k] : 1) + (a.b ? shift[k] : 0);
        store<T, W>(a.y + i * a.d + at * W, v);
    });
}

template <typename T, bool centred> static void norm(norm_value<T> a, cudaStream_t s) {
    CUDA_WIDE(cuda_aligned(a.y, a.sum, a.x, a.r, a.w, a.b) && a.d * sizeof(T) % 16 == 0, T,
              dim3 block = cuda_row_block((a.d / W + KEEP - 1) / KEEP, 1024);
              norm_kernel<T, W, centred>
              <<<(unsigned)((a.n + block.y - 1) / block.y), block, 0, s>>>(a))
}

int cuda_rmsnorm(void *y, void *sum, void *rstd, const void *x, const void *r, const void *w,
                 double eps, int64_t n, int64_t d, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("rmsnorm", dtype,
                  norm_value<T> a = {(T *)y, (T *)sum, NULL, (real<T> *)rstd, (const T *)x,
                                     (const T *)r, (const T *)w, NULL, (real<T>)eps, n, d};
                  norm<T, false>(a, s))
    return cuda_launched("rmsnorm");
}

int cuda_layernorm(void *y, void *sum, void *mean, void *rstd, const void *x, const void *r,
                   const void *w, const void *b, double eps, int64_t n, int64_t d, int dtype,
                   pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("layernorm", dtype,
                  norm_value<T> a = {(T *)y, (T *)sum, (real<T> *)mean, (real<T> *)rstd,
                                     (const T *)x, (const T *)r, (const T *)w, (const T *)b,
                                     (real<T>)eps, n, d};
                  norm<T, true>(a, s))
    return cuda_launched("layernorm");
}

/* ---- gradients ---- */
template <typename T> struct norm_grad {
    T *dx; /* NULL: not wanted */
    const T *dy, *x, *w, *base; /* w NULL: ones; base NULL: nothing is added (it may be dx) */
    const real<T> *mean, *rstd; /* mean NULL: rmsnorm */
    real<T> *dws, *dbs;         /* [parts,d] of scratch; NULL: not wanted */
    int64_t n, d;
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

/* What a thread needs of a row before it can begin. */
template <typename T, int W, int keep> struct row_parts {
    pack<T, W> x[keep], dy[keep];
    real<T> m, r;
};

template <bool centred, typename T, int W, int keep>
__device__ __forceinline__ void ask(row_parts<T, W, keep> &row, const norm_grad<T> &a, int64_t i) {
    if (i >= a.n) i = a.n - 1;
    keep_packs(row.x, a.x + i * a.d, a.d / W);
    keep_packs(row.dy, a.dy + i * a.d, a.d / W);
    row.m = centred ? a.mean[i] : 0;
    row.r = a.rstd[i];
}

/* dx = base + rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * w; dw += dy * xhat, db += dy.
 * Grid: parts; part p takes the rows p * y + .., then those a grid further.  paced: every pack is
 * kept, and the next row's are asked for before this row's sums. */
template <typename T, int W, bool centred, bool paced>
__global__ void __launch_bounds__(paced ? PACED : 1024) norm_grad_kernel(norm_grad<T> a) {
    typedef real<T> R;
    __shared__ R space[256];
    extern __shared__ __align__(16) char more[]; /* W numbers a thread, for give_sums */
    constexpr int keep = kept_grad<centred, paced>::packs;
    int64_t packs = a.d / W, step = (int64_t)gridDim.x * blockDim.y;
    R *dws = a.dws ? a.dws + blockIdx.x * a.d : NULL;
    R *dbs = a.dbs ? a.dbs + blockIdx.x * a.d : NULL;
    R sum_w[keep][W] = {}, sum_b[keep][W] = {};
    row_parts<T, W, keep> row, next;
    int64_t start = (int64_t)blockIdx.x * blockDim.y;
    if (paced && start < a.n) ask<centred>(next, a, start + threadIdx.y);
    for (; start < a.n; start += step) {
        int64_t i = start + threadIdx.y;
        bool live = i < a.n, first = start < step;
        pack<T, W> base[keep];
        if (paced) {
            row = next;
            if (start + step < a.n) ask<centred>(next, a, i + step);
        } else {
            ask<centred>(row, a, i);
        }
        if (!live) i = a.n - 1;
        const T *x = a.x + i * a.d, *dy = a.dy + i * a.d, *from = a.base + i * a.d;
        bool based = a.dx && a.base;
        if (paced && based) keep_packs(base, from, packs);
        R m = row.m, r = row.r, one = 0, two = 0;
        /* turn: 0 the sums over the row, 1 what is written */
        auto visit = [&](const pack<T, W> &px, const pack<T, W> &pdy, const pack<T, W> &pbase,
                         int64_t p, int turn, R(&grad_w)[W], R(&grad_b)[W]) {
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
                    if (based) out[k] += to_real(pbase.at[k]);
                    grad_w[k] += d * xhat;
                    if (centred) grad_b[k] += d;
                }
            }
            if (turn && a.dx) store<T, W>(a.dx + i * a.d + p * W, out);
        };
        auto visit_all = [&](int turn) {
#pragma unroll
            for (int k = 0; k < keep; k++) {
                int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
                if (p >= packs) continue;
                if (!paced && turn && based) base[k] = load_pack<W>(from + p * W);
                visit(row.x[k], row.dy[k], base[k], p, turn, sum_w[k], sum_b[k]);
            }
            for (int64_t p = threadIdx.x + keep * (int64_t)blockDim.x; !paced && p < packs;
                 p += blockDim.x) {
                R grad_w[W] = {}, grad_b[W] = {};
                pack<T, W> extra;
                if (turn && based) extra = load_pack<W>(from + p * W);
                visit(load_pack<W>(x + p * W), load_pack<W>(dy + p * W), extra, p, turn, grad_w,
                      grad_b);
                if (turn && dws) add_to_line(dws + p * W, grad_w, first);
                if (centred && turn && dbs) add_to_line(dbs + p * W, grad_b, first);
            }
        };
        if (a.dx) {
            visit_all(0);
            if (centred) row_sums(one, two, space);
            else one = 0, two = row_sum(two, space);
            one /= (R)a.d, two /= (R)a.d;
            narrow_again(row.x);
            narrow_again(row.dy);
        }
        if (live) visit_all(1);
    }
    if (dws) give_sums<W>(dws, sum_w, packs, (R *)more);
    if (centred && dbs) give_sums<W>(dbs, sum_b, packs, (R *)more);
}

/* out [d] (+)= the sum over `parts` lines of d, in order: 32 columns a block, a warp takes the lines
 * l, l + 32, ... and thread row 0 adds the 32 results. */
template <typename Y, typename R>
__global__ void __launch_bounds__(1024)
    gather_kernel(Y *out, const R *lines, int64_t parts, int64_t d, int add) {
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
    out[column] = from_real<Y>((real<Y>)(add ? (double)to_real(out[column]) + sum : sum));
}

/* out of T, or of f32 beside bf16 and f16. */
template <typename T>
static void gather(void *out, const real<T> *lines, int64_t parts, int64_t d, int add, int mixed,
                   cudaStream_t s) {
    unsigned tiles = (unsigned)((d + 31) / 32);
    dim3 block(32, 32);
    if (!out) return;
    if (mixed) gather_kernel<<<tiles, block, 0, s>>>((real<T> *)out, lines, parts, d, add);
    else gather_kernel<<<tiles, block, 0, s>>>((T *)out, lines, parts, d, add);
}

/* The blocks' lines; their number is returned. */
template <typename T, bool centred> static int64_t lines_of(norm_grad<T> a, cudaStream_t s) {
    typedef real<T> R;
    int64_t parts = 0;
    CUDA_WIDE(
        cuda_aligned(a.dx, a.dy, a.x, a.w, a.base) && a.d * sizeof(T) % 16 == 0, T,
        int paced = a.d / W <= PACED * PACED_KEEP;
        dim3 block = paced ? cuda_row_block((a.d / W + PACED_KEEP - 1) / PACED_KEEP, PACED)
                           : dim3(1024);
        size_t space = block.x * block.y * W * sizeof(R);
        parts = pg_min64((a.n + block.y - 1) / block.y, PARTS);
        if (paced) norm_grad_kernel<T, W, centred, true><<<(unsigned)parts, block, space, s>>>(a);
        else norm_grad_kernel<T, W, centred, false><<<(unsigned)parts, block, space, s>>>(a))
    return parts;
}

/* dw, db: the final ones, or NULL; scratch: min(n, PARTS) lines for each. */
template <typename T, bool centred>
static void grad(norm_grad<T> a, void *dw, void *db, int add_w, int add_b, int mixed,
                 real<T> *scratch, cudaStream_t s) {
    a.dws = dw ? scratch : NULL;
    a.dbs = db ? scratch + (dw ? pg_min64(a.n, PARTS) * a.d : 0) : NULL;
    int64_t parts = a.n > 0 ? lines_of<T, centred>(a, s) : 0;
    gather<T>(dw, a.dws, parts, a.d, add_w, mixed, s);
    gather<T>(db, a.dbs, parts, a.d, add_b, mixed, s);
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
    CUDA_FLOATING("rmsnorm_grad", dtype,
                  norm_grad<T> a = {(T *)dx, (const T *)dy, (const T *)x, (const T *)w,
                                    (const T *)base, NULL, (const real<T> *)rstd, NULL, NULL, n, d};
                  grad<T, false>(a, dw, NULL, add_w, 0, dtype_w != dtype, (real<T> *)scratch, s))
    return cuda_launched("rmsnorm_grad");
}

int cuda_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w,
                        const void *mean, const void *rstd, const void *base, int64_t n, int64_t d,
                        int add_x, int add_w, int add_b, void *scratch, int dtype, int dtype_w,
                        pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (d <= 0) return PG_OK;
    if (add_x) base = dx;
    CUDA_FLOATING("layernorm_grad", dtype,
                  norm_grad<T> a = {(T *)dx, (const T *)dy, (const T *)x, (const T *)w,
                                    (const T *)base, (const real<T> *)mean, (const real<T> *)rstd,
                                    NULL, NULL, n, d};
                  grad<T, true>(a, dw, db, add_w, add_b, dtype_w != dtype, (real<T> *)scratch, s))
    return cuda_launched("layernorm_grad");
}
