/* sample.cu: the next token: the largest logit, or one drawn at random by counter.
 *
 * The same rule as sample.c, without sorting.  A block takes a row.  Its ids are thought of in an
 * order: the likely first, among equals the smaller id; or, where nothing is cut, the larger id
 * first, as the CPU goes through them.  A cut and the draw are then each the shortest beginning of
 * that order that holds enough ids or enough mass; it is found by halving, first over the bits of
 * the weight, then over ids: some 80 sums over the row's weights, which lie in the L2 cache.  Sums
 * are in double and in a fixed order, so a beginning's mass never falls when it grows.
 * Bytes moved: logits twice, 8 bytes of weight an id some 80 times (about a millisecond at V 50257,
 * all rows at a time). */
#include "philox.h"
#include "rows.cuh"

#define SAMPLE_THREADS 1024

/* ---- argmax ---- */
template <typename R> struct best_of {
    R value;
    int64_t at;
};
/* The larger; of equals the first.  NaNs never win: they were not let in. */
template <typename R> __device__ __forceinline__ best_of<R> better(best_of<R> a, best_of<R> b) {
    return a.value > b.value || (a.value == b.value && a.at < b.at) ? a : b;
}
template <typename R> __device__ __forceinline__ best_of<R> warp_best(best_of<R> b) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) {
        best_of<R> other = {__shfl_xor_sync(0xffffffffu, b.value, apart),
                            __shfl_xor_sync(0xffffffffu, b.at, apart)};
        b = better(b, other);
    }
    return b;
}

/* The first of the row's largest numbers, for all threads of the block; v where all are NaN. */
template <typename T>
__device__ __forceinline__ best_of<real<T>> row_best(const T *x, int64_t v,
                                                     best_of<real<T>> *space) {
    best_of<real<T>> best = {-INFINITY, v};
    for (int64_t i = threadIdx.x; i < v; i += blockDim.x) {
        best_of<real<T>> one = {to_real(x[i]), i};
        if (one.value == one.value) best = better(best, one);
    }
    best = warp_best(best);
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = best;
    __syncthreads();
    int lane = threadIdx.x % 32;
    return warp_best(space[lane < (int)blockDim.x / 32 ? lane : 0]);
}

template <typename T>
__global__ void argmax_kernel(void *ids, const T *x, int64_t v, int dtype_ids) {
    __shared__ best_of<real<T>> space[32];
    best_of<real<T>> best = row_best(x + blockIdx.x * v, v, space);
    if (threadIdx.x) return;
    if (best.at == v) best.at = 0;
    if (dtype_ids == PG_I32) ((int32_t *)ids)[blockIdx.x] = (int32_t)best.at;
    else ((int64_t *)ids)[blockIdx.x] = best.at;
}

int cuda_argmax(void *ids, const void *x, int64_t n, int64_t v, int dtype, int dtype_ids,
                pg_stream s) {
    if (n * v == 0) return PG_OK;
    CUDA_FLOATING("argmax", dtype,
                  argmax_kernel<T><<<cuda_blocks(n), row_threads(v, 1), 0, (cudaStream_t)s>>>(
                      ids, (const T *)x, v, dtype_ids))
    return cuda_launched("argmax");
}

/* ---- drawing ---- */
/* A beginning of the order: all of larger weight, and of this weight those up to place `last`. */
struct beginning {
    double weight;
    int64_t last;
};
struct row_weights {
    const double *weight;
    int64_t v;
    int sorted; /* 0: all weights count as equal, and the larger id comes first */
    double *space;
};

__device__ __forceinline__ bool within(const row_weights &w, beginning b, int64_t i) {
    if (!w.sorted) return w.v - 1 - i <= b.last;
    return w.weight[i] > b.weight || (w.weight[i] == b.weight && i <= b.last);
}
/* How many of the beginning, or their mass: equal for all threads. */
__device__ double measure(const row_weights &w, beginning b, int count) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < w.v; i += SAMPLE_THREADS)
        if (within(w, b, i)) sum += count ? 1 : w.weight[i];
    return row_sum(sum, w.space);
}

enum { AT_LEAST, MORE_THAN };
__device__ bool enough(const row_weights &w, beginning b, int count, int rule, double goal) {
    double size = measure(w, b, count);
    return rule == MORE_THAN ? size > goal : size >= goal;
}

/* The shortest beginning with enough; all of the row where there is none.  Weights lie in [0,1],
 * and the bits of such doubles are ordered as they are. */
__device__ beginning shortest(const row_weights &w, int count, int rule, double goal) {
    beginning b = {0, w.v - 1};
    if (w.sorted) {
        int64_t low = 0, high = __double_as_longlong(1.0); /* enough at low, or nowhere */
        while (low < high) {
            int64_t middle = low + (high - low + 1) / 2;
            b.weight = __longlong_as_double(middle);
            if (enough(w, b, count, rule, goal)) low = middle;
            else high = middle - 1;
        }
        b.weight = __longlong_as_double(low);
    }
    int64_t low = 0, high = w.v - 1;
    while (low < high) {
        b.last = low + (high - low) / 2;
        if (enough(w, b, count, rule, goal)) high = b.last;
        else low = b.last + 1;
    }
    b.last = low;
    return b;
}

/* weight[i] = exp((x[i] - max) / temperature), a NaN's 0 */
template <typename T>
__device__ void weigh(double *weight, const T *x, int64_t v, double temperature,
                      best_of<real<T>> *space) {
    best_of<real<T>> best = row_best(x, v, space);
    double most = best.at < v ? (double)best.value : NAN;
    for (int64_t i = threadIdx.x; i < v; i += SAMPLE_THREADS) {
        double one = (double)to_real(x[i]), e = one == most ? 1 : exp((one - most) / temperature);
        weight[i] = e > 0 ? e : 0;
    }
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_kernel(int32_t *ids, const T *logits, int64_t v, double temperature, int64_t top_k,
                  double top_p, uint64_t stream, int64_t first, double *scratch) {
    __shared__ best_of<real<T>> best[32];
    __shared__ double space[32];
    int64_t row = blockIdx.x;
    int few = top_k > 0 && top_k < v, likely = top_p < 1;
    double *weight = scratch + row * v;
    weigh(weight, logits + row * v, v, temperature, best);
    row_weights w = {weight, v, few || likely, space};
    beginning kept = {0, v - 1};
    if (few) kept = shortest(w, 1, AT_LEAST, (double)top_k);
    double sum = measure(w, kept, 0);
    if (likely) sum = measure(w, shortest(w, 0, AT_LEAST, top_p * sum), 0);
    pg_philox block = pg_philox_block(stream, (uint64_t)(first + row));
    double u = (double)(((uint64_t)block.word[0] << 32 | block.word[1]) >> 11) * 0x1p-53;
    beginning drawn = shortest(w, 0, MORE_THAN, u * sum);
    /* the last of the beginning is the one drawn */
    if (threadIdx.x == 0) ids[row] = (int32_t)(w.sorted ? drawn.last : v - 1 - drawn.last);
}

int64_t cuda_sample_scratch(int64_t n, int64_t v) { return n * v * (int64_t)sizeof(double); }

int cuda_sample(int32_t *ids, const void *logits, int64_t n, int64_t v, double temperature,
                int64_t top_k, double top_p, uint64_t seed, uint64_t key, int64_t first,
                void *scratch, int dtype, pg_stream s) {
    if (temperature == 0) return cuda_argmax(ids, logits, n, v, dtype, PG_I32, s);
    if (n * v == 0) return PG_OK;
    uint64_t stream = pg_philox_stream(seed, key);
    CUDA_FLOATING(
        "sample", dtype,
        sample_kernel<T><<<cuda_blocks(n), SAMPLE_THREADS, 0, (cudaStream_t)s>>>(
            ids, (const T *)logits, v, temperature, top_k, top_p, stream, first, (double *)scratch))
    return cuda_launched("sample");
}
