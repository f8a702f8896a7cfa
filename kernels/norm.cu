/* norm.cu: rmsnorm and layernorm over rows of d numbers.  Their gradients: norm_grad.cu.
 *
 * rmsnorm is layernorm that centres nothing (mean = 0), so both are one template.  A row belongs to
 * 32 to 1024 threads, which keep its packs in registers (KEEP of them a thread, so up to 32,768
 * numbers of bf16); what does not fit is read again from the cache.
 * Bytes moved, for n x d numbers of bf16: 4 n d (x, y); 8 n d with sum = x + r (x, r, sum, y). */
#include "common.cuh"

#define KEEP 4 /* packs of x a thread keeps */

template <typename T> struct norm_value {
    T *y, *sum;           /* sum NULL: y is the norm of x */
    real<T> *mean, *rstd; /* mean NULL: rmsnorm */
    const T *x, *r, *w, *b;
    real<T> eps;
    int64_t n, d;
};

/* ---- the packs of a row that a thread keeps in registers ---- */
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

/* ---- the values ---- */
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
              <<<cuda_blocks((a.n + block.y - 1) / block.y), block, 0, s>>>(a))
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
