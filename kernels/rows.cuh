/* rows.cuh: two ways to go over rows, for swiglu.cu, rope.cu, embed.cu, loss.cu and sample.cu.
 *
 * Many rows of equal work for every element: a grid of two dimensions, so that no thread divides.
 * One row for a block, whose results are numbers of the row: walk_row(), which takes 16 bytes at a
 * time also where an odd row length (a vocabulary of 50257) leaves rows off their boundary. */
#ifndef PG_ROWS_CUH
#define PG_ROWS_CUH
#include "common.cuh"

/* ---- rows of elements ---- */
#define ROWS_THREADS 256
/* Threads along a row of that many items, and over them rows up to ROWS_THREADS.  Long rows take
 * the width that leaves the fewest threads without an item: 1376 packs (a row of 11008 in bf16) are
 * 11 times 128 but for 32, where 6 times 256 would leave a tenth idle. */
static inline dim3 rows_block(int64_t items) {
    int64_t along = pg_min64(ROWS_THREADS, (items + 31) / 32 * 32);
    for (int64_t less = 128; items > ROWS_THREADS && less >= 64; less /= 2)
        if ((items + less - 1) / less * less < (items + along - 1) / along * along) along = less;
    return dim3((unsigned)along, (unsigned)(ROWS_THREADS / along));
}
static inline dim3 rows_grid(int64_t rows, int64_t items, dim3 block) {
    return dim3((unsigned)((items + block.x - 1) / block.x),
                (unsigned)pg_min64((rows + block.y - 1) / block.y, 65535));
}
/* The thread's item of a row, and its first row; the next is all_rows() further. */
__device__ __forceinline__ int64_t row_item(void) { return grid_thread(); }
__device__ __forceinline__ int64_t first_row(void) {
    return (int64_t)blockIdx.y * blockDim.y + threadIdx.y;
}
__device__ __forceinline__ int64_t all_rows(void) { return (int64_t)gridDim.y * blockDim.y; }

/* ---- a block for a row ---- */
/* Threads for a row of v elements: about four packs each, so that loads are in flight together. */
static inline unsigned row_threads(int64_t v, int W) {
    return (unsigned)pg_max64(32, pg_min64(512, (v / (4 * W) + 31) / 32 * 32));
}

/* f(values, i) for all of x[0..v): values is an array of W numbers that start at i, or of one.
 * W > 1: x, and what f reads and writes beside it, lie equally far behind a 16-byte boundary.  A
 * thread has WALK_AHEAD packs in flight before it uses the first. */
#define WALK_AHEAD 4
template <int W, typename T, typename F>
__device__ __forceinline__ void walk_row(const T *x, int64_t v, F f) {
    typedef typename raw_of<(int)sizeof(T) * W>::type unit;
    int64_t head = W > 1 ? (16 - (uintptr_t)x % 16) % 16 / sizeof(T) : 0;
    head = head < v ? head : v;
    int64_t packs = (v - head) / W, tail = head + packs * W, apart = blockDim.x;
    for (int64_t p = threadIdx.x; p < packs; p += WALK_AHEAD * apart) {
        unit
            ahead[WALK_AHEAD]; /* as they are: taken apart, a pack would need a register a number */
#pragma unroll
        for (int k = 0; k < WALK_AHEAD; k++)
            if (p + k * apart < packs)
                ahead[k] = *reinterpret_cast<const unit *>(x + head + (p + k * apart) * W);
#pragma unroll
        for (int k = 0; k < WALK_AHEAD; k++) {
            if (p + k * apart >= packs) break;
            real<T> values[W];
#pragma unroll
            for (int j = 0; j < W; j++)
                values[j] = to_real(reinterpret_cast<const pack<T, W> &>(ahead[k]).at[j]);
            f(values, head + (p + k * apart) * W);
        }
    }
    for (int64_t i = threadIdx.x; i < head + v - tail; i += apart) {
        int64_t at = i < head ? i : tail + i - head;
        real<T> one[1] = {to_real(x[at])};
        f(one, at);
    }
}
/* y[0..n) = 0, wherever y lies. */
template <int W, typename T> __device__ __forceinline__ void clear_row(T *y, int64_t n) {
    real<T> zeros[W] = {0}, zero[1] = {0};
    int64_t head = W > 1 ? (16 - (uintptr_t)y % 16) % 16 / sizeof(T) : 0;
    head = head < n ? head : n;
    int64_t packs = (n - head) / W, tail = head + packs * W;
    for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) store<T, W>(y + head + p * W, zeros);
    for (int64_t i = threadIdx.x; i < head + n - tail; i += blockDim.x)
        store<T, 1>(y + (i < head ? i : tail + i - head), zero);
}

/* ---- exponentials ---- */
/* As exact as T needs: the fast one errs by 2^-22 of its value for arguments to -10, far below the
 * rounding of bf16 and f16; below 2^-126 it is 0, which saves three instructions of five. */
template <typename T> __device__ __forceinline__ real<T> exp_for(real<T> x) { return exp(x); }
__device__ __forceinline__ float exp_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f)); /* log2(e) */
    return y;
}
template <> __device__ __forceinline__ float exp_for<bf16>(float x) { return exp_fast(x); }
template <> __device__ __forceinline__ float exp_for<f16>(float x) { return exp_fast(x); }
/* a / b; the fast one errs by 2 units in the last place of f32, and gives 0 for b beyond 2^126. */
template <typename T> __device__ __forceinline__ real<T> divide_for(real<T> a, real<T> b) {
    return a / b;
}
template <> __device__ __forceinline__ float divide_for<bf16>(float a, float b) {
    return __fdividef(a, b);
}
template <> __device__ __forceinline__ float divide_for<f16>(float a, float b) {
    return __fdividef(a, b);
}
#endif
