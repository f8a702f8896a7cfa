/* rope.cu: rotary positions: tables, and the rotation of half-split pairs (x[i], x[i + half]).
 *
 * A thread takes 16 bytes of both halves of a head, or of the columns that are only copied; in place
 * these are not touched at all, so that a packed row [q,k,v] costs its q and k.  Tables are f32
 * beside bf16 and f16 and stay in the L2 cache.  Grid: columns x rows, 256 threads a block.
 * Bytes moved: the turned columns in and out, the others only where y is not x. */
#include "rows.cuh"

/* In double, as on the CPU: an angle of 1e5 keeps its digits. */
template <typename T>
__global__ void rope_table_kernel(T *cosine, T *sine, double theta, int64_t first, int64_t t,
                                  int64_t half) {
    int64_t i = row_item();
    if (i >= half) return;
    double turn = pow(theta, -(double)i / (double)half);
    for (int64_t row = first_row(); row < t; row += all_rows()) {
        double angle = (double)(first + row) * turn;
        cosine[row * half + i] = from_real<T>((real<T>)cos(angle));
        sine[row * half + i] = from_real<T>((real<T>)sin(angle));
    }
}

struct rope_sizes {
    int64_t rows, t, c, heads, half, start;
    int sign, add;
};

/* Items of a row: heads * half / W pairs of packs, then the packs of the columns that stay. */
template <typename T, int W>
__global__ void __launch_bounds__(ROWS_THREADS)
    rope_kernel(T *y, const T *x, const real<T> *cosine, const real<T> *sine, const rope_sizes z) {
    int item = (int)row_item(), each = (int)z.half / W, pairs = (int)z.heads * each;
    int64_t turned = 2 * z.heads * z.half, stays = turned + (int64_t)(item - pairs) * W;
    if (item >= pairs && stays >= z.c) return;
    int i = item % max(each, 1) * W;
    int64_t low = item / max(each, 1) * 2 * z.half + i, high = low + z.half;
    for (int64_t row = first_row(); row < z.rows; row += all_rows()) {
        const T *from = x + row * z.c;
        T *to = y + row * z.c;
        real<T> a[W], b[W], c[W], s[W];
        if (item >= pairs) {
            load<T, W>(a, from + stays);
            give<T, W>(to + stays, a, z.add);
            continue;
        }
        int64_t line = (z.start + row % z.t) * z.half + i;
        load<T, W>(a, from + low);
        load<T, W>(b, from + high);
        load<real<T>, W>(c, cosine + line);
        load<real<T>, W>(s, sine + line);
#pragma unroll
        for (int k = 0; k < W; k++) {
            real<T> turn = z.sign * s[k], first = a[k] * c[k] - b[k] * turn;
            b[k] = b[k] * c[k] + a[k] * turn;
            a[k] = first;
        }
        give<T, W>(to + low, a, z.add);
        give<T, W>(to + high, b, z.add);
    }
}

int cuda_rope_table(void *cos, void *sin, double theta, int64_t first, int64_t t, int64_t half,
                    int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (t * half == 0) return PG_OK;
    dim3 block = rows_block(half), grid = rows_grid(t, half, block);
    CUDA_FLOATING("rope_table", dtype,
                  rope_table_kernel<T>
                  <<<grid, block, 0, s>>>((T *)cos, (T *)sin, theta, first, t, half))
    return cuda_launched("rope_table");
}

int cuda_rope(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
              int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add, int dtype,
              pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (b * t * c == 0) return PG_OK;
    rope_sizes z = {b * t, t, c, heads, half, start, sign, add};
    int64_t stay = y == x ? 0 : c - 2 * heads * half;
    if (heads * half + stay == 0) return PG_OK;
    CUDA_FLOATING(
        "rope", dtype,
        CUDA_WIDE(cuda_aligned(y, x, cos, sin) && half * (int64_t)sizeof(T) % 16 == 0 &&
                      c * (int64_t)sizeof(T) % 16 == 0,
                  T, int64_t items = (heads * half + stay) / W;
                  dim3 block = rows_block(items);
                  rope_kernel<T, W><<<rows_grid(b * t, items, block), block, 0, s>>>(
                      (T *)y, (const T *)x, (const real<T> *)cos, (const real<T> *)sin, z)))
    return cuda_launched("rope");
}
