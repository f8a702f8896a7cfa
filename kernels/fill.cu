/* fill.cu: one value everywhere, and casts between all dtypes, with the rules of fill.c: nearest
 * even, integers saturate and take a NaN as 0, a shorter integer keeps the low bits.
 *
 * f32, bf16 and f16 meet in float, which holds all three; other pairs meet in double, from where
 * the short formats are reached by rounding to odd first, so that nothing is rounded twice. */
#include "common.cuh"

#define THREADS 256

template <typename T> struct integer { static constexpr bool is = false; };
template <> struct integer<int32_t> { static constexpr bool is = true; };
template <> struct integer<int64_t> { static constexpr bool is = true; };
template <> struct integer<uint8_t> { static constexpr bool is = true; };
template <> struct integer<int16_t> { static constexpr bool is = true; };
template <typename T> struct within_float { static constexpr bool is = false; };
template <> struct within_float<float> { static constexpr bool is = true; };
template <> struct within_float<bf16> { static constexpr bool is = true; };
template <> struct within_float<f16> { static constexpr bool is = true; };

template <typename T> __device__ __forceinline__ double to_double(T x) {
    if constexpr (integer<T>::is) return (double)x;
    else return (double)to_real(x);
}

/* Out of range to the nearest end, NaN to 0. */
__device__ __forceinline__ int64_t truncate(double x, double low, double high, int64_t lowest,
                                            int64_t highest) {
    if (!(x > low)) return x <= low ? lowest : 0;
    return x >= high ? highest : (int64_t)x;
}

template <typename T> __device__ __forceinline__ T from_double(double x);
template <> __device__ __forceinline__ float from_double<float>(double x) { return (float)x; }
template <> __device__ __forceinline__ double from_double<double>(double x) { return x; }
template <> __device__ __forceinline__ bf16 from_double<bf16>(double x) {
    return from_real<bf16>(to_float_odd(x));
}
template <> __device__ __forceinline__ f16 from_double<f16>(double x) {
    return from_real<f16>(to_float_odd(x));
}
template <> __device__ __forceinline__ int32_t from_double<int32_t>(double x) {
    return (int32_t)truncate(x, -0x1p31, 0x1p31, INT32_MIN, INT32_MAX);
}
template <> __device__ __forceinline__ int64_t from_double<int64_t>(double x) {
    return truncate(x, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX);
}
template <> __device__ __forceinline__ uint8_t from_double<uint8_t>(double x) {
    return (uint8_t)truncate(x, -1, 256, 0, 255);
}

template <> __device__ __forceinline__ int16_t from_double<int16_t>(double x) {
    return (int16_t)truncate(x, -0x1p15 - 1, 0x1p15, INT16_MIN, INT16_MAX);
}

template <typename To, typename From> __device__ __forceinline__ To convert(From x) {
    if constexpr (integer<To>::is && integer<From>::is) return (To)x;
    else if constexpr (within_float<To>::is && within_float<From>::is)
        return from_real<To>(to_real(x));
    else return from_double<To>(to_double(x));
}

/* W = 4: between 4 and 32 bytes a thread on each side.  Moves
 * n (size of From + size of To) bytes. */
template <typename To, typename From, int W>
__global__ void cast_kernel(To *y, const From *x, int64_t n) {
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        if (i + W <= n) {
            pack<From, W> from = load_pack<W>(x + i);
            pack<To, W> to;
#pragma unroll
            for (int k = 0; k < W; k++) to.at[k] = convert<To>(from.at[k]);
            store_pack<W>(y + i, to);
        } else {
            for (int64_t k = i; k < n; k++) y[k] = convert<To>(x[k]);
        }
    }
}

template <typename To, typename From>
static void cast_pair(void *y, const void *x, int64_t n, cudaStream_t s) {
    if (cuda_aligned(y, x))
        cast_kernel<To, From, 4>
            <<<cuda_grid((n + 3) / 4, THREADS), THREADS, 0, s>>>((To *)y, (const From *)x, n);
    else
        cast_kernel<To, From, 1>
            <<<cuda_grid(n, THREADS), THREADS, 0, s>>>((To *)y, (const From *)x, n);
}

template <typename To>
static void cast_to(void *y, const void *x, int64_t n, int dtype_x, cudaStream_t s) {
    switch (dtype_x) {
    case PG_F32: return cast_pair<To, float>(y, x, n, s);
    case PG_F64: return cast_pair<To, double>(y, x, n, s);
    case PG_BF16: return cast_pair<To, bf16>(y, x, n, s);
    case PG_F16: return cast_pair<To, f16>(y, x, n, s);
    case PG_I32: return cast_pair<To, int32_t>(y, x, n, s);
    case PG_I64: return cast_pair<To, int64_t>(y, x, n, s);
    case PG_I16: return cast_pair<To, int16_t>(y, x, n, s);
    default: return cast_pair<To, uint8_t>(y, x, n, s);
    }
}

int cuda_cast(void *y, const void *x, int64_t n, int dtype_y, int dtype_x, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    if (dtype_y == dtype_x) {
        if (y == x) return PG_OK;
        return cuda_check("copy", cudaMemcpyAsync(y, x, (size_t)(n * pg_dtype_size(dtype_y)),
                                                  cudaMemcpyDeviceToDevice, s));
    }
    switch (dtype_y) {
    case PG_F32: cast_to<float>(y, x, n, dtype_x, s); break;
    case PG_F64: cast_to<double>(y, x, n, dtype_x, s); break;
    case PG_BF16: cast_to<bf16>(y, x, n, dtype_x, s); break;
    case PG_F16: cast_to<f16>(y, x, n, dtype_x, s); break;
    case PG_I32: cast_to<int32_t>(y, x, n, dtype_x, s); break;
    case PG_I64: cast_to<int64_t>(y, x, n, dtype_x, s); break;
    case PG_I16: cast_to<int16_t>(y, x, n, dtype_x, s); break;
    default: cast_to<uint8_t>(y, x, n, dtype_x, s);
    }
    return cuda_launched("copy");
}

/* Writes n elements once, 16 bytes a thread where y is aligned. */
template <typename T, int W> __global__ void fill_kernel(T *y, double value, int64_t n) {
    T element = from_double<T>(value);
    pack<T, W> p;
#pragma unroll
    for (int k = 0; k < W; k++) p.at[k] = element;
    for (int64_t i = W * grid_thread(); i < n; i += W * grid_threads()) {
        if (i + W <= n) store_pack<W>(y + i, p);
        else
            for (int64_t k = i; k < n; k++) y[k] = element;
    }
}

template <typename T> static void fill(void *y, double value, int64_t n, cudaStream_t s) {
    CUDA_WIDE(cuda_aligned(y), T,
              fill_kernel<T, W>
              <<<cuda_grid((n + W - 1) / W, THREADS), THREADS, 0, s>>>((T *)y, value, n))
}

int cuda_fill(void *y, double value, int64_t n, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n <= 0) return PG_OK;
    switch (dtype) {
    case PG_F32: fill<float>(y, value, n, s); break;
    case PG_F64: fill<double>(y, value, n, s); break;
    case PG_BF16: fill<bf16>(y, value, n, s); break;
    case PG_F16: fill<f16>(y, value, n, s); break;
    case PG_I32: fill<int32_t>(y, value, n, s); break;
    case PG_I64: fill<int64_t>(y, value, n, s); break;
    case PG_I16: fill<int16_t>(y, value, n, s); break;
    default: fill<uint8_t>(y, value, n, s);
    }
    return cuda_launched("fill");
}
