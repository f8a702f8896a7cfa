/* norm.cuh: what norm.cu and norm_grad.cu share: the packs of a row that a thread keeps in registers. */
#ifndef PG_NORM_CUH
#define PG_NORM_CUH
#include "common.cuh"

/* use(pack, its number) for this thread's packs of a row: the kept ones, then those read again. */
template <int keep, int W, typename T, typename F>
__device__ __forceinline__ void each_pack(const pack<T, W> (&kept)[keep], const T *row,
                                          int64_t packs, F use) {
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
        if (p < packs) use(kept[k], p);
    }
    for (int64_t p = threadIdx.x + keep * (int64_t)blockDim.x; p < packs; p += blockDim.x)
        use(load_pack<W>(row + p * W), p);
}
template <int keep, int W, typename T>
__device__ __forceinline__ void keep_packs(pack<T, W> (&kept)[keep], const T *row, int64_t packs) {
#pragma unroll
    for (int k = 0; k < keep; k++) {
        int64_t p = threadIdx.x + k * (int64_t)blockDim.x;
        if (p < packs) kept[k] = load_pack<W>(row + p * W);
    }
}

/* Makes the compiler take the packs as new, so that it widens bf16 and f16 a second time rather than
 * keep both forms in registers over a barrier: 64 registers a thread, where 100 would be used. */
template <int keep, int W, typename T>
__device__ __forceinline__ void narrow_again(pack<T, W> (&kept)[keep]) {
    if constexpr (sizeof(T) == 2 && W > 1) {
#pragma unroll
        for (int k = 0; k < keep; k++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                asm volatile("" : "+r"(reinterpret_cast<int *>(&kept[k])[j]));
    }
}
#endif
