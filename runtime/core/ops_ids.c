/* ops_ids.c: ops that take or give ids: embedding, argmax, sampling; and the check of ids itself.
 *
 * A kernel trusts its ids, so they are checked here first: against the range that was noted when
 * they were written, which costs nothing; else on the device, by one small kernel and a wait. */
#include <math.h>
#include <stdio.h>
#include "../../kernels/ids.h"
#include "../base/capture.h"
#include "graph.h"
#include "ops_nn.h"

int pg_ids_dtype(const char *op, const char *what, const pg_tensor *ids) {
    if (ids->dtype == PG_I32 || ids->dtype == PG_I64) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: %ss are %s; they must be i32 or i64", op, what,
                   pg_shape_text(ids));
}

/* Two negative values are one more than a range holds: the ids then count as unknown. */
static void widen(pg_id_range *range, int64_t high, int64_t negative) {
    if (high > range->high) range->high = high;
    if (negative && range->negative && negative != range->negative) range->known = 0;
    if (negative) range->negative = negative;
}

pg_id_range pg_ids_range(const void *ids, int64_t n, int dtype) {
    pg_id_range range = {dtype == PG_I32 || dtype == PG_I64, 0, 0};
    for (int64_t i = 0; range.known && i < n; i++) {
        int64_t id = id_at(ids, i, dtype);
        widen(&range, id, id < 0 ? id : 0);
    }
    return range;
}

void pg_ids_note(const pg_tensor *t, pg_id_range before, pg_id_range now) {
    pg_storage *s = t->storage;
    int whole = t->first == 0 && t->count * pg_dtype_size(t->dtype) == s->bytes;
    if (!whole) { /* the other ids are as before; those written over only make the range too wide */
        now.known = now.known && before.known && !pg_capture_on(); /* a graph's next time differs */
        widen(&now, before.high, before.negative);
    }
    now.known = now.known && !s->exposed;
    s->ids = now;
}

static int known_good(const pg_id_range *range, int64_t v, const int64_t *ignore) {
    return range->known && range->high < v &&
           (!range->negative || (ignore && range->negative == *ignore));
}

int pg_ids_check(const pg_backend *b, const char *op, const char *what, const pg_tensor *ids,
                 int64_t v, const int64_t *ignore) {
    if (v == 0 && ids->count > 0) return pg_fail(PG_ESHAPE, "%s: the vocabulary is empty", op);
    int good = known_good(&ids->storage->ids, v, ignore);
    if (pg_capture_on()) return pg_graph_note_ids(op, what, ids, v, ignore, good);
    if (good) return PG_OK;
    int64_t skip = ignore ? *ignore : 0; /* 0 is inside: skipping it changes nothing */
    int64_t bad = b->kernels->check_ids(pg_tensor_peek(ids), ids->count, v, skip, ids->dtype,
                                        b->stream);
    if (bad < 0) return PG_OK;
    int32_t narrow = 0;
    int64_t id = 0, columns = pg_max64(pg_last_dim(ids), 1);
    void *to = ids->dtype == PG_I32 ? (void *)&narrow : (void *)&id;
    PG_TRY(pg_tensor_read(ids, bad, to, pg_dtype_size(ids->dtype)));
    if (ids->dtype == PG_I32) id = narrow;
    char ignored[48] = "";
    if (ignore) snprintf(ignored, sizeof ignored, " (%lld is ignored)", (long long)skip);
    return pg_fail(PG_EINVAL,
                   "%s: %s %lld at row %lld, column %lld is outside the vocabulary [0,%lld)%s", op,
                   what, (long long)id, (long long)(bad / columns), (long long)(bad % columns),
                   (long long)v, ignored);
}

/* y (or dy) is [..,D] over ids [..], beside a table [R,D]. */
static int embedding_shapes(const char *op, const char *name_y, const pg_tensor *y,
                            const char *name_table, const pg_tensor *table, const pg_tensor *ids) {
    PG_TRY(pg_check_floating(op, name_y, y));
    PG_TRY(pg_check_floating(op, name_table, table));
    PG_TRY(pg_ids_dtype(op, "id", ids));
    if (table->ndim == 2 && y->count == ids->count * table->dims[1] &&
        pg_last_dim(y) == table->dims[1])
        return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "%s: %s is %s, %s is %s, ids are %s; %s must be [R,D] and %s [..,D] with "
                   "a row for each id",
                   op, name_y, pg_shape_text(y), name_table, pg_shape_text(table),
                   pg_shape_text(ids), name_table, name_y);
}

/* *vocab ids in all, of which the table holds those from `first` on. */
static int table_of_vocabulary(const char *op, const pg_tensor *table, int64_t first,
                               int64_t *vocab) {
    if (*vocab == 0) *vocab = table->dims[0];
    if (first >= 0 && first <= *vocab) return PG_OK;
    return pg_fail(PG_EINVAL,
                   "%s: first is %lld, vocab is %lld; the table's first id must lie in [0,vocab]",
                   op, (long long)first, (long long)*vocab);
}

int pg_embedding(pg_tensor *y, const pg_tensor *table, const pg_tensor *ids, int64_t first,
                 int64_t vocab) {
    PG_POLL();
    PG_GIVEN("embedding", y, table, ids);
    PG_TRY(embedding_shapes("embedding", "y", y, "table", table, ids));
    PG_TRY(table_of_vocabulary("embedding", table, first, &vocab));
    PG_SAME_DTYPE("embedding", y, table);
    PG_APART("embedding", y, table);
    PG_OPEN(b, "embedding", y, table, ids);
    int64_t v = table->dims[0], d = table->dims[1];
    PG_TRY(pg_ids_check(b, "embedding", "id", ids, vocab, NULL));
    return b->kernels->embedding(pg_tensor_at(y), pg_tensor_at(table), pg_tensor_peek(ids),
                                 ids->count, d, v, first, y->dtype, ids->dtype, b->stream);
}

int pg_embedding_grad(pg_tensor *dtable, const pg_tensor *dy, const pg_tensor *ids, int64_t first,
                      int64_t vocab, int add) {
    PG_POLL();
    PG_GIVEN("embedding_grad", dtable, dy, ids);
    PG_TRY(embedding_shapes("embedding_grad", "dy", dy, "dtable", dtable, ids));
    PG_TRY(table_of_vocabulary("embedding_grad", dtable, first, &vocab));
    PG_MIXED("embedding_grad", dtable, dy);
    PG_APART("embedding_grad", dtable, dy);
    PG_OPEN(b, "embedding_grad", dtable, dy, ids);
    int64_t v = dtable->dims[0], d = dtable->dims[1], n = ids->count;
    PG_TRY(pg_ids_check(b, "embedding_grad", "id", ids, vocab, NULL));
    void *scratch;
    PG_TRY(take_scratch(&scratch, "embedding_grad", b->kernels->embedding_grad_scratch(n, v)));
    return b->kernels->embedding_grad(pg_tensor_at(dtable), pg_tensor_at(dy), pg_tensor_peek(ids),
                                      n, d, v, first, add, scratch, dy->dtype, dtable->dtype,
                                      ids->dtype, b->stream);
}

/* One id for each row of x [..,V], V > 0. */
static int row_ids(const char *op, const pg_tensor *ids, const char *name, const pg_tensor *x) {
    PG_TRY(pg_check_floating(op, name, x));
    PG_TRY(pg_ids_dtype(op, "id", ids));
    if (x->ndim > 0 && pg_last_dim(x) > 0 && ids->count == rows_of(x)) return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "%s: ids are %s, %s is %s; there must be an id for each row, and rows "
                   "must not be empty",
                   op, pg_shape_text(ids), name, pg_shape_text(x));
}

/* The range of ids in [0,v), as argmax and sample give them. */
static pg_id_range below(int64_t v) { return (pg_id_range){.known = 1, .high = v - 1}; }

int pg_argmax(pg_tensor *ids, const pg_tensor *x) {
    PG_POLL();
    PG_GIVEN("argmax", ids, x);
    PG_TRY(row_ids("argmax", ids, "x", x));
    PG_APART("argmax", ids, x);
    PG_OPEN(b, "argmax", ids, x);
    pg_id_range before = ids->storage->ids;
    PG_TRY(b->kernels->argmax(pg_tensor_at(ids), pg_tensor_at(x), rows_of(x), pg_last_dim(x),
                              x->dtype, ids->dtype, b->stream));
    pg_ids_note(ids, before, below(pg_last_dim(x)));
    return PG_OK;
}

int pg_sample(pg_tensor *ids, const pg_tensor *logits, double temperature, int64_t top_k,
              double top_p, uint64_t seed, uint64_t key, int64_t first) {
    PG_POLL();
    PG_GIVEN("sample", ids, logits);
    PG_TRY(row_ids("sample", ids, "logits", logits));
    PG_HAS_DTYPE("sample", ids, PG_I32);
    PG_APART("sample", ids, logits);
    if (!(temperature >= 0) || !isfinite(temperature))
        return pg_fail(PG_EINVAL, "sample: temperature %g; it must be 0 (the likeliest) or above",
                       temperature);
    if (top_k < 0)
        return pg_fail(PG_EINVAL, "sample: top_k %lld; it must be 0 (all) or above",
                       (long long)top_k);
    if (!(top_p > 0 && top_p <= 1))
        return pg_fail(PG_EINVAL, "sample: top_p %g lies outside (0,1]; 1 keeps all", top_p);
    PG_OPEN(b, "sample", ids, logits);
    int64_t n = rows_of(logits), v = pg_last_dim(logits);
    void *scratch;
    PG_TRY(take_scratch(&scratch, "sample", b->kernels->sample_scratch(n, v)));
    pg_id_range before = ids->storage->ids;
    PG_TRY(b->kernels->sample(pg_tensor_at(ids), pg_tensor_at(logits), n, v, temperature, top_k,
                              top_p, seed, key, first, scratch, logits->dtype, b->stream));
    pg_ids_note(ids, before, below(v));
    return PG_OK;
}
