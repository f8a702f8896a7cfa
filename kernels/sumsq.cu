/* sumsq.cu: the norm of the gradient: the sum of squares, each run with its weight, clipping, and
 * the count of bad numbers.  CPU twins: adamw.c.
 *
 * The step block lies in device memory and is written here, so nothing waits for the host, except
 * count_nonfinite, which answers. */
#include "runs.cuh"

#define THREADS 256
#define PARTS   512 /* blocks of sumsq, on any card: four a multiprocessor of 132 */
#define AHEAD   4   /* packs a thread asks for before it adds the first: 64 bytes of 1024 threads */

/* parts[block] = sum of weight * x^2 over its elements, in double.  Reads x once.  g.ends NULL: all
 * weights are 1. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    squares_kernel(double *parts, const T *x, int64_t n, segment g) {
    __shared__ double space[32];
    double sum = 0, weight = 0;
    run_place at = {-1, 0};
    auto enter = [&](int64_t run) { weight = (double)g.factors[run]; };
    auto add = [&](const T *v, int64_t i) { /* W numbers */
        double squares = 0;
        if (!g.ends) {
#pragma unroll
            for (int k = 0; k < W; k++) squares += (double)to_real(v[k]) * (double)to_real(v[k]);
            sum += squares;
            return;
        }
        each_element<W>(g, i, n, &at, enter, [&](int k) {
            sum += weight * ((double)to_real(v[k]) * (double)to_real(v[k]));
        });
    };
    int64_t packs = n / W, apart = grid_threads();
    for (int64_t p = grid_thread(); p < packs; p += AHEAD * apart) {
        pack<T, W> ahead[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (p + k * apart < packs) ahead[k] = load_pack<W>(x + (p + k * apart) * W);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (p + k * apart < packs) add(ahead[k].at, (p + k * apart) * W);
    }
    int64_t last = packs * W + grid_thread(); /* what no pack holds: fewer than W, one a thread */
    if (last < n) {
        double v = (double)to_real(x[last]);
        if (!g.ends) sum += v * v;
        else if (to_run(g, last, &at, enter)) sum += weight * (v * v);
    }
    sum = row_sum(sum, space);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
/* One block: step[SUMSQ] += the parts, by a tree of fixed shape. */
__global__ void __launch_bounds__(PARTS) add_squares_kernel(double *step, const double *parts) {
    __shared__ double space[32];
    double sum = row_sum(parts[threadIdx.x], space);
    if (threadIdx.x == 0) step[PG_STEP_SUMSQ] += sum;
}

int cuda_sumsq(double *step, const void *x, int64_t n, const int64_t *ends, const float *weights,
               int64_t runs, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    double *parts = (double *)cuda_kept("sumsq", CUDA_KEPT);
    if (!parts) return PG_EDEVICE;
    segment g = {ends, weights, runs};
    CUDA_FLOATING("sumsq", dtype,
                  CUDA_WIDE(cuda_aligned(x), T,
                            squares_kernel<T, W>
                            <<<PARTS, THREADS, 0, s>>>(parts, (const T *)x, n, g)))
    add_squares_kernel<<<1, PARTS, 0, s>>>(step, parts);
    return cuda_launched("sumsq");
}

/* The factor undoes the loss scale and clips in one go; norms are of the unscaled gradient. */
__global__ void clip_kernel(double *step, double max_norm) {
    double scale = step[PG_STEP_SCALE], norm = sqrt(step[PG_STEP_SUMSQ]) / scale;
    step[PG_STEP_NORM] = norm;
    step[PG_STEP_FINITE] = isfinite(norm) ? 1 : 0;
    step[PG_STEP_CLIP] = (max_norm > 0 && norm > max_norm ? max_norm / norm : 1) / scale;
}

int cuda_clip(double *step, double max_norm, pg_stream stream) {
    clip_kernel<<<1, 1, 0, (cudaStream_t)stream>>>(step, max_norm);
    return cuda_launched("clip");
}

/* Whole numbers may be added in any order, so one counter serves all blocks. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    bad_kernel(unsigned long long *count, const T *x, int64_t n) {
    int bad = 0;
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        real<T> v[W];
        load<T, W>(v, x + i, n - i);
#pragma unroll
        for (int k = 0; k < W; k++) bad += !isfinite(v[k]);
    }
    bad = warp_sum(bad);
    if (bad && threadIdx.x % 32 == 0) atomicAdd(count, (unsigned long long)bad);
}

/* Waits for the device.  Reads x once. */
int64_t cuda_count_nonfinite(const void *x, int64_t n, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (pg_is_integer(dtype) || n <= 0) return 0;
    unsigned long long *count = (unsigned long long *)cuda_kept("count_nonfinite", CUDA_KEPT);
    if (!count) return PG_EDEVICE;
    PG_TRY(cuda_check("count_nonfinite", cudaMemsetAsync(count, 0, sizeof *count, s)));
    CUDA_FLOATING(
        "count_nonfinite", dtype,
        CUDA_WIDE(cuda_aligned(x), T,
                  bad_kernel<T, W>
                  <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(count, (const T *)x, n)))
    PG_TRY(cuda_launched("count_nonfinite"));
    unsigned long long found = 0;
    PG_TRY(cuda_check("count_nonfinite",
                      cudaMemcpyAsync(&found, count, sizeof found, cudaMemcpyDeviceToHost, s)));
    PG_TRY(cuda_check("count_nonfinite", cudaStreamSynchronize(s)));
    return (int64_t)found;
}
