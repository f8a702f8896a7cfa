/* reduce.cu: sums, means, maxima and minima over one dim, and what their gradients need.
 *
 * x is [outer,n,inner].  Where outer * inner gives too few blocks to fill the GPU, the n rows are
 * cut into parts (by the sizes alone, never by the card), a first launch leaves one double for each
 * part, and a second joins them in order.  All sums are in double, as on the CPU. */
#include "common.cuh"

#define THREADS 256
#define LANES   8    /* rows that a block of the column kernel reads at a time */
#define ENOUGH  1024 /* blocks that fill any card; with as many nothing is cut */

template <int kind> __device__ __forceinline__ double neutral(void) {
    return kind == PG_RMAX ? -INFINITY : kind == PG_RMIN ? INFINITY : 0;
}
/* A NaN wins in max and min. */
template <int kind, typename R> __device__ __forceinline__ R join(R a, R b) {
    if (kind == PG_RMAX) return b > a || b != b ? b : a;
    if (kind == PG_RMIN) return b < a || b != b ? b : a;
    return a + b;
}
template <int kind> __device__ __forceinline__ double warp_join(double v) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2)
        v = join<kind>(v, __shfl_xor_sync(0xffffffffu, v, apart));
    return v;
}

/* What becomes of a finished sum: times factor, into y or added to it.  Max and
 * min of nothing are 0. */
typedef struct {
    double factor;
    int add, empty;
} finish;

template <typename T> __device__ __forceinline__ void put(T *y, double v, const finish &f) {
    v = f.empty ? 0 : v * f.factor;
    *y = from_real<T>((real<T>)(f.add ? (double)to_real(*y) + v : v));
}

/* How the n rows are cut: part p holds [p * rows, p * rows + rows). */
typedef struct {
    int64_t n, parts, rows;
} cut;

/* inner = 1: threadIdx.y takes one part of one line of n numbers; y is [lines,parts]. */
template <typename From, typename To, int W, int kind>
__global__ void __launch_bounds__(THREADS)
    lines_kernel(To *y, const From *x, int64_t lines, cut c, finish f) {
    __shared__ double space[THREADS / 32];
    int64_t jobs = lines * c.parts;
    for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < jobs;
         first += (int64_t)gridDim.x * blockDim.y) {
        int64_t job = first + threadIdx.y, k0 = job % c.parts * c.rows, k1 = 0;
        if (job < jobs) k1 = k0 + c.rows < c.n ? k0 + c.rows : c.n;
        const From *line = x + job / c.parts * c.n;
        double acc = neutral<kind>();
#pragma unroll 2
        for (int64_t i = k0 + W * threadIdx.x; i < k1; i += W * blockDim.x) {
            real<From> v[W];
            load<From, W>(v, line + i, k1 - i);
#pragma unroll
            for (int k = 0; k < W; k++)
                if (i + k < k1) acc = join<kind>(acc, (double)v[k]);
        }
        acc = warp_join<kind>(acc);
        int warps = blockDim.x / 32, warp = threadIdx.y * warps;
        __syncthreads(); /* those who still read the last result */
        if (threadIdx.x % 32 == 0) space[warp + threadIdx.x / 32] = acc;
        __syncthreads();
        if (threadIdx.x || job >= jobs) continue;
        for (int w = 1; w < warps; w++) acc = join<kind>(acc, space[warp + w]);
        put(y + job, acc, f);
    }
}

/* How many rows of a type are joined in float before they go to double: turning each number of bf16
 * or f16 into a double would take longer than reading it, and the sum of 4
 * loses next to nothing. */
template <typename T> struct together {
    static constexpr int rows = sizeof(T) == 2 ? 4 : 1;
};

/* A block of 32 x LANES threads takes 32 packs of columns of one part: lane l the rows l, l + 8,
 * ...  whose results are joined in the order of the lanes.  y is [outer,parts,inner]. */
template <typename From, typename To, int W, int kind>
__global__ void __launch_bounds__(32 * LANES)
    columns_kernel(To *y, const From *x, int64_t outer, int64_t inner, cut c, finish f) {
    __shared__ double space[LANES][W][32];
    int64_t tiles = (inner + 32 * W - 1) / (32 * W);
    for (int64_t job = blockIdx.x; job < tiles * c.parts * outer; job += gridDim.x) {
        int64_t column = (job % tiles * 32 + threadIdx.x) * W, line = job / tiles;
        int64_t k0 = line % c.parts * c.rows, k1 = k0 + c.rows < c.n ? k0 + c.rows : c.n;
        if (column >= inner) k1 = 0;
        double acc[W];
#pragma unroll
        for (int k = 0; k < W; k++) acc[k] = neutral<kind>();
        const From *at = x + (line / c.parts * c.n + k0 + threadIdx.y) * inner + column;
        constexpr int few = together<From>::rows;
        int64_t row = k0 + threadIdx.y;
#pragma unroll(few == 1 ? 4 : 1)
        for (; row + (few - 1) * LANES < k1; row += few * LANES, at += few * LANES * inner) {
            real<From> v[few][W];
#pragma unroll
            for (int r = 0; r < few; r++) load<From, W>(v[r], at + r * LANES * inner);
#pragma unroll
            for (int r = 1; r < few; r++)
#pragma unroll
                for (int k = 0; k < W; k++) v[0][k] = join<kind>(v[0][k], v[r][k]);
#pragma unroll
            for (int k = 0; k < W; k++) acc[k] = join<kind>(acc[k], (double)v[0][k]);
        }
        for (; row < k1; row += LANES, at += LANES * inner) {
            real<From> v[W];
            load<From, W>(v, at);
#pragma unroll
            for (int k = 0; k < W; k++) acc[k] = join<kind>(acc[k], (double)v[k]);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < W; k++) space[threadIdx.y][k][threadIdx.x] = acc[k];
        __syncthreads();
        /* lane l finishes elements l, l + 8, ... of each pack */
        for (int k = threadIdx.y; k < W && column < inner; k += LANES) {
            double all = space[0][k][threadIdx.x];
            for (int l = 1; l < LANES; l++) all = join<kind>(all, space[l][k][threadIdx.x]);
            put(y + line * inner + column + k, all, f);
        }
    }
}

/* One launch: x [outer,n,inner] of From to y [outer,parts,inner] of To. */
template <typename From, typename To, int kind>
static void launch(To *y, const From *x, int64_t outer, int64_t inner, cut c, finish f,
                   cudaStream_t s) {
    int64_t size = sizeof(From);
    if (inner == 1) {
        int wide = cuda_aligned(x) && c.n * size % 16 == 0 && c.rows * size % 16 == 0;
        dim3 block = cuda_row_block(wide ? c.rows * size / 16 : c.rows, THREADS);
        CUDA_WIDE(wide, From,
                  lines_kernel<From, To, W, kind>
                  <<<cuda_grid(outer * c.parts, block.y), block, 0, s>>>(y, x, outer, c, f))
    } else {
        int wide = cuda_aligned(x) && inner * size % 16 == 0;
        CUDA_WIDE(wide, From,
                  columns_kernel<From, To, W, kind>
                  <<<cuda_grid((inner + 32 * W - 1) / (32 * W) * c.parts * outer, 1),
                     dim3(32, LANES), 0, s>>>(y, x, outer, inner, c, f))
    }
}

/* Enough blocks together, and in each part at least 64 rows, or 16 KiB of a line.  The partial
 * results stay below 2 * ENOUGH blocks of 256 doubles: CUDA_KEPT. */
static cut cut_of(int64_t outer, int64_t n, int64_t inner, int64_t size) {
    int64_t columns = 32 * (16 / size), blocks = outer * ((inner + columns - 1) / columns);
    int64_t least = inner == 1 ? 16384 / size : 64;
    int64_t parts = pg_max64(1, pg_min64((ENOUGH + blocks - 1) / blocks, n / least));
    int64_t rows = ((n + parts - 1) / parts + 15) / 16 * 16; /* whole packs of any dtype */
    if (parts == 1) return cut{n, 1, n};
    return cut{n, (n + rows - 1) / rows, rows};
}

template <typename T, typename Y, int kind>
static int reduce(Y *y, const T *x, int64_t outer, int64_t n, int64_t inner, int add,
                  cudaStream_t s) {
    int extreme = kind == PG_RMAX || kind == PG_RMIN;
    finish last = {kind == PG_MEAN ? 1 / (double)n : 1, add, extreme && n == 0};
    cut c = cut_of(outer, n, inner, sizeof(T));
    if (c.parts == 1) {
        launch<T, Y, kind>(y, x, outer, inner, c, last, s);
        return PG_OK;
    }
    double *partial = (double *)cuda_kept("reduce", CUDA_KEPT);
    if (!partial) return PG_EDEVICE;
    launch<T, double, kind>(partial, x, outer, inner, c, finish{1, 0, 0}, s);
    launch<double, Y, kind>(y, partial, outer, inner, cut{c.parts, 1, c.parts}, last, s);
    return PG_OK;
}

/* Sums and means may go to f32 beside bf16 and f16; a maximum is a number of x. */
int cuda_reduce(void *y, const void *x, int kind, int64_t outer, int64_t n, int64_t inner, int add,
                int dtype_y, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (outer * inner <= 0) return PG_OK;
#define ONE(K)                                                                                     \
    case K:                                                                                        \
        CUDA_MIXED("reduce", dtype, dtype_y,                                                       \
                   PG_TRY((reduce<T, Y, K>((Y *)y, (const T *)x, outer, n, inner, add, s))))       \
        break;
    switch (kind) { ONE(PG_SUM) ONE(PG_MEAN) ONE(PG_RMAX) ONE(PG_RMIN) }
#undef ONE
    return cuda_launched("reduce");
}

/* y [outer,n,inner] (+)= scale * x [outer,inner].  A pack stays within a line of y, or, with
 * inner = 1, within the n copies of one number.  Writes y once; x comes from the cache. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) expand_kernel(T *y, const T *x, real<T> scale, int64_t n,
                                                         int64_t inner, int64_t total, int add) {
    for (int64_t i = W * grid_thread(); i < total; i += W * grid_threads()) {
        real<T> v[W];
        if (inner == 1) {
            real<T> one = to_real(x[i / n]);
#pragma unroll
            for (int k = 0; k < W; k++) v[k] = one;
        } else {
            load<T, W>(v, x + i / (n * inner) * inner + i % inner);
        }
#pragma unroll
        for (int k = 0; k < W; k++) v[k] *= scale;
        give<T, W>(y + i, v, add);
    }
}

int cuda_expand(void *y, const void *x, double scale, int64_t outer, int64_t n, int64_t inner,
                int add, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    int64_t total = outer * n * inner, line = inner == 1 ? n : inner;
    if (total <= 0) return PG_OK;
    CUDA_FLOATING("expand", dtype,
                  CUDA_WIDE(cuda_aligned(y, inner == 1 ? NULL : x) && line * sizeof(T) % 16 == 0, T,
                            expand_kernel<T, W>
                            <<<cuda_grid((total + W - 1) / W, THREADS), THREADS, 0, s>>>(
                                (T *)y, (const T *)x, (real<T>)scale, n, inner, total, add)))
    return cuda_launched("expand");
}

/* A NaN is found like a number. */
template <typename T> __device__ __forceinline__ bool hit(T x, T y) {
    real<T> a = to_real(x), b = to_real(y);
    return a == b || (a != a && b != b);
}
template <typename T>
__device__ __forceinline__ void give_one(T *dx, const T *dy, bool chosen, int add) {
    real<T> v = chosen ? to_real(*dy) : 0;
    *dx = from_real<T>(add ? to_real(*dx) + v : v);
}

/* inner = 1: threadIdx.y has a line of n numbers: first look for the place, then write all. */
template <typename T>
__global__ void pick_lines_kernel(T *dx, const T *dy, const T *x, const T *y, int64_t lines,
                                  int64_t n, int add) {
    __shared__ int64_t space[1024];
    for (int64_t start = (int64_t)blockIdx.x * blockDim.y; start < lines;
         start += (int64_t)gridDim.x * blockDim.y) {
        int64_t line = start + threadIdx.y, first = INT64_MAX;
        if (line < lines)
            for (int64_t i = threadIdx.x; i < n && first == INT64_MAX; i += blockDim.x)
                if (hit(x[line * n + i], y[line])) first = i;
        first = -row_max(-first, space);
        if (line < lines)
            for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
                give_one(dx + line * n + i, dy + line, i == first, add);
    }
}

/* A thread walks down one column. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    pick_columns_kernel(T *dx, const T *dy, const T *x, const T *y, int64_t columns, int64_t n,
                        int64_t inner, int add) {
    for (int64_t c = grid_thread(); c < columns; c += grid_threads()) {
        bool found = false;
        for (int64_t k = 0, i = c / inner * n * inner + c % inner; k < n; k++, i += inner) {
            bool now = !found && hit(x[i], y[c]);
            found |= now;
            give_one(dx + i, dy + c, now, add);
        }
    }
}

/* Reads x, writes dx (and reads it where added to).  Nothing here is often large: no packs. */
int cuda_reduce_grad(void *dx, const void *dy, const void *x, const void *y, int kind,
                     int64_t outer, int64_t n, int64_t inner, int add, int dtype,
                     pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    (void)kind; /* max and min alike: where x is y */
    if (outer * n * inner <= 0) return PG_OK;
    dim3 block = cuda_row_block(n, 1024);
    if (inner == 1) {
        CUDA_FLOATING("reduce_grad", dtype,
                      pick_lines_kernel<T><<<cuda_grid(outer, block.y), block, 0, s>>>(
                          (T *)dx, (const T *)dy, (const T *)x, (const T *)y, outer, n, add))
    } else {
        CUDA_FLOATING(
            "reduce_grad", dtype,
            pick_columns_kernel<T><<<cuda_grid(outer * inner, THREADS), THREADS, 0, s>>>(
                (T *)dx, (const T *)dy, (const T *)x, (const T *)y, outer * inner, n, inner, add))
    }
    return cuda_launched("reduce_grad");
}
