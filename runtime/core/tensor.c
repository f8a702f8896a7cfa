/* tensor.c: handles, views and host transfers.  A storage is shared by count; the last handle gives
 * its block back to the pool.  Nothing here knows an op. */
#include "../base/capture.h"
#include "graph.h"
#include "tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int count_of(int ndim, const int64_t *dims, int64_t *count, const char *op) {
    if (ndim < 0 || ndim > PG_MAX_DIMS || (ndim && !dims))
        return pg_fail(PG_ESHAPE, "%s: %d dims; a tensor has 0 to %d", op, ndim, PG_MAX_DIMS);
    int64_t most = 1; /* a 0 among them hides nothing: ops multiply some dims without the others */
    *count = 1;
    for (int i = 0; i < ndim; i++) {
        if (dims[i] < 0)
            return pg_fail(PG_ESHAPE, "%s: dim %d is %lld, below 0", op, i, (long long)dims[i]);
        if (dims[i] && most > ((int64_t)1 << 56) / dims[i])
            return pg_fail(PG_ESHAPE, "%s: more than 2^56 elements", op);
        if (dims[i]) most *= dims[i];
        *count *= dims[i];
    }
    return PG_OK;
}

static pg_tensor *new_handle(pg_storage *storage, int dtype, int64_t first, int ndim,
                             const int64_t *dims, int64_t count) {
    pg_tensor *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->storage = storage;
    t->first = first;
    t->count = count;
    t->dtype = dtype;
    t->ndim = ndim;
    if (ndim) memcpy(t->dims, dims, (size_t)ndim * sizeof *dims);
    __atomic_add_fetch(&storage->handles, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&storage->owners, 1, __ATOMIC_RELAXED);
    pg_pool_count_tensor(1);
    return t;
}

static int no_handle(const char *op) {
    return pg_fail(PG_ENOMEM, "%s: no memory for a handle", op);
}

int pg_tensor_new(pg_tensor **out, int dtype, int ndim, const int64_t *dims) {
    PG_POLL();
    int64_t count;
    if (!out) return pg_fail(PG_EINVAL, "tensor: out is NULL");
    *out = NULL;
    if (dtype < 0 || dtype >= PG_NDTYPES) return pg_fail(PG_EINVAL, "tensor: dtype %d", dtype);
    PG_TRY(count_of(ndim, dims, &count, "tensor"));
    const pg_backend *b = pg_backend_now();
    if (!b) return PG_EDEVICE;
    pg_storage *s = calloc(1, sizeof *s);
    if (!s) return no_handle("tensor");
    s->bytes = count * pg_dtype_size(dtype);
    s->tag = pg_pool_tag_now();
    s->has_data = b->kernels != NULL;
    int rc = s->has_data ? pg_pool_take(&s->block, s->bytes, s->tag, &s->arena) : PG_OK;
    if (rc < 0) {
        free(s);
        return rc;
    }
    *out = new_handle(s, dtype, 0, ndim, dims, count);
    if (!*out) {
        if (s->block) pg_pool_give(s->block, s->bytes, s->tag, s->arena);
        free(s);
        return no_handle("tensor");
    }
    return s->has_data && pg_pool_wants_collect() ? PG_COLLECT : PG_OK;
}

int pg_tensor_view(pg_tensor **out, pg_tensor *t, int64_t first, int ndim, const int64_t *dims) {
    int64_t count;
    if (!out || !t) return pg_fail(PG_EINVAL, "view: a NULL tensor");
    *out = NULL;
    PG_TRY(count_of(ndim, dims, &count, "view"));
    if (first < 0 || count > t->count || first > t->count - count)
        return pg_fail(PG_ESHAPE, "view: elements %lld to %lld of a tensor %s with %lld",
                       (long long)first, (long long)(first + count), pg_shape_text(t),
                       (long long)t->count);
    *out = new_handle(t->storage, t->dtype, t->first + first, ndim, dims, count);
    return *out ? PG_OK : no_handle("view");
}

void pg_storage_release(pg_storage *s) {
    if (__atomic_sub_fetch(&s->owners, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (s->block) pg_pool_give(s->block, s->bytes, s->tag, s->arena);
    free(s->dropped);
    free(s);
}

void pg_tensor_free(pg_tensor *t) {
    if (!t || pg_backend_closed()) return;
    __atomic_sub_fetch(&t->storage->handles, 1, __ATOMIC_RELAXED);
    pg_storage_release(t->storage);
    free(t);
    pg_pool_count_tensor(-1);
}

int64_t pg_tensor_count(const pg_tensor *t) { return t ? t->count : 0; }
int pg_tensor_dtype(const pg_tensor *t) { return t ? t->dtype : -1; }
int pg_tensor_handles(const pg_tensor *t) { return t ? t->storage->handles : 0; }

static const void *address(const pg_tensor *t) {
    return t->storage->block ? (char *)t->storage->block + t->first * pg_dtype_size(t->dtype)
                             : NULL;
}

const void *pg_tensor_peek(const pg_tensor *t) {
    if (pg_capture_on()) pg_graph_note(t->storage, 0);
    return address(t);
}

void *pg_tensor_at(const pg_tensor *t) {
    if (pg_capture_on()) pg_graph_note(t->storage, 1);
    t->storage->ids.known = 0;
    return (void *)address(t);
}

int pg_tensor_usable(const pg_tensor *t, const char *op) {
    if (!t) return pg_fail(PG_EINVAL, "%s: a tensor is missing (NULL)", op);
    if (pg_backend_now() && !pg_backend_now()->kernels) return PG_OK;
    if (t->storage->dropped)
        return pg_fail(PG_EINVAL, "%s: the numbers of %s are not here now (dropped; gather first)",
                       op, t->storage->dropped);
    if (!t->storage->has_data)
        return pg_fail(PG_ENODATA, "%s: this tensor %s has a shape and no numbers", op,
                       pg_shape_text(t));
    if (pg_arena_spoilt(t->storage->arena))
        return pg_fail(
            PG_ENODATA,
            "%s: this tensor %s was made in a graph whose recording was given up; its numbers were "
            "never computed, make it again",
            op, pg_shape_text(t));
    return PG_OK;
}

void *pg_tensor_data(pg_tensor *t) {
    const pg_backend *b = pg_backend_now();
    if (!b || !b->kernels || !b->memory->host_visible || pg_tensor_usable(t, "data") < 0)
        return NULL;
    t->storage->exposed = 1;
    return pg_tensor_at(t);
}

static int check_span(const pg_tensor *t, int64_t first, const void *host, int64_t bytes,
                      const char *op) {
    if (!t || (!host && bytes)) return pg_fail(PG_EINVAL, "%s: NULL", op);
    int64_t size = pg_dtype_size(t->dtype);
    if (first < 0 || bytes < 0 || bytes % size || first > t->count ||
        bytes / size > t->count - first)
        return pg_fail(PG_ESHAPE, "%s: %lld bytes at element %lld do not lie in %s", op,
                       (long long)bytes, (long long)first, pg_shape_text(t));
    return PG_OK;
}

int pg_tensor_write(pg_tensor *t, int64_t first, const void *src, int64_t bytes) {
    PG_POLL();
    PG_TRY(check_span(t, first, src, bytes, "write"));
    const pg_backend *b = pg_backend_now();
    if (!b) return PG_EDEVICE;
    PG_TRY(pg_tensor_usable(t, "write"));
    if (!b->kernels || !bytes) return PG_OK;
    PG_TRY(pg_capture_bars("write",
                           "numbers from the host would stay those of now; write them before, or "
                           "make them on the device (pg.full, pg.zeros)"));
    int64_t size = pg_dtype_size(t->dtype);
    pg_id_range before = t->storage->ids;
    PG_TRY(b->memory->upload((char *)pg_tensor_at(t) + first * size, src, bytes, b->stream));
    pg_tensor span = *t; /* the elements written */
    span.first += first;
    span.count = bytes / size;
    pg_ids_note(&span, before, pg_ids_range(src, span.count, t->dtype));
    return PG_OK;
}

int pg_tensor_read(const pg_tensor *t, int64_t first, void *dst, int64_t bytes) {
    PG_POLL();
    PG_TRY(check_span(t, first, dst, bytes, "read"));
    const pg_backend *b = pg_backend_now();
    if (!b) return PG_EDEVICE;
    if (!b->kernels)
        return pg_fail(PG_ENODATA,
                       "read: only shapes are being computed here; a number of %s is "
                       "not known",
                       pg_shape_text(t));
    PG_TRY(pg_tensor_usable(t, "read"));
    if (!bytes) return PG_OK;
    PG_TRY(pg_capture_bars(
        "read", "the host sees no numbers (item, at, totable, printing); return the tensor "
                "and look at it afterwards"));
    const char *at = (const char *)pg_tensor_peek(t) + first * pg_dtype_size(t->dtype);
    return b->memory->download(dst, at, bytes, b->stream);
}

int pg_storage_drop(pg_tensor *t, const char *name) {
    PG_TRY(pg_tensor_usable(t, "drop"));
    PG_TRY(pg_capture_bars("drop",
                           "it needs what it computes with where it lies; drop it afterwards"));
    pg_storage *s = t->storage;
    if (!name) name = "a segment";
    pg_works_sweep();
    if (s->works) /* its peers, or the device, would write into another tensor's numbers */
        return pg_fail(PG_EINVAL,
                       "drop: a collective works on %s, and nobody has waited for it; "
                       "work:wait() comes before",
                       name);
    s->dropped = strdup(name);
    if (!s->dropped) return no_handle("drop");
    if (s->block) pg_pool_give(s->block, s->bytes, s->tag, s->arena);
    s->block = NULL;
    s->ids.known = 0;
    return PG_OK;
}

int pg_storage_fill(pg_tensor *t) {
    if (!t) return pg_fail(PG_EINVAL, "fill storage: NULL");
    pg_storage *s = t->storage;
    if (!s->dropped) return PG_OK;
    if (s->has_data) PG_TRY(pg_pool_take(&s->block, s->bytes, s->tag, &s->arena));
    free(s->dropped);
    s->dropped = NULL;
    return PG_OK;
}

int pg_same_shape(const pg_tensor *a, const pg_tensor *b) {
    return a->ndim == b->ndim && !memcmp(a->dims, b->dims, (size_t)a->ndim * sizeof *a->dims);
}

const char *pg_shape_text(const pg_tensor *t) {
    static _Thread_local char ring[8][200];
    static _Thread_local int turn;
    char *text = ring[turn = (turn + 1) % 8];
    if (!t) return "NULL";
    int used = snprintf(text, 200, "[");
    for (int i = 0; i < t->ndim; i++)
        used += snprintf(text + used, (size_t)(200 - used), "%s%lld", i ? "," : "",
                         (long long)t->dims[i]);
    snprintf(text + used, (size_t)(200 - used), "] %s", pg_dtype_name(t->dtype));
    return text;
}
