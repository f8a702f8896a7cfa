/* adamw.cu: the updates of AdamW and SGD, with or without masters, and masters joined and split.
 *
 * The step block lies in device memory and is read here, so nothing waits for the host.  A thread
 * takes as many numbers as fill 16 bytes of the widest tensor (4 of f32, beside which bf16 and i16
 * move 8 bytes), looks up its run by halving when it leaves the last one (the ends stay in the
 * cache), and works out the run's numbers in double, as adamw.c does.  Grid-stride loops, 256
 * threads a block.  Masters: kernels.h and master.h; a step with them is a step in f32. */
#include "runs.cuh"

#define THREADS 256

/* A run's numbers, rounded from double.  decay: for sgd as given, for adamw 1 - rate * decay. */
template <typename R> struct pace { R decay, rate; };

/* ---- values and masters ---- */
struct no_master { char none; }; /* the value is all there is */

/* Reads the number that value and master stand for, and writes both.  M: no_master, int16_t (the
 * bits are (value << 16) + master) or float (the number itself; value is its rounding). */
template <typename T, typename M, int W>
__device__ __forceinline__ void load_value(real<T> (&v)[W], const T *value, const M *master,
                                           int64_t count) {
    if constexpr (sizeof(M) == 1) {
        load<T, W>(v, value, count);
    } else if constexpr (sizeof(M) == 4) {
        load<M, W>(v, master, count);
    } else {
        const uint16_t *high = (const uint16_t *)value;
        pack<uint16_t, W> h;
        pack<int16_t, W> low;
        if (W == 1 || count >= W) h = load_pack<W>(high), low = load_pack<W>(master);
#pragma unroll
        for (int k = 0; k < W; k++) {
            if (W > 1 && count < W && k < count) h.at[k] = high[k], low.at[k] = master[k];
            v[k] = __uint_as_float(((uint32_t)h.at[k] << 16) + (uint32_t)(int32_t)low.at[k]);
        }
    }
}

/* A NaN becomes one that rounding cannot carry over into the sign: the value must show it. */
__device__ __forceinline__ uint32_t bits_of(float x) {
    uint32_t bits = __float_as_uint(x);
    return x != x ? (bits & 0x80000000u) | 0x7fc00000u : bits;
}

template <typename T, typename M, int W>
__device__ __forceinline__ void store_value(T *value, M *master, const real<T> (&v)[W],
                                            int64_t count) {
    if constexpr (sizeof(M) != 2) {
        store<T, W>(value, v, count);
        if constexpr (sizeof(M) == 4) store<M, W>(master, v, count);
    } else {
        uint16_t *high = (uint16_t *)value;
        pack<uint16_t, W> h;
        pack<int16_t, W> low;
#pragma unroll
        for (int k = 0; k < W; k++) {
            uint32_t bits = bits_of(v[k]);
            h.at[k] = (uint16_t)((bits + 0x8000u) >> 16);
            low.at[k] = (int16_t)(uint16_t)bits; /* from 0x8000 on, the value is one more */
            if (W > 1 && count < W && k < count) high[k] = h.at[k], master[k] = low.at[k];
        }
        if (W == 1 || count >= W) store_pack<W>(high, h), store_pack<W>(master, low);
    }
}

/* A segment's tensors; m and v of S, grad of G. */
template <typename T, typename M, typename G, typename S> struct state {
    T *value;
    M *master;
    const G *grad;
    S *m, *v;
    int64_t n;
};

/* The statement for T and M by the dtypes that pg.h lists. */
#define WITH_MASTER(op, ...)                                                                       \
    if (dtype_master == PG_I16 && dtype == PG_BF16) {                                              \
        typedef bf16 T;                                                                            \
        typedef int16_t M;                                                                         \
        __VA_ARGS__;                                                                               \
    } else if (dtype_master == PG_F32 && dtype == PG_BF16) {                                       \
        typedef bf16 T;                                                                            \
        typedef float M;                                                                           \
        __VA_ARGS__;                                                                               \
    } else if (dtype_master == PG_F32 && dtype == PG_F16) {                                        \
        typedef f16 T;                                                                             \
        typedef float M;                                                                           \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        return pg_fail(PG_EINVAL, "%s: %s has no such master; bf16 has one of i16 or f32, f16 of " \
                       "f32, f32 and f64 have none", op, pg_dtype_name(dtype));                    \
    }
#define WITH_MOMENTS(...)                                                                          \
    if (dtype_m == PG_BF16) {                                                                      \
        typedef bf16 S;                                                                            \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        typedef float S;                                                                           \
        __VA_ARGS__;                                                                               \
    }
#define WITH_GRAD(...)                                                                             \
    if (dtype_grad == PG_F32) {                                                                    \
        typedef float G;                                                                           \
        WITH_MOMENTS(__VA_ARGS__)                                                                  \
    } else {                                                                                       \
        typedef T G;                                                                               \
        WITH_MOMENTS(__VA_ARGS__)                                                                  \
    }
#define PLAIN(T_, ...)                                                                             \
    typedef T_ T;                                                                                  \
    typedef no_master M;                                                                           \
    typedef T G;                                                                                   \
    typedef T S;                                                                                   \
    __VA_ARGS__;
/* The statement for T, M, G and S. */
#define WITH_STATE(op, ...)                                                                        \
    if (dtype_master < 0 && dtype == PG_F32) {                                                     \
        PLAIN(float, __VA_ARGS__)                                                                  \
    } else if (dtype_master < 0 && dtype == PG_F64) {                                              \
        PLAIN(double, __VA_ARGS__)                                                                 \
    } else                                                                                         \
        WITH_MASTER(op, WITH_GRAD(__VA_ARGS__))
/* W: 16 bytes of f32, or of f64 alone. */
#define WIDE_STATE(wide, ...)                                                                      \
    if (wide) {                                                                                    \
        constexpr int W = sizeof(T) == 8 ? 2 : 4;                                                  \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        constexpr int W = 1;                                                                       \
        __VA_ARGS__;                                                                               \
    }

/* ---- AdamW ---- */
/* The order of operations of adamw_typed.h.  Moves, a number: 28 bytes in f32 (value, m and v both
 * ways, grad in); with bf16 value and i16 master 24 beside f32 gradient and moments (value 2 + 2,
 * master 2 + 2, grad 4, m 4 + 4, v 4 + 4), 22 with a bf16 gradient, 14 with bf16 moments too; an
 * f32 master costs 2 bytes more (4 + 4, the value only written). */
template <typename T, typename M, typename G, typename S, int W>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(state<T, M, G, S> x, segment g, const double *step, double beta1, double beta2,
                 double eps64) {
    typedef real<T> R;
    if (step[PG_STEP_FINITE] == 0) return;
    const double rate64 = step[PG_STEP_RATE], bias1 = step[PG_STEP_BIAS1];
    const R clip = (R)step[PG_STEP_CLIP], root_bias2 = (R)sqrt(step[PG_STEP_BIAS2]);
    const R keep2 = (R)beta2, new1 = (R)(1 - beta1), new2 = (R)(1 - beta2), eps = (R)eps64;
    run_place run = {-1, 0};
    pace<R> p = {0, 0};
    for (int64_t i = W * grid_thread(); i < x.n; i += W * grid_threads()) {
        R value[W], grad[W], m[W], v[W];
        int64_t left = x.n - i;
        load_value<T, M, W>(value, x.value + i, x.master + i, left);
        load<G, W>(grad, x.grad + i, left);
        load<S, W>(m, x.m + i, left);
        load<S, W>(v, x.v + i, left);
        each_element<W>(
            g, i, x.n, &run,
            [&](int64_t r) {
                double rate = rate64 * (double)g.factors[2 * r + 1];
                p = pace<R>{(R)(1 - rate * (double)g.factors[2 * r]), (R)(rate / bias1)};
            },
            [&](int k) {
                R d = grad[k] * clip;
                m[k] += new1 * (d - m[k]);
                v[k] = v[k] * keep2 + new2 * d * d;
                value[k] = value[k] * p.decay - p.rate * m[k] / (sqrt(v[k]) / root_bias2 + eps);
            });
        store_value<T, M, W>(x.value + i, x.master + i, value, left);
        store<S, W>(x.m + i, m, left);
        store<S, W>(x.v + i, v, left);
    }
}

int cuda_adamw(void *value, void *master, const void *grad, void *m, void *v, int64_t n,
               const int64_t *ends, const float *factors, int64_t runs, const double *step,
               double beta1, double beta2, double eps, int dtype, int dtype_master, int dtype_grad,
               int dtype_m, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    segment g = {ends, factors, runs};
    WITH_STATE("adamw",
               state<T, M, G, S> x = {(T *)value, (M *)master, (const G *)grad, (S *)m, (S *)v, n};
               WIDE_STATE(cuda_aligned(value, master, grad, m, v),
                          adamw_kernel<T, M, G, S, W>
                          <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                              x, g, step, beta1, beta2, eps)))
    return cuda_launched("adamw");
}

/* ---- SGD ---- */
/* m NULL: no momentum.  momentum: m = old m + new g, and the step is now * g + ahead * m.  Moves, a
 * number: 20 bytes in f32, 12 without m; 20 with bf16 value and i16 master, 12 without m. */
template <typename T, typename M, typename G, typename S, int W>
__global__ void __launch_bounds__(THREADS)
    sgd_kernel(state<T, M, G, S> x, segment g, const double *step, double momentum,
               double dampening, int nesterov, int first) {
    typedef real<T> R;
    if (step[PG_STEP_FINITE] == 0) return;
    const double rate64 = step[PG_STEP_RATE];
    const R clip = (R)step[PG_STEP_CLIP], old = (R)momentum, fresh = (R)(1 - dampening);
    const R now = nesterov || !x.m ? 1 : 0, ahead = nesterov ? old : x.m ? 1 : 0;
    run_place run = {-1, 0};
    pace<R> p = {0, 0};
    for (int64_t i = W * grid_thread(); i < x.n; i += W * grid_threads()) {
        R value[W], grad[W], m[W] = {};
        int64_t left = x.n - i;
        load_value<T, M, W>(value, x.value + i, x.master + i, left);
        load<G, W>(grad, x.grad + i, left);
        if (x.m) load<S, W>(m, x.m + i, left);
        each_element<W>(
            g, i, x.n, &run,
            [&](int64_t r) {
                p = pace<R>{(R)(double)g.factors[2 * r],
                            (R)(rate64 * (double)g.factors[2 * r + 1])};
            },
            [&](int k) {
                R d = grad[k] * clip + p.decay * value[k];
                if (x.m) m[k] = first ? d : old * m[k] + fresh * d;
                value[k] -= p.rate * (now * d + (x.m ? ahead * m[k] : 0));
            });
        store_value<T, M, W>(x.value + i, x.master + i, value, left);
        if (x.m) store<S, W>(x.m + i, m, left);
    }
}

int cuda_sgd(void *value, void *master, const void *grad, void *m, int64_t n, const int64_t *ends,
             const float *factors, int64_t runs, const double *step, double momentum,
             double dampening, int nesterov, int first, int dtype, int dtype_master, int dtype_grad,
             int dtype_m, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    segment g = {ends, factors, runs};
    WITH_STATE("sgd",
               state<T, M, G, S> x = {(T *)value, (M *)master, (const G *)grad, (S *)m, NULL, n};
               WIDE_STATE(cuda_aligned(value, master, grad, m),
                          sgd_kernel<T, M, G, S, W>
                          <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                              x, g, step, momentum, dampening, nesterov, first)))
    return cuda_launched("sgd");
}

/* ---- masters ---- */
/* Moves 8 bytes a number beside an i16 master, 10 beside an f32 one (join: 8,
 * the value is not read). */
template <typename T, typename M, int W>
__global__ void __launch_bounds__(THREADS)
    join_kernel(float *out, const T *value, const M *master, int64_t n) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        float v[W];
        load_value<T, M, W>(v, value + i, master + i, n - i);
        store<float, W>(out + i, v, n - i);
    }
}
template <typename T, typename M, int W>
__global__ void __launch_bounds__(THREADS)
    split_kernel(T *value, M *master, const float *in, int64_t n) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        float v[W];
        load<float, W>(v, in + i, n - i);
        store_value<T, M, W>(value + i, master + i, v, n - i);
    }
}

int cuda_master_join(float *out, const void *value, const void *master, int64_t n, int dtype,
                     int dtype_master, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    WITH_MASTER("master_join",
                WIDE_STATE(cuda_aligned(out, value, master),
                           join_kernel<T, M, W>
                           <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                               out, (const T *)value, (const M *)master, n)))
    return cuda_launched("master_join");
}

int cuda_master_split(void *value, void *master, const float *in, int64_t n, int dtype,
                      int dtype_master, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    WITH_MASTER("master_split",
                WIDE_STATE(cuda_aligned(value, master, in),
                           split_kernel<T, M, W>
                           <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>(
                               (T *)value, (M *)master, in, n)))
    return cuda_launched("master_split");
}
