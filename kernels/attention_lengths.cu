/* attention_lengths.cu: lengths as cuDNN wants them, and samples of length 0; see cuda.h.
 *
 * cuDNN masks rows and keys of a sample; ours masks keys alone, so its rows are all of them: but
 * for a sample without keys, whose rows it must not touch, and which we fill ourselves. */
#include "common.cuh"

__global__ void lengths_kernel(int32_t *rows_of, int32_t *keys_of, const int32_t *lengths,
                               int64_t batch, int32_t rows, int32_t keys) {
    for (int64_t b = grid_thread(); b < batch; b += grid_threads()) {
        int32_t n = min(max(lengths[b], 0), keys);
        keys_of[b] = n;
        rows_of[b] = n ? rows : 0;
    }
}

extern "C" int cuda_attention_lengths(int32_t *rows_of, int32_t *keys_of, const pg_attn_args *a,
                                      pg_stream s) {
    lengths_kernel<<<cuda_grid(a->batch, 128), 128, 0, (cudaStream_t)s>>>(
        rows_of, keys_of, a->lengths, a->batch, (int32_t)a->rows, (int32_t)a->keys);
    return cuda_launched("attention");
}

/* Grid: blocks by samples; a block whose sample has keys ends at once.  x in 16-byte units. */
__global__ void empty_kernel(uint4 *x, int64_t rows, int64_t columns, int64_t stride, float *lse,
                             int64_t lse_rows, const int32_t *lengths, int64_t batch) {
    for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
        if (lengths[b] > 0) continue;
        for (int64_t i = grid_thread(); i < rows * columns; i += grid_threads())
            x[(b * rows + i / columns) * stride + i % columns] = make_uint4(0, 0, 0, 0);
        for (int64_t i = grid_thread(); lse && i < lse_rows; i += grid_threads())
            lse[b * lse_rows + i] = -INFINITY;
    }
}

extern "C" int cuda_attention_empty(void *x, int64_t rows, int64_t columns, int64_t stride,
                                    float *lse, int64_t lse_rows, const pg_attn_args *a,
                                    pg_stream s) {
    const int unit = 8; /* numbers of 2 bytes in 16 bytes */
    dim3 grid(16, (unsigned)pg_min64(a->batch, 65535));
    empty_kernel<<<grid, 256, 0, (cudaStream_t)s>>>((uint4 *)x, rows, columns / unit,
                                                    stride / unit, lse, lse_rows, a->lengths,
                                                    a->batch);
    return cuda_launched("attention");
}
