/* move.cu: taking a slice out of a tensor or placing one into it, and changing the order of dims.
 *
 * Nothing is computed unless it adds, so numbers move as units of 16, 8, 4, 2 or 1 bytes, the
 * largest that divides every address and length.  A permute (permute.h) moves whole rows, or
 * transposes tiles through shared memory, so that both sides are read and written in long runs.
 * Bytes moved: each number read once and written once, and y read where it is added to. */
#include "common.cuh"
#include "permute.h"

#define THREADS 256

/* The statement for U, the unit of `bytes` that divides all. */
#define WITH_UNIT(bytes, ...)                                                                      \
    switch (bytes) {                                                                               \
    case 16: {                                                                                     \
        typedef uint4 U;                                                                           \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case 8: {                                                                                      \
        typedef uint2 U;                                                                           \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case 4: {                                                                                      \
        typedef uint32_t U;                                                                        \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case 2: {                                                                                      \
        typedef uint16_t U;                                                                        \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    default: {                                                                                     \
        typedef uint8_t U;                                                                         \
        __VA_ARGS__;                                                                               \
    }                                                                                              \
    }

/* Of 16, 8, ... the largest that divides all bits given: an OR of addresses
 * and lengths in bytes. */
static int unit_of(uint64_t bits) {
    int unit = 16;
    while (bits % (uint64_t)unit) unit /= 2;
    return unit;
}

/* ---- slices ---- */
/* All in elements of T: `outer` runs of length, which lie apart_y and apart_x from each other. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    runs_kernel(T *y, const T *x, int64_t outer, int64_t length, int64_t apart_y, int64_t apart_x) {
    for (int64_t i = grid_thread(); i < outer * length; i += grid_threads()) {
        int64_t o = i / length, at = i - o * length;
        y[o * apart_y + at] = x[o * apart_x + at];
    }
}
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    runs_add_kernel(T *y, const T *x, int64_t outer, int64_t length, int64_t apart_y,
                    int64_t apart_x) {
    for (int64_t i = W * grid_thread(); i < outer * length; i += W * grid_threads()) {
        int64_t o = i / length, at = i - o * length;
        real<T> v[W];
        load<T, W>(v, x + o * apart_x + at);
        give<T, W>(y + o * apart_y + at, v, 1);
    }
}

int cuda_move(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx, int64_t x0,
              int64_t n, int64_t inner, int add, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    int64_t size = pg_dtype_size(dtype), length = n * inner, total = outer * length;
    int64_t apart_y = ny * inner, apart_x = nx * inner;
    if (total <= 0) return PG_OK;
    char *to = (char *)y + y0 * inner * size;
    const char *from = (const char *)x + x0 * inner * size;
    if (outer == 1) apart_y = apart_x = 0; /* not stepped over: no bound on the unit */
    int unit = unit_of((uint64_t)to | (uint64_t)from |
                       (uint64_t)((length | apart_y | apart_x) * size));
    if (add) {
        CUDA_FLOATING("slice", dtype,
                      CUDA_WIDE(unit == 16, T,
                                runs_add_kernel<T, W>
                                <<<cuda_grid(total / W, THREADS), THREADS, 0, s>>>(
                                    (T *)to, (const T *)from, outer, length, apart_y, apart_x)))
        return cuda_launched("slice");
    }
    WITH_UNIT(unit, runs_kernel<U><<<cuda_grid(total * size / unit, THREADS), THREADS, 0, s>>>(
                        (U *)to, (const U *)from, outer, length * size / unit,
                        apart_y * size / unit, apart_x * size / unit))
    return cuda_launched("slice");
}

/* ---- permutes ---- */
template <typename T, bool add> __device__ __forceinline__ void put(T *y, T v) {
    if constexpr (add) *y = from_real<T>(to_real(*y) + to_real(v));
    else *y = v;
}

/* Rows that lie whole in both; the sizes and steps of w count in T. */
template <typename T, bool add>
__global__ void __launch_bounds__(THREADS) rows_kernel(T *y, const T *x, pg_walk w, int64_t count) {
    int last = w.n - 1;
    for (int64_t i = grid_thread(); i < count; i += grid_threads()) {
        int64_t row = i / w.size[last], at = i - row * w.size[last], from, to;
        pg_walk_start(&w, row, last, last, &from, &to);
        put<T, add>(y + to + at, x[from + at]);
    }
}

/* Numbers of a tile's side, and of its line in shared memory: padded so that a column's words lie
 * in 32 banks. */
template <int size> struct tile {
    static constexpr int side = size >= 8 ? 32 : 64, line = side + (size < 4 ? 4 / size : 1);
};

/* A tile of dims a (contiguous in x) and b (the last, contiguous in y) a turn, by 32 x 8 threads:
 * y[.. i .. j] = x[.. j .. i].  Up to 17 KiB of shared memory; 8 or 16 loads a thread in flight. */
template <typename T, bool add>
__global__ void __launch_bounds__(THREADS)
    tiles_kernel(T *y, const T *x, pg_walk w, int a, int64_t jobs) {
    constexpr int side = tile<sizeof(T)>::side;
    __shared__ T space[side][tile<sizeof(T)>::line]; /* [j][i] */
    int b = w.n - 1;
    int64_t na = w.size[a], nb = w.size[b], tiles_b = (nb + side - 1) / side;
    int64_t tiles_a = (na + side - 1) / side;
    for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
        int64_t j0 = job % tiles_b * side, i0 = job / tiles_b % tiles_a * side, from, to;
        pg_walk_start(&w, job / (tiles_a * tiles_b), a, b, &from, &to);
        __syncthreads(); /* those who still read the last tile */
#pragma unroll
        for (int j = 0; j < side; j += 8)
#pragma unroll
            for (int i = 0; i < side; i += 32) {
                int64_t jj = j0 + j + threadIdx.y, ii = i0 + i + threadIdx.x;
                if (jj < nb && ii < na)
                    space[j + threadIdx.y][i + threadIdx.x] = x[from + jj * w.x[b] + ii];
            }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < side; i += 8)
#pragma unroll
            for (int j = 0; j < side; j += 32) {
                int64_t ii = i0 + i + threadIdx.y, jj = j0 + j + threadIdx.x;
                if (ii < na && jj < nb)
                    put<T, add>(y + to + ii * w.y[a] + jj, space[j + threadIdx.x][i + threadIdx.y]);
            }
    }
}

template <typename T, bool add>
static void tiles(T *y, const T *x, const pg_walk &w, int64_t count, cudaStream_t s) {
    constexpr int side = tile<sizeof(T)>::side;
    int a = 0;
    while (w.x[a] != 1) a++;
    int64_t na = w.size[a], nb = w.size[w.n - 1];
    int64_t jobs = count / (na * nb) * ((na + side - 1) / side) * ((nb + side - 1) / side);
    tiles_kernel<T, add><<<cuda_grid(jobs, 1), dim3(32, 8), 0, s>>>(y, x, w, a, jobs);
}

/* The same walk counted in units of `factor` elements, for rows that move whole. */
static pg_walk in_units(pg_walk w, int64_t factor) {
    w.size[w.n - 1] /= factor;
    for (int i = 0; i < w.n - 1; i++) w.x[i] /= factor, w.y[i] /= factor;
    return w;
}

static void permute(void *y, const void *x, const pg_walk &w, int64_t count, int64_t size,
                    cudaStream_t s) {
    if (w.x[w.n - 1] != 1) {
        WITH_UNIT((int)size, tiles<U, false>((U *)y, (const U *)x, w, count, s))
        return;
    }
    uint64_t bits = (uint64_t)y | (uint64_t)x | (uint64_t)(w.size[w.n - 1] * size);
    for (int i = 0; i < w.n - 1; i++) bits |= (uint64_t)((w.x[i] | w.y[i]) * size);
    int unit = unit_of(bits); /* never below size */
    WITH_UNIT(unit,
              rows_kernel<U, false><<<cuda_grid(count * size / unit, THREADS), THREADS, 0, s>>>(
                  (U *)y, (const U *)x, in_units(w, unit / size), count * size / unit))
}

int cuda_permute(void *y, const void *x, int ndim, const int64_t *dims_x, const int32_t *order,
                 int add, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= dims_x[i];
    if (!count) return PG_OK;
    pg_walk w = pg_walk_plan(ndim, dims_x, order);
    if (!add) {
        permute(y, x, w, count, pg_dtype_size(dtype), s);
    } else if (w.x[w.n - 1] != 1) {
        CUDA_FLOATING("permute", dtype, tiles<T, true>((T *)y, (const T *)x, w, count, s))
    } else {
        CUDA_FLOATING("permute", dtype,
                      rows_kernel<T, true><<<cuda_grid(count, THREADS), THREADS, 0, s>>>(
                          (T *)y, (const T *)x, w, count))
    }
    return cuda_launched("permute");
}
