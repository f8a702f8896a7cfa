/* swiglu.cu: y = silu(gate) * up and its gradient; gate and up lie side by side in each row of x.
 *
 * A thread takes 16 bytes of both.  Grid: columns x rows, 256 threads a block.  Bytes moved: x
 * once, y once, 6 n f in bf16 (541 MB at 8192 x 11008); backward x, dy and dx once, 10 n f (902
 * MB), and dx once more where it is added to.  Formulas: swiglu_typed.h. */
#include "rows.cuh"

template <typename T, int W>
__global__ void __launch_bounds__(ROWS_THREADS)
    swiglu_kernel(T *y, const T *x, int64_t n, int64_t f) {
    int64_t i = row_item() * W;
    if (i >= f) return;
    for (int64_t row = first_row(); row < n; row += all_rows()) {
        real<T> gate[W], up[W];
        load<T, W>(gate, x + 2 * row * f + i);
        load<T, W>(up, x + (2 * row + 1) * f + i);
#pragma unroll
        for (int k = 0; k < W; k++) up[k] *= divide_for<T>(gate[k], 1 + exp_for<T>(-gate[k]));
        store<T, W>(y + row * f + i, up);
    }
}

/* dx may be x: a thread reads both its halves before it writes them. */
template <typename T, int W>
__global__ void __launch_bounds__(ROWS_THREADS)
    swiglu_grad_kernel(T *dx, const T *dy, const T *x, int64_t n, int64_t f, int add) {
    int64_t i = row_item() * W;
    if (i >= f) return;
    for (int64_t row = first_row(); row < n; row += all_rows()) {
        int64_t low = 2 * row * f + i, high = low + f;
        real<T> gate[W], up[W], slope[W];
        load<T, W>(gate, x + low);
        load<T, W>(up, x + high);
        load<T, W>(slope, dy + row * f + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            real<T> g = gate[k], s = divide_for<T>(1, 1 + exp_for<T>(-g)), u = up[k];
            gate[k] = slope[k] * u * s * (1 + g * (1 - s));
            up[k] = slope[k] * g * s;
        }
        give<T, W>(dx + low, gate, add);
        give<T, W>(dx + high, up, add);
    }
}

int cuda_swiglu(void *y, const void *x, int64_t n, int64_t f, int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n * f == 0) return PG_OK;
    CUDA_FLOATING("swiglu", dtype,
                  CUDA_WIDE(cuda_aligned(y, x) && f * (int64_t)sizeof(T) % 16 == 0, T,
                            dim3 block = rows_block(f / W);
                            swiglu_kernel<T, W><<<rows_grid(n, f / W, block), block, 0, s>>>(
                                (T *)y, (const T *)x, n, f)))
    return cuda_launched("swiglu");
}

int cuda_swiglu_grad(void *dx, const void *dy, const void *x, int64_t n, int64_t f, int add,
                     int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (n * f == 0) return PG_OK;
    CUDA_FLOATING("swiglu_grad", dtype,
                  CUDA_WIDE(cuda_aligned(dx, dy, x) && f * (int64_t)sizeof(T) % 16 == 0, T,
                            dim3 block = rows_block(f / W);
                            swiglu_grad_kernel<T, W><<<rows_grid(n, f / W, block), block, 0, s>>>(
                                (T *)dx, (const T *)dy, (const T *)x, n, f, add)))
    return cuda_launched("swiglu_grad");
}
