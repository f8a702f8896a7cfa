/* embed.c: rows of a table by id, and the table's gradient without atomics.  The table may be a
 * part of the vocabulary's: ids of other parts give rows of zeros and no gradient.
 *
 * The gradient is cut by columns, not by ids: equal ids never meet in two threads, so the sums have
 * one order and the same bits with any number of threads.  Ids were checked by the core. */
#include "ids.h"
#define STRIP      64 /* columns of a piece: some cache lines, and enough pieces for all threads */
#define TYPED_BODY "embed_typed.h"
#include "typed_twice.h"

int cpu_embedding(void *y, const void *table, const void *ids, int64_t n, int64_t d, int64_t v,
                  int64_t first, int dtype, int dtype_ids, pg_stream s) {
    (void)s;
    int64_t bytes = d * pg_dtype_size(dtype);
#pragma omp parallel for if (n * d >= CPU_MANY)
    for (int64_t i = 0; i < n; i++) {
        int64_t row = row_at(ids, i, dtype_ids, first, v);
        char *to = (char *)y + i * bytes;
        if (row < 0) memset(to, 0, (size_t)bytes);
        else memcpy(to, (const char *)table + row * bytes, (size_t)bytes);
    }
    return PG_OK;
}

int64_t cpu_embedding_grad_scratch(int64_t n, int64_t v) {
    (void)n, (void)v;
    return 0;
}

int cpu_embedding_grad(void *dtable, const void *dy, const void *ids, int64_t n, int64_t d,
                       int64_t v, int64_t first, int add, void *scratch, int dtype, int dtype_ids,
                       pg_stream s) {
    (void)scratch, (void)s;
    TYPED_CALL(embedding_grad, dtype, dtable, dy, ids, n, d, v, first, add, dtype_ids);
}
