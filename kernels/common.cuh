/* common.cuh: what all .cu files share: number types, 16-byte packs, sums over a block, launching.
 *
 * A kernel is written once for T (float, double, bf16, f16) and W, the elements a thread takes at a
 * time: 16 bytes of them where pointers and sizes allow, else one.  It computes in real<T>: double
 * for f64, float for the rest, and rounds once at the end.  Sums are taken in an order that follows
 * from the sizes alone, so every run gives the same bits.  A launcher reads
 *     if (n <= 0) return PG_OK;
 *     CUDA_FLOATING("op", dtype, CUDA_WIDE(cuda_aligned(y, x), T, op_kernel<T, W>
 *         <<<cuda_grid((n + W - 1) / W, 256), 256, 0, (cudaStream_t)s>>>((T *)y, (const T *)x, n)))
 *     return cuda_launched("op");  */
#ifndef PG_COMMON_CUH
#define PG_COMMON_CUH
#include "cuda.h"
#include "../runtime/base/types.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

typedef __nv_bfloat16 bf16;
typedef __half f16;

/* ---- numbers ---- */
template <typename T> struct real_of { typedef float type; };
template <> struct real_of<double> { typedef double type; };
template <typename T> using real = typename real_of<T>::type;

__device__ __forceinline__ float to_real(float x) { return x; }
__device__ __forceinline__ double to_real(double x) { return x; }
__device__ __forceinline__ float to_real(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_real(f16 x) { return __half2float(x); }

/* Rounded to nearest even; f16 overflows to infinity. */
template <typename T> __device__ __forceinline__ T from_real(real<T> x) { return x; }
template <> __device__ __forceinline__ bf16 from_real<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ f16 from_real<f16>(float x) { return __float2half_rn(x); }

/* To f32 towards zero, with the last bit set when anything was cut off: rounding that to bf16 or
 * f16 is rounding x itself.  Source: Boldo and Melquiond 2008. */
__device__ __forceinline__ float to_float_odd(double x) {
    float f = __double2float_rz(x);
    return (double)f == x || f != f ? f : __int_as_float(__float_as_int(f) | 1);
}

/* ---- packs: W elements that lie side by side ---- */
template <int bytes> struct raw_of;
template <> struct raw_of<1> { typedef uint8_t type; };
template <> struct raw_of<2> { typedef uint16_t type; };
template <> struct raw_of<4> { typedef uint32_t type; };
template <> struct raw_of<8> { typedef uint2 type; };
template <> struct raw_of<16> { typedef uint4 type; };

/* Aligned to its size, at most 16 bytes; a larger one is moved 16 bytes at a time. */
template <typename T, int W> struct alignas(sizeof(T) * W > 16 ? 16 : sizeof(T) * W) pack {
    T at[W];
};

template <int W, typename T> __device__ __forceinline__ pack<T, W> load_pack(const T *x) {
    typedef typename raw_of<(int)alignof(pack<T, W>)>::type unit;
    pack<T, W> p;
#pragma unroll
    for (int i = 0; i < (int)(sizeof p / sizeof(unit)); i++)
        reinterpret_cast<unit *>(&p)[i] = reinterpret_cast<const unit *>(x)[i];
    return p;
}
template <int W, typename T> __device__ __forceinline__ void store_pack(T *y, const pack<T, W> &p) {
    typedef typename raw_of<(int)alignof(pack<T, W>)>::type unit;
#pragma unroll
    for (int i = 0; i < (int)(sizeof p / sizeof(unit)); i++)
        reinterpret_cast<unit *>(y)[i] = reinterpret_cast<const unit *>(&p)[i];
}

/* v = the first `count` numbers at x, W or fewer; the others 0 */
template <typename T, int W>
__device__ __forceinline__ void load(real<T> (&v)[W], const T *x, int64_t count = W) {
    if (W == 1 || count >= W) {
        pack<T, W> p = load_pack<W>(x);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = to_real(p.at[k]);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = k < count ? to_real(x[k]) : 0;
    }
}
template <typename T, int W>
__device__ __forceinline__ void store(T *y, const real<T> (&v)[W], int64_t count = W) {
    if (W == 1 || count >= W) {
        pack<T, W> p;
#pragma unroll
        for (int k = 0; k < W; k++) p.at[k] = from_real<T>(v[k]);
        store_pack<W>(y, p);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++)
            if (k < count) y[k] = from_real<T>(v[k]);
    }
}
/* y = v, or y + v where add is set: rounded once */
template <typename T, int W>
__device__ __forceinline__ void give(T *y, real<T> (&v)[W], int add, int64_t count = W) {
    if (add) {
        real<T> old[W];
        load<T, W>(old, y, count);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] += old[k];
    }
    store<T, W>(y, v, count);
}

/* ---- sums ---- */
/* Of a > b the first, of NaN and a number the NaN. */
template <typename R> __device__ __forceinline__ R larger(R a, R b) {
    return a > b || a != a ? a : b;
}
template <typename R> __device__ __forceinline__ R warp_sum(R v) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) v += __shfl_xor_sync(0xffffffffu, v, apart);
    return v;
}
template <typename R> __device__ __forceinline__ R warp_max(R v) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, apart));
    return v;
}

/* A block holds blockDim.y rows of blockDim.x threads (a multiple of 32, at most 1024).  All its
 * threads call these; each gets the sum or maximum over its row.  space: shared memory for 32
 * numbers a row. */
template <typename R> __device__ __forceinline__ R row_sum(R v, R *space) {
    v = warp_sum(v);
    if (blockDim.x == 32) return v;
    R *line = space + 32 * threadIdx.y;
    int lane = threadIdx.x % 32;
    __syncthreads(); /* those who still read an earlier result */
    if (lane == 0) line[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(lane < (int)blockDim.x / 32 ? line[lane] : (R)0);
}
template <typename R> __device__ __forceinline__ R row_max(R v, R *space) {
    v = warp_max(v);
    if (blockDim.x == 32) return v;
    R *line = space + 32 * threadIdx.y;
    int lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) line[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max(line[lane < (int)blockDim.x / 32 ? lane : 0]);
}

/* ---- launching ---- */
/* The thread's number in its grid, and the number of threads: for grid-stride loops. */
__device__ __forceinline__ int64_t grid_thread(void) {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t grid_threads(void) { return (int64_t)gridDim.x * blockDim.x; }

/* Blocks for that many items, one a thread and turn: 16 a multiprocessor at most, so that each has
 * two rounds of full occupancy at 256 threads; larger work goes round the grid. */
static inline int cuda_grid(int64_t items, int block) {
    return (int)pg_max64(1, pg_min64((items + block - 1) / block, 16 * (int64_t)cuda_sm_count()));
}

/* Blocks for that many rows or tiles, one each; what no grid can hold stays so,
 * and the launch fails. */
static inline unsigned cuda_blocks(int64_t n) { return (unsigned)pg_min64(n, UINT32_MAX); }

/* Threads for rows of that many items: a row gets up to `most` of them (a power of two from 32 on),
 * and rows share a block until it has `together`. */
static inline dim3 cuda_row_block(int64_t items, int most, int together = 256) {
    int threads = 32;
    while (threads < items && threads < most) threads *= 2;
    return dim3(threads, threads < together ? together / threads : 1);
}

/* 1 if all of these pointers lie on a 16-byte boundary; NULL does. */
template <typename... P> static inline int cuda_aligned(P... pointers) {
    return ((... | (uintptr_t)pointers) & 15) == 0;
}

/* The statement for T by dtype; or refuse and return. */
#define CUDA_FLOATING(op, dtype, ...)                                                              \
    switch (dtype) {                                                                               \
    case PG_F32: {                                                                                 \
        typedef float T;                                                                           \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case PG_F64: {                                                                                 \
        typedef double T;                                                                          \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case PG_BF16: {                                                                                \
        typedef bf16 T;                                                                            \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case PG_F16: {                                                                                 \
        typedef f16 T;                                                                             \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    default:                                                                                       \
        return pg_fail(PG_EINVAL, "%s: %s has no arithmetic; cast to f32", op,                     \
                       pg_dtype_name(dtype));                                                      \
    }

/* The statement for T and Y, the number types of inputs and of an output that may be f32 beside
 * bf16 and f16.  Y is never narrower than T, so W counts 16 bytes of Y: then a warp's accesses on
 * both sides fill whole sectors of 32 bytes, which two halves of a 32-byte pack would not. */
#define CUDA_MIXED(op, dtype, dtype_y, ...)                                                        \
    if ((dtype_y) == (dtype)) {                                                                    \
        CUDA_FLOATING(op, dtype, typedef T Y; __VA_ARGS__)                                         \
    } else if ((dtype_y) == PG_F32 && (dtype) == PG_BF16) {                                        \
        typedef bf16 T;                                                                            \
        typedef float Y;                                                                           \
        __VA_ARGS__;                                                                               \
    } else if ((dtype_y) == PG_F32 && (dtype) == PG_F16) {                                         \
        typedef f16 T;                                                                             \
        typedef float Y;                                                                           \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        return pg_fail(PG_EINVAL, "%s: %s out of %s; out may be f32 beside bf16 and f16", op,      \
                       pg_dtype_name(dtype_y), pg_dtype_name(dtype));                              \
    }

/* The statement for W = 16 bytes of T where `wide` holds, else for W = 1. */
#define CUDA_WIDE(wide, T, ...)                                                                    \
    if (wide) {                                                                                    \
        constexpr int W = 16 / (int)sizeof(T);                                                     \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        constexpr int W = 1;                                                                       \
        __VA_ARGS__;                                                                               \
    }
#endif
