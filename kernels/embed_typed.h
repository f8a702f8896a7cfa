/* embed_typed.h: adding rows of dy to the table's lines that their ids name; see typed_twice.h. */

PG_CLONES static void N(add_to)(REAL *restrict y, const REAL *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

/* A piece is STRIP columns of the whole table: each number of the table is summed by one thread, in
 * the order of the ids. */
static void N(embedding_grad)(REAL *dtable, const REAL *dy, const void *ids, int64_t n, int64_t d,
                               int64_t v, int64_t first, int add, int dtype_ids) {
    if (!add) {
#pragma omp parallel for if (v * d >= CPU_MANY)
        for (int64_t row = 0; row < v; row++) memset(dtable + row * d, 0, (size_t)d * sizeof(REAL));
    }
#pragma omp parallel for if (n * d >= CPU_MANY)
    for (int64_t from = 0; from < d; from += STRIP) {
        int64_t width = pg_min64(STRIP, d - from);
        for (int64_t i = 0; i < n; i++) {
            int64_t row = row_at(ids, i, dtype_ids, first, v);
            if (row >= 0) N(add_to)(dtable + row * d + from, dy + i * d + from, width);
        }
    }
}
