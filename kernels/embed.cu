/* embed.cu: rows of a table by id, the table's gradient without atomics on numbers, and
 * the check of ids.  The table may be a part of the vocabulary's: ids of other parts give
 * zeros and no gradient.
 *
 * The gradient turns the list of ids into a list of positions for every line of the table: counts
 * and places by atomics on integers, then each list into the order of the positions, so that a line
 * is summed in one order and the bits repeat.  A warp sums a line; where a line has many positions
 * (a frequent token) the eight warps of a block share them and join their sums in order.  Lines
 * that no id names are set to 0, or left alone where the gradient is added.
 * Bytes moved: dy once, dtable once (twice where it is added to, and then only the lines that ids
 * name), ids some times.  8192 ids of 32000 x 4096, bf16 added into f32: 67 MB of dy and 33 KB for
 * each line named, 268 MB at most. */
#include "rows.cuh" /* first: it gives the C headers C names */
#include "ids.h"

#define SCAN_THREADS 1024
#define WARPS        8   /* of a block that sums lines */
#define MANY         128 /* positions from which a line is shared by the warps of a block */
#define ACROSS       4   /* warps that share a line's columns, so that few ids keep a card busy */

/* ---- lookup: grid columns x rows, a pack of 16 bytes a thread ---- */
template <typename P>
__global__ void __launch_bounds__(ROWS_THREADS)
    embedding_kernel(P *y, const P *table, const void *ids, int64_t n, int64_t d, int64_t v,
                     int64_t first, int dtype_ids) {
    int64_t i = row_item();
    if (i >= d) return;
    for (int64_t row = first_row(); row < n; row += all_rows()) {
        int64_t line = row_at(ids, row, dtype_ids, first, v);
        y[row * d + i] = line < 0 ? P{} : table[line * d + i];
    }
}

template <typename P>
static void copy_rows(void *y, const void *table, const void *ids, int64_t n, int64_t bytes,
                      int64_t v, int64_t first, int dtype_ids, cudaStream_t s) {
    int64_t d = bytes / (int64_t)sizeof(P);
    dim3 block = rows_block(d);
    embedding_kernel<P><<<rows_grid(n, d, block), block, 0, s>>>((P *)y, (const P *)table, ids, n, d,
                                                                 v, first, dtype_ids);
}

int cuda_embedding(void *y, const void *table, const void *ids, int64_t n, int64_t d, int64_t v,
                   int64_t first, int dtype, int dtype_ids, pg_stream s) {
    int64_t bytes = d * pg_dtype_size(dtype);
    if (n * d == 0) return PG_OK;
    if (cuda_aligned(y, table) && bytes % 16 == 0)
        copy_rows<uint4>(y, table, ids, n, bytes, v, first, dtype_ids, (cudaStream_t)s);
    else if (pg_dtype_size(dtype) == 2)
        copy_rows<uint16_t>(y, table, ids, n, bytes, v, first, dtype_ids, (cudaStream_t)s);
    else copy_rows<uint32_t>(y, table, ids, n, bytes, v, first, dtype_ids, (cudaStream_t)s);
    return cuda_launched("embedding");
}

/* ---- positions by line ---- */
struct embed_lists {
    int64_t v4;     /* lines, rounded up to whole quads */
    int32_t *start; /* [v4 + 1] of each line's list, and where the last ends; counts at first */
    int32_t *next;  /* [v4] where its next position goes */
    int32_t *found; /* [n] positions by line, in any order; none of ids without a line */
    int32_t *order; /* [n] and in theirs */
    int32_t *many;  /* [n / MANY + 1] lines with many positions */
    int32_t *n_many;
};

static int64_t lay_lists(embed_lists *l, void *scratch, int64_t n, int64_t v) {
    int32_t *at = (int32_t *)scratch;
    int64_t v4 = (v + 3) / 4 * 4;
    l->v4 = v4;
    l->start = at;
    l->next = at + v4 + 4;
    l->found = l->next + v4;
    l->order = l->found + n;
    l->many = l->order + n;
    l->n_many = l->many + n / MANY + 1;
    return (int64_t)(2 * v4 + 4 + 2 * n + n / MANY + 2) * (int64_t)sizeof(int32_t);
}

__global__ void embed_count_kernel(embed_lists l, const void *ids, int64_t n, int64_t v,
                                   int64_t first, int dtype_ids) {
    for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
        int64_t line = row_at(ids, i, dtype_ids, first, v);
        if (line >= 0) atomicAdd(&l.start[line], 1);
    }
}

/* Counts become starts, four a thread and turn; one block. */
__global__ void __launch_bounds__(SCAN_THREADS) embed_scan_kernel(embed_lists l) {
    __shared__ int32_t sums[32];
    int32_t before = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t from = 0; from < l.v4; from += 4 * SCAN_THREADS) {
        int64_t i = from + 4 * threadIdx.x;
        int4 c = i < l.v4 ? *(int4 *)&l.start[i] : make_int4(0, 0, 0, 0);
        int32_t mine = c.x + c.y + c.z + c.w, up_to = mine;
        for (int apart = 1; apart < 32; apart *= 2) {
            int32_t left = __shfl_up_sync(0xffffffffu, up_to, apart);
            if (lane >= apart) up_to += left;
        }
        __syncthreads(); /* the last turn's sums are read */
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        int32_t all = sums[lane], warps = all; /* every warp scans the 32 sums */
        for (int apart = 1; apart < 32; apart *= 2) {
            int32_t left = __shfl_up_sync(0xffffffffu, warps, apart);
            if (lane >= apart) warps += left;
        }
        int32_t start = before + up_to - mine + __shfl_sync(0xffffffffu, warps - all, warp);
        int4 s = make_int4(start, start + c.x, start + c.x + c.y, start + c.x + c.y + c.z);
        if (i < l.v4) *(int4 *)&l.start[i] = s, *(int4 *)&l.next[i] = s;
        before += __shfl_sync(0xffffffffu, warps, 31);
    }
    if (threadIdx.x == 0) l.start[l.v4] = before, *l.n_many = 0;
}

__global__ void embed_place_kernel(embed_lists l, const void *ids, int64_t n, int64_t v,
                                   int64_t first, int dtype_ids) {
    for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
        int64_t line = row_at(ids, i, dtype_ids, first, v);
        if (line >= 0) l.found[atomicAdd(&l.next[line], 1)] = (int32_t)i;
    }
}

/* A position's rank is the number of smaller ones in its list.  Quadratic in a list's length, but
 * neighbours read the same list: 4e9 comparisons, a millisecond, where 65536
 * ids are all the same. */
__global__ void embed_order_kernel(embed_lists l, const void *ids, int64_t first, int dtype_ids) {
    for (int64_t i = grid_thread(), all = l.start[l.v4]; i < all; i += grid_threads()) {
        int32_t mine = l.found[i], rank = 0;
        int64_t line = id_at(ids, mine, dtype_ids) - first;
        int32_t from = l.start[line], to = l.start[line + 1];
        for (int32_t j = from; j < to; j++) rank += l.found[j] < mine;
        l.order[from + rank] = mine;
        if (rank == 0 && to - from > MANY) l.many[atomicAdd(l.n_many, 1)] = (int32_t)line;
    }
}

/* ---- sums ---- */
/* sum += rows order[from], order[from + step], ... below order[to], at columns i.. */
template <typename T, int W>
__device__ __forceinline__ void sum_rows(real<T> (&sum)[W], const T *dy, const int32_t *order,
                                         int from, int to, int step, int64_t d, int64_t i) {
#pragma unroll 4
    for (int j = from; j < to; j += step) {
        real<T> row[W];
        load<T, W>(row, dy + order[j] * d + i);
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] += row[k];
    }
}

/* Warps of blockIdx.x share the columns, WARPS lines a block, grid-stride over lines: a line that
 * no id names costs two loads a warp. */
template <typename T, typename Y, int W>
__global__ void __launch_bounds__(32 * WARPS)
    embed_few_kernel(Y *dtable, const T *dy, embed_lists l, int64_t v, int64_t d, int add) {
    for (int64_t line = first_row(); line < v; line += all_rows()) {
        int32_t from = l.start[line], to = l.start[line + 1];
        if (to - from > MANY || (add && from == to)) continue;
        for (int64_t i = row_item() * W; i < d; i += grid_threads() * W) {
            real<T> sum[W] = {};
            sum_rows<T, W>(sum, dy, l.order, from, to, 1, d, i);
            give<Y, W>(dtable + line * d + i, sum, add);
        }
    }
}

/* A block takes 32 packs of a line with many positions, each warp every eighth of them. */
template <typename T, typename Y, int W>
__global__ void __launch_bounds__(32 * WARPS)
    embed_many_kernel(Y *dtable, const T *dy, embed_lists l, int64_t d, int add) {
    __shared__ real<T> sums[WARPS][W][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t i = ((int64_t)blockIdx.x * 32 + lane) * W;
    for (int at = blockIdx.y; at < *l.n_many; at += gridDim.y) {
        int64_t line = l.many[at];
        real<T> sum[W] = {};
        if (i < d)
            sum_rows<T, W>(sum, dy, l.order, l.start[line] + warp, l.start[line + 1], WARPS, d, i);
        __syncthreads(); /* the last line's sums are read */
#pragma unroll
        for (int k = 0; k < W; k++) sums[warp][k][lane] = sum[k];
        __syncthreads();
        if (warp || i >= d) continue;
        for (int other = 1; other < WARPS; other++)
#pragma unroll
            for (int k = 0; k < W; k++) sum[k] += sums[other][k][lane];
        give<Y, W>(dtable + line * d + i, sum, add);
    }
}

template <typename T, typename Y, int W>
static void sum_lines(Y *dtable, const T *dy, const embed_lists &l, int64_t n, int64_t v, int64_t d,
                      int add, cudaStream_t s) {
    int64_t pieces = (d + 32 * W - 1) / (32 * W), across = pg_min64(pieces, ACROSS);
    dim3 few((unsigned)across, (unsigned)cuda_grid((v + WARPS - 1) / WARPS * across, 1));
    few.y = (unsigned)pg_max64(1, few.y / across);
    dim3 many((unsigned)pieces, (unsigned)pg_min64(n / MANY + 1, 1024));
    embed_few_kernel<T, Y, W><<<few, dim3(32, WARPS), 0, s>>>(dtable, dy, l, v, d, add);
    embed_many_kernel<T, Y, W><<<many, 32 * WARPS, 0, s>>>(dtable, dy, l, d, add);
}

int64_t cuda_embedding_grad_scratch(int64_t n, int64_t v) {
    embed_lists l;
    return lay_lists(&l, NULL, n, v);
}

int cuda_embedding_grad(void *dtable, const void *dy, const void *ids, int64_t n, int64_t d,
                        int64_t v, int64_t first, int add, void *scratch, int dtype, int dtype_w,
                        int dtype_ids, pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    embed_lists l;
    if (v * d == 0) return PG_OK;
    if (n >= INT32_MAX || v >= INT32_MAX)
        return pg_fail(PG_ESHAPE, "embedding_grad: %lld ids, %lld lines; both must be below 2^31",
                       (long long)n, (long long)v);
    lay_lists(&l, scratch, n, v);
    PG_TRY(cuda_check("embedding_grad", cudaMemsetAsync(l.start, 0, (size_t)(l.v4 + 1) * 4, s)));
    int grid = cuda_grid(n, 256);
    embed_count_kernel<<<grid, 256, 0, s>>>(l, ids, n, v, first, dtype_ids);
    embed_scan_kernel<<<1, SCAN_THREADS, 0, s>>>(l);
    embed_place_kernel<<<grid, 256, 0, s>>>(l, ids, n, v, first, dtype_ids);
    embed_order_kernel<<<grid, 256, 0, s>>>(l, ids, first, dtype_ids);
    CUDA_MIXED("embedding_grad", dtype, dtype_w,
               CUDA_WIDE(cuda_aligned(dtable, dy) && d * (int64_t)sizeof(T) % 16 == 0, Y,
                         sum_lines<T, Y, W>((Y *)dtable, (const T *)dy, l, n, v, d, add, s)))
    return cuda_launched("embedding_grad");
}

/* ---- check ---- */
static __device__ unsigned long long first_wrong;

__global__ void check_ids_kernel(const void *ids, int64_t n, int64_t v, int64_t ignore,
                                 int dtype_ids) {
    for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
        int64_t id = id_at(ids, i, dtype_ids);
        if ((id < 0 || id >= v) && id != ignore) {
            atomicMin(&first_wrong, (unsigned long long)i);
            return; /* later ones of this thread are no smaller */
        }
    }
}

/* A failing device says -1 here, and why at the op's own launch. */
int64_t cuda_check_ids(const void *ids, int64_t n, int64_t v, int64_t ignore, int dtype_ids,
                       pg_stream stream) {
    cudaStream_t s = (cudaStream_t)stream;
    unsigned long long found = ~0ull;
    void *at;
    if (n == 0 || cudaGetSymbolAddress(&at, first_wrong)) return -1;
    if (cudaMemsetAsync(at, 0xff, sizeof found, s)) return -1;
    check_ids_kernel<<<cuda_grid(n, 256), 256, 0, s>>>(ids, n, v, ignore, dtype_ids);
    if (cudaMemcpyAsync(&found, at, sizeof found, cudaMemcpyDeviceToHost, s)) return -1;
    if (cudaStreamSynchronize(s)) return -1;
    return found == ~0ull ? -1 : (int64_t)found;
}
