/* random.cu: uniform and normal fills and dropout, all by counter (philox.h): the numbers of
 * random.c for the same (seed, key, index).
 *
 * Uniform numbers and masks are equal to the bit; normals are computed in double and may differ in
 * its last bits, where one compiler fuses a multiply and an add and the other does not.
 * Grid-stride loops, 256 threads a block.  A thread takes a pack, and computes a Philox block only
 * where the index leaves the last one. */
#include "common.cuh"
#include "philox.h"

#define THREADS 256

/* The global indices of elements i, i + 1, ... of a slice, one after the other. */
struct index_walk {
    int64_t index, column, cols, jump;
    __device__ index_walk(const pg_index_map &map, int64_t i) {
        cols = map.cols > 0 ? map.cols : INT64_MAX;
        column = map.cols > 0 ? i % map.cols : 0;
        index = map.first + (map.cols > 0 ? i / map.cols * map.stride + column : i);
        jump = map.stride - map.cols + 1; /* from the last column of a row to the next row */
    }
    __device__ void next() {
        if (++column < cols) index++;
        else column = 0, index += jump;
    }
};

/* Without an array index, which would put the block into local memory. */
__device__ __forceinline__ uint32_t word_of(const pg_philox &b, int at) {
    uint32_t low = at & 1 ? b.word[1] : b.word[0], high = at & 1 ? b.word[3] : b.word[2];
    return at & 2 ? high : low;
}

/* Numbers of a stream at rising indices; the block of the last index is kept. */
struct draws {
    uint64_t stream;
    int64_t counter = -1;
    pg_philox block;
    __device__ explicit draws(uint64_t from) : stream(from) {}
    __device__ void go(int64_t to) {
        if (to != counter) block = pg_philox_block(stream, (uint64_t)to);
        counter = to;
    }
    __device__ float uniform(int64_t index) {
        go((int64_t)((uint64_t)index >> 2));
        return pg_philox_unit(word_of(block, (int)(index & 3)));
    }
    __device__ double normal(int64_t index) {
        go((int64_t)((uint64_t)index >> 1));
        int odd = (int)(index & 1);
        return pg_philox_gauss(odd ? block.word[2] : block.word[0],
                               odd ? block.word[3] : block.word[1]);
    }
};

/* From double as cuda_cast does it. */
template <typename T> __device__ __forceinline__ T round_once(double x) {
    return from_real<T>(to_float_odd(x));
}
template <> __device__ __forceinline__ float round_once<float>(double x) { return (float)x; }
template <> __device__ __forceinline__ double round_once<double>(double x) { return x; }

/* Writes n elements once; the arithmetic of Philox and, for normals, of double is what it costs. */
template <typename T, int W, bool normal>
__global__ void __launch_bounds__(THREADS)
    random_kernel(T *y, int64_t n, uint64_t stream, double base, double factor, pg_index_map map) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        index_walk walk(map, i);
        draws from(stream);
        pack<T, W> p;
#pragma unroll
        for (int k = 0; k < W; k++, walk.next())
            p.at[k] = round_once<T>(base + factor * (normal ? from.normal(walk.index)
                                                            : (double)from.uniform(walk.index)));
        if (i + W <= n) store_pack<W>(y + i, p);
        else {
#pragma unroll
            for (int k = 0; k < W; k++)
                if (i + k < n) y[i + k] = p.at[k];
        }
    }
}

int cuda_random_uniform(void *y, int64_t n, uint64_t seed, uint64_t key, double low, double high,
                        pg_index_map map, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("random_uniform", dtype,
                  CUDA_WIDE(cuda_aligned(y), T,
                            random_kernel<T, W, false>
                            <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                                (T *)y, n, pg_philox_stream(seed, key), low, high - low, map)))
    return cuda_launched("random_uniform");
}

int cuda_random_normal(void *y, int64_t n, uint64_t seed, uint64_t key, double mean, double std,
                       pg_index_map map, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    CUDA_FLOATING("random_normal", dtype,
                  CUDA_WIDE(cuda_aligned(y), T,
                            random_kernel<T, W, true>
                            <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                                (T *)y, n, pg_philox_stream(seed, key), mean, std, map)))
    return cuda_launched("random_normal");
}

/* y (+)= x where kept, scaled by 1 / (1 - p).  Moves x and y once, y twice where added to. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    dropout_kernel(T *y, const T *x, int64_t n, float p, real<T> scale, const double *step,
                   uint64_t key, pg_index_map map, int add) {
    uint64_t stream = pg_philox_stream(step ? (uint64_t)step[PG_STEP_RANDOM] : 0, key);
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        index_walk walk(map, i);
        draws from(stream);
        real<T> v[W];
        load<T, W>(v, x + i, n - i);
#pragma unroll
        for (int k = 0; k < W; k++, walk.next())
            v[k] = from.uniform(walk.index) >= p ? v[k] * scale : 0;
        give<T, W>(y + i, v, add, n - i);
    }
}

int cuda_dropout(void *y, const void *x, int64_t n, double p, const double *step, uint64_t key,
                 pg_index_map map, int add, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    double scale = p < 1 ? 1 / (1 - p) : 0;
    CUDA_FLOATING(
        "dropout", dtype,
        CUDA_WIDE(cuda_aligned(y, x), T,
                  dropout_kernel<T, W><<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                      (T *)y, (const T *)x, n, (float)p, (real<T>)scale, step, key, map, add)))
    return cuda_launched("dropout");
}
