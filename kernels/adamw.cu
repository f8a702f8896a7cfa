/* adamw.cu: what happens between the last gradient and the next step: the sum of squares, clipping,
 * the count of bad numbers, and the updates of AdamW and SGD.
 *
 * The step block lies in device memory and is read here, so nothing waits for the host, except
 * count_nonfinite, which answers.  A thread takes a pack of 16 bytes, looks up its run by halving
 * (the ends stay in the cache), and works out the run's numbers in double, as adamw.c does, when
 * they change.  Grid-stride loops, 256 threads a block. */
#include "common.cuh"

#define THREADS 256

/* The first run that ends after element i. */
__device__ __forceinline__ int64_t run_of(const int64_t *ends, int64_t runs, int64_t i) {
    int64_t low = 0, high = runs;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ends[middle] > i) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* How the numbers of a segment are found: ends [runs], factors [runs,2] (decay, rate). */
typedef struct {
    const int64_t *ends;
    const float *factors;
    int64_t runs;
} segment;

/* A run's numbers, rounded from double.  decay: for sgd as given, for adamw 1 - rate * decay. */
template <typename R> struct pace { R decay, rate; };

/* visit(k, run's numbers) for the elements i .. i + count of a pack that belong to a run. */
template <int W, typename R, typename M, typename F>
__device__ __forceinline__ void each_element(const segment &g, int64_t i, int64_t n, int64_t *last,
                                             pace<R> *p, M make, F visit) {
    int64_t run = run_of(g.ends, g.runs, i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        if (i + k >= n) break;
        while (run < g.runs && g.ends[run] <= i + k) run++;
        if (run >= g.runs) break;
        if (run != *last) {
            *p = make((double)g.factors[2 * run], (double)g.factors[2 * run + 1]);
            *last = run;
        }
        visit(k, *p);
    }
}

/* The order of operations of adamw_typed.h.  Moves 7 numbers an element: reads value, grad, m, v,
 * writes value, m, v; in f32 28 bytes. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(T *value, const T *grad, T *m, T *v, int64_t n, segment g, const double *step,
                 double beta1, double beta2, double eps64) {
    typedef real<T> R;
    if (step[PG_STEP_FINITE] == 0) return;
    const double rate64 = step[PG_STEP_RATE], bias1 = step[PG_STEP_BIAS1];
    const R clip = (R)step[PG_STEP_CLIP], root_bias2 = (R)sqrt(step[PG_STEP_BIAS2]);
    const R keep2 = (R)beta2, new1 = (R)(1 - beta1), new2 = (R)(1 - beta2), eps = (R)eps64;
    int64_t last = -1;
    pace<R> p = {0, 0};
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        R value_[W], grad_[W], m_[W], v_[W];
        load<T, W>(value_, value + i, n - i);
        load<T, W>(grad_, grad + i, n - i);
        load<T, W>(m_, m + i, n - i);
        load<T, W>(v_, v + i, n - i);
        each_element<W>(
            g, i, n, &last, &p,
            [&](double decay, double factor) {
                double rate = rate64 * factor;
                return pace<R>{(R)(1 - rate * decay), (R)(rate / bias1)};
            },
            [&](int k, const pace<R> &a) {
                R d = grad_[k] * clip;
                m_[k] += new1 * (d - m_[k]);
                v_[k] = v_[k] * keep2 + new2 * d * d;
                value_[k] = value_[k] * a.decay - a.rate * m_[k] / (sqrt(v_[k]) / root_bias2 + eps);
            });
        store<T, W>(value + i, value_, n - i);
        store<T, W>(m + i, m_, n - i);
        store<T, W>(v + i, v_, n - i);
    }
}

int cuda_adamw(void *value, const void *grad, void *m, void *v, int64_t n, const int64_t *ends,
               const float *factors, int64_t runs, const double *step, double beta1, double beta2,
               double eps, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    segment g = {ends, factors, runs};
    CUDA_FLOATING(
        "adamw", dtype,
        CUDA_WIDE(cuda_aligned(value, grad, m, v), T,
                  adamw_kernel<T, W><<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                      (T *)value, (const T *)grad, (T *)m, (T *)v, n, g, step, beta1, beta2, eps)))
    return cuda_launched("adamw");
}

/* m NULL: no momentum.  momentum: m = old m + new g, and the step is now * g + ahead * m.  Moves 5
 * numbers an element, 3 without m. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS)
    sgd_kernel(T *value, const T *grad, T *m, int64_t n, segment g, const double *step,
               double momentum, double dampening, int nesterov, int first) {
    typedef real<T> R;
    if (step[PG_STEP_FINITE] == 0) return;
    const double rate64 = step[PG_STEP_RATE];
    const R clip = (R)step[PG_STEP_CLIP], old = (R)momentum, fresh = (R)(1 - dampening);
    const R now = nesterov || !m ? 1 : 0, ahead = nesterov ? old : m ? 1 : 0;
    int64_t last = -1;
    pace<R> p = {0, 0};
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        R value_[W], grad_[W], m_[W] = {};
        load<T, W>(value_, value + i, n - i);
        load<T, W>(grad_, grad + i, n - i);
        if (m) load<T, W>(m_, m + i, n - i);
        each_element<W>(
            g, i, n, &last, &p,
            [&](double decay, double factor) {
                return pace<R>{(R)decay, (R)(rate64 * factor)};
            },
            [&](int k, const pace<R> &a) {
                R d = grad_[k] * clip + a.decay * value_[k];
                if (m) m_[k] = first ? d : old * m_[k] + fresh * d;
                value_[k] -= a.rate * (now * d + (m ? ahead * m_[k] : 0));
            });
        store<T, W>(value + i, value_, n - i);
        if (m) store<T, W>(m + i, m_, n - i);
    }
}

int cuda_sgd(void *value, const void *grad, void *m, int64_t n, const int64_t *ends,
             const float *factors, int64_t runs, const double *step, double momentum,
             double dampening, int nesterov, int first, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    segment g = {ends, factors, runs};
    CUDA_FLOATING("sgd", dtype,
                  CUDA_WIDE(cuda_aligned(value, grad, m), T,
                            sgd_kernel<T, W>
                            <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                                (T *)value, (const T *)grad, (T *)m, n, g, step, momentum,
                                dampening, nesterov, first)))
    return cuda_launched("sgd");
}

/* ---- norms of gradients ---- */
#define PARTS 1024 /* blocks of sumsq: a full card, and a number that no card changes */

/* parts[block] = sum of squares over its elements, in double.  Reads x once. */
template <typename T, int W>
__global__ void __launch_bounds__(THREADS) squares_kernel(double *parts, const T *x, int64_t n) {
    __shared__ double space[32];
    double sum = 0;
#pragma unroll 2
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        real<T> v[W];
        load<T, W>(v, x + i, n - i);
#pragma unroll
        for (int k = 0; k < W; k++) sum += (double)v[k] * (double)v[k];
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

int cuda_sumsq(double *step, const void *x, int64_t n, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    double *parts = (double *)cuda_kept("sumsq", CUDA_KEPT);
    if (!parts) return PG_EDEVICE;
    CUDA_FLOATING("sumsq", dtype,
                  CUDA_WIDE(cuda_aligned(x), T,
                            squares_kernel<T, W><<<PARTS, THREADS, 0, s>>>(parts, (const T *)x, n)))
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
