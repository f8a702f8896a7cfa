/* loss.cu: softmax, log-softmax, and the cross-entropy that never stores probabilities.
 *
 * A block takes a row.  One reading gives its maximum and the sum of exponentials together: each
 * thread keeps both for what it has seen and rescales its sum when its maximum grows; the threads'
 * are joined in a fixed order.  The second reading, of softmax and its gradient, comes from the L2
 * cache where rows are vocabularies.  Rows off a 16-byte boundary: walk_row() in rows.cuh.
 * Block: 32 to 512 threads by the row's length.  Bytes moved, of N rows of V numbers of s bytes:
 * cross-entropy and the stats of a part NVs (read), their gradient 2NVs (read, written), in place
 * or not; joining R parts 8NR and 4N or 8N.  A column that is padding is not read; the gradient
 * writes its zero.  Formulas: loss_typed.h.
 * Source of the joint pass: Milakov and Gimelshein 2018. */
#include "rows.cuh" /* first: it gives the C headers C names */
#include "ids.h"

#define SUM_THREADS 1024
/* Three rows at a time on a multiprocessor, so that one's joining hides
 * behind the others' loads. */
#define LOSS_BOUNDS(T) __launch_bounds__(512, sizeof(T) == 8 ? 1 : 3)

/* Room for the sums of a block of one row. */
template <typename T> struct row_space {
    real<T> most[32];
    double sum[32];
};

/* *most = max x; returns the sum of exp(x - max): equal for all threads of the block.  A NaN among
 * x may miss the maximum, never the sum. */
template <typename T, int W>
__device__ __forceinline__ double row_exponentials(const T *x, int64_t v, real<T> *most,
                                                   row_space<T> *space) {
    real<T> m = -INFINITY, sum = 0;
    walk_row<W>(x, v, [&](auto &values, int64_t) {
        constexpr int N = sizeof values / sizeof *values;
        real<T> larger_m = m;
#pragma unroll
        for (int k = 0; k < N; k++) larger_m = fmax(values[k], larger_m);
        if (larger_m > m) sum *= exp_for<T>(m - larger_m), m = larger_m;
        real<T> shift = m > -INFINITY ? m : (real<T>)0; /* before anything finite: exp(-inf) = 0 */
#pragma unroll
        for (int k = 0; k < N; k++) sum += exp_for<T>(values[k] - shift);
    });
    real<T> all = row_max(m, space->most);
    *most = all;
    return row_sum(m > -INFINITY ? (double)sum * exp((double)(m - all)) : (double)sum, space->sum);
}

template <typename T, int W>
__global__ void softmax_kernel(T *y, const T *x, int64_t v, int logarithm) {
    __shared__ row_space<T> space;
    const T *row = x + blockIdx.x * v;
    T *to = y + blockIdx.x * v;
    real<T> most;
    double sum = row_exponentials<T, W>(row, v, &most, &space);
    real<T> log_sum = (real<T>)log(sum), inverse = (real<T>)(1 / sum);
    walk_row<W>(row, v, [&](auto &values, int64_t i) {
        constexpr int N = sizeof values / sizeof *values;
#pragma unroll
        for (int k = 0; k < N; k++) {
            real<T> d = values[k] - most;
            values[k] = logarithm ? d - log_sum : exp_for<T>(d) * inverse;
        }
        store<T, N>(to + i, values);
    });
}

/* softmax: dx = y (dy - sum(dy y));  log-softmax: dx = dy - exp(y) sum(dy).  dx may be dy. */
template <typename T, int W>
__global__ void softmax_grad_kernel(T *dx, const T *dy, const T *y, int64_t v, int logarithm,
                                    int add) {
    __shared__ double space[32];
    int64_t from = blockIdx.x * v;
    double part = 0;
    walk_row<W>(y + from, v, [&](auto &p, int64_t i) {
        constexpr int N = sizeof p / sizeof *p;
        real<T> d[N];
        load<T, N>(d, dy + from + i);
#pragma unroll
        for (int k = 0; k < N; k++) part += (double)(logarithm ? d[k] : d[k] * p[k]);
    });
    real<T> sum = (real<T>)row_sum(part, space);
    walk_row<W>(y + from, v, [&](auto &p, int64_t i) {
        constexpr int N = sizeof p / sizeof *p;
        real<T> d[N];
        load<T, N>(d, dy + from + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            d[k] = logarithm ? d[k] - exp_for<T>(p[k]) * sum : p[k] * (d[k] - sum);
        give<T, N>(dx + from + i, d, add);
    });
}

/* ---- cross-entropy ---- */
template <typename T, int W>
__global__ void LOSS_BOUNDS(T)
    cross_entropy_kernel(real<T> *rows, real<T> *lse, double *loss, const T *logits,
                         const void *targets, int64_t v, int64_t ignore, int dtype_ids) {
    __shared__ row_space<T> space;
    int64_t i = blockIdx.x, target = id_at(targets, i, dtype_ids);
    double mine = 0, log_sum = 0;
    real<T> most = 0;
    if (target != ignore) { /* the same for the whole block */
        const T *row = logits + i * v;
        double logit = (double)to_real(row[target]);
        log_sum = log(row_exponentials<T, W>(row, v, &most, &space));
        mine = log_sum - (logit - (double)most);
    }
    if (threadIdx.x) return;
    loss[i] = mine;
    lse[i] = (real<T>)((double)most + log_sum);
    if (rows) rows[i] = (real<T>)mine;
}

/* stats [2,n]; both numbers of an ignored row are 0. */
template <typename T, int W>
__global__ void LOSS_BOUNDS(T)
    vocab_stats_kernel(real<T> *stats, const T *logits, const void *targets, int64_t v,
                       int64_t first, int64_t valid, int64_t ignore, int dtype_ids) {
    __shared__ row_space<T> space;
    int64_t i = blockIdx.x, target = id_at(targets, i, dtype_ids);
    real<T> most = 0, logit = 0;
    double log_sum = 0;
    if (target != ignore) {
        const T *row = logits + i * v;
        if (target >= first && target - first < valid) logit = to_real(row[target - first]);
        double sum = row_exponentials<T, W>(row, valid, &most, &space);
        log_sum = valid ? log(sum) : 0; /* no columns: most is -inf, and so is the sum's log */
    }
    if (threadIdx.x) return;
    stats[i] = (real<T>)((double)most + log_sum);
    stats[gridDim.x + i] = logit;
}

/* A thread joins the r parts of its row: parts [r,2,n]. */
template <typename R>
__global__ void vocab_loss_kernel(R *rows, R *lse, double *loss, const R *parts,
                                  const void *targets, int64_t r, int64_t n, int64_t ignore,
                                  int dtype_ids) {
    for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
        double most = -INFINITY, sum = 0, logit = 0, all = 0;
        if (id_at(targets, i, dtype_ids) != ignore) {
            for (int64_t k = 0; k < r; k++) {
                most = fmax(most, (double)parts[2 * k * n + i]);
                logit += (double)parts[(2 * k + 1) * n + i];
            }
            for (int64_t k = 0; k < r; k++) sum += exp((double)parts[2 * k * n + i] - most);
            all = most + log(sum);
        }
        loss[i] = all - logit;
        lse[i] = (R)all;
        if (rows) rows[i] = (R)loss[i];
    }
}

/* One block: the order of the sum follows from n alone. */
template <typename R>
__global__ void __launch_bounds__(SUM_THREADS)
    cross_entropy_sum_kernel(R *out, const double *loss, const void *targets, int64_t n,
                             int64_t ignore, const double *step, int dtype_ids) {
    __shared__ double space[32];
    double sum = 0, valid = 0;
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) {
        sum += loss[i];
        valid += id_at(targets, i, dtype_ids) != ignore;
    }
    sum = row_sum(sum, space);
    valid = row_sum(valid, space);
    if (threadIdx.x) return;
    out[0] = (R)(step ? sum * step[PG_STEP_INV_TOKENS] : valid > 0 ? sum / valid : 0);
    out[1] = (R)valid;
}

/* The columns are ids [first, first + valid).  dlogits may be logits: a thread writes only what it
 * has read. */
template <typename T, int W>
__global__ void LOSS_BOUNDS(T)
    cross_entropy_grad_kernel(T *dlogits, const real<T> *dloss, int per_row, const T *logits,
                              const void *targets, const real<T> *lse, const real<T> *out,
                              int64_t v, int64_t first, int64_t valid, int64_t ignore,
                              const double *step, int add, int dtype_ids) {
    int64_t row = blockIdx.x, target = id_at(targets, row, dtype_ids);
    int64_t used = target == ignore ? 0 : valid; /* the others have gradient 0 */
    int64_t column = target >= first && target - first < used ? target - first : -W;
    double mean = per_row      ? 1
                  : step       ? step[PG_STEP_INV_TOKENS]
                  : out[1] > 0 ? 1 / (double)out[1]
                               : 0;
    real<T> factor = (real<T>)(mean * (double)dloss[per_row ? row : 0]), shift = lse[row];
    T *to = dlogits + row * v;
    walk_row<W>(logits + row * v, used, [&](auto &x, int64_t i) {
        constexpr int N = sizeof x / sizeof *x;
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = exp_for<T>(x[k] - shift) * factor;
        if (column >= i && column < i + N) /* one pack of the row */
#pragma unroll
            for (int k = 0; k < N; k++)
                if (i + k == column) x[k] -= factor;
        give<T, N>(to + i, x, add);
    });
    if (!add) clear_row<W>(to + used, v - used);
}

/* ---- launching ---- */
int cuda_softmax(void *y, const void *x, int64_t n, int64_t v, int log, int dtype,
                 pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n * v == 0) return PG_OK;
    CUDA_FLOATING("softmax", dtype,
                  CUDA_WIDE(cuda_aligned(y, x), T,
                            softmax_kernel<T, W><<<cuda_blocks(n), row_threads(v, W), 0, s>>>(
                                (T *)y, (const T *)x, v, log)))
    return cuda_launched("softmax");
}

int cuda_softmax_grad(void *dx, const void *dy, const void *y, int64_t n, int64_t v, int log,
                      int add, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n * v == 0) return PG_OK;
    CUDA_FLOATING("softmax_grad", dtype,
                  CUDA_WIDE(cuda_aligned(dx, dy, y), T,
                            softmax_grad_kernel<T, W><<<cuda_blocks(n), row_threads(v, W), 0, s>>>(
                                (T *)dx, (const T *)dy, (const T *)y, v, log, add)))
    return cuda_launched("softmax_grad");
}

int64_t cuda_cross_entropy_scratch(int64_t n) { return n * (int64_t)sizeof(double); }

/* out from the loss of each row; dtype: of out. */
static void mean_loss(void *out, const double *loss, const void *targets, int64_t n, int64_t ignore,
                      const double *step, int dtype, int dtype_ids, cudaStream_t s) {
    if (dtype == PG_F64)
        cross_entropy_sum_kernel<<<1, SUM_THREADS, 0, s>>>((double *)out, loss, targets, n, ignore,
                                                           step, dtype_ids);
    else
        cross_entropy_sum_kernel<<<1, SUM_THREADS, 0, s>>>((float *)out, loss, targets, n, ignore,
                                                           step, dtype_ids);
}

int cuda_cross_entropy(void *out, void *rows, void *lse, const void *logits, const void *targets,
                       int64_t n, int64_t v, int64_t ignore, const double *step, void *scratch,
                       int dtype, int dtype_ids, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    double *loss = (double *)scratch;
    if (n)
        CUDA_FLOATING("cross_entropy", dtype,
                      CUDA_WIDE(cuda_aligned(logits), T,
                                cross_entropy_kernel<T, W>
                                <<<cuda_blocks(n), row_threads(v, W), 0, s>>>(
                                    (real<T> *)rows, (real<T> *)lse, loss, (const T *)logits,
                                    targets, v, ignore, dtype_ids)))
    mean_loss(out, loss, targets, n, ignore, step, dtype, dtype_ids, s);
    return cuda_launched("cross_entropy");
}

int cuda_cross_entropy_grad(void *dlogits, const void *dloss, int per_row, const void *logits,
                            const void *targets, const void *lse, const void *out, int64_t n,
                            int64_t v, int64_t first, int64_t valid, int64_t ignore,
                            const double *step, int add, int dtype, int dtype_ids,
                            pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n * v == 0) return PG_OK;
    CUDA_FLOATING("cross_entropy_grad", dtype,
                  CUDA_WIDE(cuda_aligned(dlogits, logits), T,
                            cross_entropy_grad_kernel<T, W>
                            <<<cuda_blocks(n), row_threads(v, W), 0, s>>>(
                                (T *)dlogits, (const real<T> *)dloss, per_row, (const T *)logits,
                                targets, (const real<T> *)lse, (const real<T> *)out, v, first,
                                valid, ignore, step, add, dtype_ids)))
    return cuda_launched("cross_entropy_grad");
}

int cuda_vocab_stats(void *stats, const void *logits, const void *targets, int64_t n, int64_t v,
                     int64_t first, int64_t valid, int64_t ignore, int dtype, int dtype_ids,
                     pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n == 0) return PG_OK;
    CUDA_FLOATING("vocab_stats", dtype,
                  CUDA_WIDE(cuda_aligned(logits), T,
                            vocab_stats_kernel<T, W>
                            <<<cuda_blocks(n), row_threads(valid, W), 0, s>>>(
                                (real<T> *)stats, (const T *)logits, targets, v, first, valid,
                                ignore, dtype_ids)))
    return cuda_launched("vocab_stats");
}

template <typename R>
static void join_parts(void *rows, void *lse, double *loss, const void *parts, const void *targets,
                       int64_t r, int64_t n, int64_t ignore, int dtype_ids, cudaStream_t s) {
    vocab_loss_kernel<<<cuda_grid(n, 128), 128, 0, s>>>((R *)rows, (R *)lse, loss, (const R *)parts,
                                                        targets, r, n, ignore, dtype_ids);
}

int cuda_vocab_loss(void *out, void *rows, void *lse, const void *parts, const void *targets,
                    int64_t r, int64_t n, int64_t ignore, const double *step, void *scratch,
                    int dtype, int dtype_ids, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    double *loss = (double *)scratch;
    if (n && dtype == PG_F64)
        join_parts<double>(rows, lse, loss, parts, targets, r, n, ignore, dtype_ids, s);
    else if (n) join_parts<float>(rows, lse, loss, parts, targets, r, n, ignore, dtype_ids, s);
    mean_loss(out, loss, targets, n, ignore, step, dtype, dtype_ids, s);
    return cuda_launched("vocab_loss");
}
