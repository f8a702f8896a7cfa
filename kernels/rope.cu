/* rope.cu: rotary positions: tables, and the rotation of half-split pairs (x[i], x[i + half]).
 *
 * A thread takes 16 bytes of both halves of a head, or of the columns that are only copied, for the
 * same position of several samples, so that it reads its piece of the tables once; in place what is
 * only copied is not touched at all, so that a packed row [q,k,v] costs its q and k.  Tables are
 * f32 beside bf16 and f16 and stay in the L2 cache.  Grid: columns x positions x samples, 256
 * threads a block.  Bytes moved: the turned columns in and out, the others only where y is not x:
 * 268 MB for q and k of 8192 x 4096 each, in bf16, in place. */
#include "rows.cuh"

/* What a position turns each pair by.  They come from the host, since the device's pow differs from
 * the CPU's by an ulp, which at position 1e5 is 1e-11 of the angle: so both devices, and every
 * rank, turn by the same angles. */
#define TURNS 256
struct rope_turns { double by[TURNS]; }; /* 2 KiB of a launch's 4 for arguments */

/* In double, as on the CPU: an angle of 1e5 keeps its digits.  Pairs
 * i0 .. i0 + count of each line. */
template <typename T>
__global__ void rope_table_kernel(T *cosine, T *sine, rope_turns turns, int64_t first, int64_t t,
                                  int64_t half, int64_t i0, int64_t count) {
    int64_t i = row_item();
    if (i >= count) return;
    double turn = turns.by[i];
    for (int64_t row = first_row(); row < t; row += all_rows()) {
        double angle = (double)(first + row) * turn;
        cosine[row * half + i0 + i] = from_real<T>((real<T>)cos(angle));
        sine[row * half + i0 + i] = from_real<T>((real<T>)sin(angle));
    }
}

struct rope_sizes {
    int64_t b, t, c, heads, half, start;
    int sign, add;
};

/* Items of a row: heads * half / W pairs of packs, then the packs of the columns that stay. */
template <typename T, int W>
__global__ void __launch_bounds__(ROWS_THREADS)
    rope_kernel(T *y, const T *x, const real<T> *cosine, const real<T> *sine, const rope_sizes z) {
    int item = (int)row_item(), each = max((int)z.half / W, 1), pairs = (int)z.heads * each;
    int64_t turned = 2 * z.heads * z.half, stays = turned + (int64_t)(item - pairs) * W;
    if (z.heads * z.half == 0) pairs = 0, stays = (int64_t)item * W;
    if (item >= pairs && stays >= z.c) return;
    int i = item % each * W;
    int64_t low = item / each * 2 * z.half + i;
    for (int64_t at = first_row(); at < z.t; at += all_rows()) {
        real<T> c[W], s[W];
        if (item < pairs) {
            load<real<T>, W>(c, cosine + (z.start + at) * z.half + i);
            load<real<T>, W>(s, sine + (z.start + at) * z.half + i);
        }
        for (int64_t sample = blockIdx.z; sample < z.b; sample += gridDim.z) {
            const T *from = x + (sample * z.t + at) * z.c;
            T *to = y + (sample * z.t + at) * z.c;
            real<T> a[W], b[W];
            if (item >= pairs) {
                load<T, W>(a, from + stays);
                give<T, W>(to + stays, a, z.add);
                continue;
            }
            load<T, W>(a, from + low);
            load<T, W>(b, from + low + z.half);
#pragma unroll
            for (int k = 0; k < W; k++) {
                real<T> turn = z.sign * s[k], first = a[k] * c[k] - b[k] * turn;
                b[k] = b[k] * c[k] + a[k] * turn;
                a[k] = first;
            }
            give<T, W>(to + low, a, z.add);
            give<T, W>(to + low + z.half, b, z.add);
        }
    }
}

/* Enough blocks for any card (1024 of 256 threads) before samples are taken one after the other. */
static dim3 rope_grid(int64_t b, int64_t t, int64_t items, dim3 block) {
    dim3 grid = rows_grid(t, items, block);
    int64_t blocks = (int64_t)grid.x * grid.y;
    grid.z = (unsigned)pg_min64(pg_min64(b, 65535), (1024 + blocks - 1) / blocks);
    return grid;
}

int cuda_rope_table(void *cos, void *sin, double theta, int64_t first, int64_t t, int64_t half,
                    int dtype, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (t * half == 0) return PG_OK;
    for (int64_t i0 = 0; i0 < half; i0 += TURNS) {
        int64_t count = pg_min64(TURNS, half - i0);
        dim3 block = rows_block(count), grid = rows_grid(t, count, block);
        rope_turns turns;
        for (int64_t i = 0; i < count; i++)
            turns.by[i] = pow(theta, -(double)(i0 + i) / (double)half);
        CUDA_FLOATING("rope_table", dtype,
                      rope_table_kernel<T><<<grid, block, 0, s>>>((T *)cos, (T *)sin, turns, first,
                                                                  t, half, i0, count))
    }
    return cuda_launched("rope_table");
}

int cuda_rope(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
              int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add, int dtype,
              pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (b * t * c == 0) return PG_OK;
    rope_sizes z = {b, t, c, heads, half, start, sign, add};
    int64_t stay = y == x ? 0 : c - 2 * heads * half;
    if (heads * half + stay == 0) return PG_OK;
    CUDA_FLOATING(
        "rope", dtype,
        CUDA_WIDE(cuda_aligned(y, x, cos, sin) && half * (int64_t)sizeof(T) % 16 == 0 &&
                      c * (int64_t)sizeof(T) % 16 == 0,
                  T, int64_t items = (heads * half + stay) / W;
                  dim3 block = rows_block(items);
                  rope_kernel<T, W><<<rope_grid(b, t, items, block), block, 0, s>>>(
                      (T *)y, (const T *)x, (const real<T> *)cos, (const real<T> *)sin, z)))
    return cuda_launched("rope");
}
