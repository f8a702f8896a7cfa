/* host_buffer.c: pg_host: a run of host memory, and moving parts of it to and from tensors.  Where
 * blocks are host memory anyway (cpu), a move is a copy made at once; there is
 * nothing to wait for. */
#include "../base/capture.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

struct pg_host {
    void *pinned; /* the backend's; NULL: plain memory of ours */
    char *data;
    int64_t bytes;
};

int pg_host_new(pg_host **out, int64_t bytes) {
    if (!out) return pg_fail(PG_EINVAL, "host buffer: out is NULL");
    *out = NULL;
    if (bytes < 0) return pg_fail(PG_EINVAL, "host buffer: %lld bytes", (long long)bytes);
    const pg_backend *b = pg_backend_device();
    if (!b) return PG_EDEVICE;
    pg_host *h = calloc(1, sizeof *h);
    if (!h) return pg_fail(PG_ENOMEM, "host buffer: no memory for its handle");
    void *data = NULL;
    int rc = PG_OK;
    if (b->memory->pin) rc = b->memory->pin(&h->pinned, &data, bytes);
    else if (posix_memalign(&data, PG_ALIGN, (size_t)pg_max64(bytes, 1)))
        rc = pg_fail(PG_ENOMEM, "host buffer: no memory for %lld bytes", (long long)bytes);
    if (rc < 0) {
        free(h);
        return rc;
    }
    h->data = data;
    h->bytes = bytes;
    *out = h;
    return PG_OK;
}

void *pg_host_data(pg_host *h) { return h ? h->data : NULL; }

static int move(pg_host *h, int64_t offset, const pg_tensor *t, int64_t first, int64_t bytes,
                int to_device) {
    const char *op = to_device ? "upload" : "download";
    PG_POLL();
    if (!h || !t)
        return pg_fail(PG_EINVAL, "%s: the %s is missing (NULL)", op, h ? "tensor" : "buffer");
    int64_t size = pg_dtype_size(t->dtype);
    if (offset < 0 || bytes < 0 || bytes > h->bytes || offset > h->bytes - bytes)
        return pg_fail(PG_ESHAPE, "%s: %lld bytes at %lld of a buffer of %lld", op,
                       (long long)bytes, (long long)offset, (long long)h->bytes);
    if (first < 0 || bytes % size || first > t->count || bytes / size > t->count - first)
        return pg_fail(PG_ESHAPE, "%s: %lld bytes at element %lld do not lie in %s", op,
                       (long long)bytes, (long long)first, pg_shape_text(t));
    const pg_backend *b = pg_backend_now();
    PG_TRY(pg_tensor_usable(t, op));
    if (!b->kernels || !bytes) return PG_OK;
    PG_TRY(pg_capture_bars(op, "the host moves nothing meanwhile; move it before or afterwards"));
    pg_id_range before = t->storage->ids;
    char *device = (char *)(to_device ? pg_tensor_at(t) : (void *)pg_tensor_peek(t)) + first * size;
    char *host = h->data + offset;
    if (h->pinned) PG_TRY(b->memory->transfer(h->pinned, device, host, bytes, to_device));
    else memcpy(to_device ? device : host, to_device ? host : device, (size_t)bytes);
    pg_tensor span = *t; /* the elements written */
    span.first += first;
    span.count = bytes / size;
    if (to_device) pg_ids_note(&span, before, pg_ids_range(host, span.count, t->dtype));
    return PG_OK;
}

int pg_host_upload(pg_host *h, int64_t offset, pg_tensor *t, int64_t first, int64_t bytes) {
    return move(h, offset, t, first, bytes, 1);
}

int pg_host_download(pg_host *h, int64_t offset, const pg_tensor *t, int64_t first, int64_t bytes) {
    return move(h, offset, t, first, bytes, 0);
}

int pg_host_join(pg_host *h) {
    if (!h) return pg_fail(PG_EINVAL, "join: the buffer is missing (NULL)");
    PG_TRY(pg_capture_bars("join", "moves are none of it; join before"));
    return h->pinned ? pg_backend_device()->memory->join(h->pinned) : PG_OK;
}

int pg_host_wait(pg_host *h) {
    PG_POLL();
    if (!h) return pg_fail(PG_EINVAL, "wait: the buffer is missing (NULL)");
    PG_TRY(pg_capture_bars("wait", "moves are none of it; wait before"));
    return h->pinned ? pg_backend_device()->memory->settle(h->pinned) : PG_OK;
}

void pg_host_free(pg_host *h) {
    if (!h || pg_backend_closed()) return;
    if (h->pinned) pg_backend_device()->memory->unpin(h->pinned);
    else free(h->data);
    free(h);
}
