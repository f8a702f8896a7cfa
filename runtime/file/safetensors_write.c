/* safetensors_write.c: write a safetensors file aside and rename it; see aside.h.
 *
 * The header must be known before the data, so tensors are declared first; begin lays them out
 * (larger elements first, then by name, so that every tensor is aligned to its element) and writes
 * the header; then values come in any order, and finish wants all of them. */
#include "cast.h"
#include "safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK ((int64_t)128 << 10) /* elements at a time: at most 1 MiB, and as much to cast */

int pg_safetensors_create(pg_safetensors **out, const char *path) {
    if (!out || !path) return pg_fail(PG_EINVAL, "safetensors: create: NULL");
    *out = NULL;
    pg_safetensors *f = st_new(path);
    if (!f) return PG_ENOMEM;
    int rc = pg_aside_open(&f->aside, path);
    if (rc < 0) {
        pg_safetensors_close(f);
        return pg_fail_within(rc, "safetensors: ");
    }
    *out = f;
    return PG_OK;
}

/* Every call after create: the file is being written and has, or has not yet, its header. */
int st_writing(const pg_safetensors *f, int begun, const char *op) {
    if (!f || f->aside.fd < 0)
        return pg_fail(PG_EINVAL, "safetensors: %s: the file is not open for writing", op);
    if ((f->data_start > 0) == begun) return PG_OK;
    return pg_fail(PG_EINVAL, "safetensors: %s: %s: %s", f->path, op,
                   begun ? "call begin first" : "the header is written already");
}

static int check_utf8(const char *text, const char *what) {
    json_t *s = text ? json_string(text) : NULL;
    json_decref(s);
    if (!s) return pg_fail(PG_EINVAL, "%s is no valid UTF-8", what);
    return PG_OK;
}

static int set_meta(pg_safetensors *f, const char *key, const char *value) {
    PG_TRY(check_utf8(key, "a key"));
    PG_TRY(check_utf8(value, "a value"));
    for (int64_t i = 0; i < f->meta_count; i++) {
        if (strcmp(f->metas[i].key, key) != 0) continue;
        st_meta *old = &f->metas[i];
        f->text_bytes -= (int64_t)strlen(old->key) + (int64_t)strlen(old->value) + 2;
        free(old->key);
        free(old->value);
        *old = f->metas[--f->meta_count];
        break;
    }
    return st_add_meta(f, key, value);
}

int pg_safetensors_set_meta(pg_safetensors *f, const char *key, const char *value) {
    PG_TRY(st_writing(f, 0, "metadata"));
    int rc = set_meta(f, key, value);
    return rc < 0 ? pg_fail_within(rc, "safetensors: %.600s: metadata: ", f->path) : rc;
}

static int declare(pg_safetensors *f, const char *name, int dtype, int ndim, const int64_t *dims) {
    st_entry e;
    const st_type *type = st_type_of(dtype);
    PG_TRY(check_utf8(name, "the name"));
    if (!strcmp(name, "__metadata__")) return pg_fail(PG_EINVAL, "the format keeps this name");
    if (!type) return pg_fail(PG_EINVAL, "dtype %d", dtype);
    if (ndim < 0 || ndim > PG_MAX_DIMS || (ndim && !dims))
        return pg_fail(PG_ESHAPE, "%d dims; 0 to %d can be written", ndim, PG_MAX_DIMS);
    PG_TRY(st_shape(&e, type, ndim, dims));
    return st_add_entry(f, name, &e);
}

int pg_safetensors_declare(pg_safetensors *f, const char *name, int dtype, int ndim,
                           const int64_t *dims) {
    PG_TRY(st_writing(f, 0, "declare"));
    int rc = declare(f, name, dtype, ndim, dims);
    if (rc < 0)
        return pg_fail_within(rc, "safetensors: %.600s: \"%.200s\": ", f->path, name ? name : "");
    return rc;
}

/* ---- the header ---- */
static int by_size_then_name(const void *a, const void *b) {
    const st_entry *x = a, *y = b;
    if (x->type->size != y->type->size) return x->type->size > y->type->size ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int lay_out(pg_safetensors *f, int64_t *total) {
    int64_t at = 0;
    for (int64_t i = 0; i < f->count; i++) {
        st_entry *e = &f->entries[i];
        int64_t bytes = e->count * e->type->size; /* fits: st_shape */
        e->begin = at;
        if (__builtin_add_overflow(at, bytes, &at) || at > INT64_MAX / 2)
            return pg_fail(PG_EINVAL, "the tensors together need more than 2^62 bytes");
        e->end = at;
    }
    *total = at;
    return PG_OK;
}

static json_t *entry_json(const st_entry *e) {
    json_t *shape = json_array();
    for (int i = 0; i < e->ndim; i++) {
        if (json_array_append_new(shape, json_integer(e->dims[i])) == 0) continue;
        json_decref(shape);
        return NULL;
    }
    return json_pack("{s:s, s:o, s:[I,I]}", "dtype", e->type->name, "shape", shape, "data_offsets",
                     (json_int_t)e->begin, (json_int_t)e->end);
}

/* Compact, in the order of the data, metadata first; NULL only without memory. */
static char *header_text(const pg_safetensors *f) {
    json_t *all = json_object(), *metadata = f->meta_count ? json_object() : NULL;
    int failed = 0;
    for (int64_t i = 0; i < f->meta_count; i++)
        failed |= json_object_set_new(metadata, f->metas[i].key, json_string(f->metas[i].value));
    if (f->meta_count) failed |= json_object_set_new(all, "__metadata__", metadata);
    for (int64_t i = 0; i < f->count; i++)
        failed |= json_object_set_new(all, f->entries[i].name, entry_json(&f->entries[i]));
    char *text = failed ? NULL : json_dumps(all, JSON_COMPACT);
    json_decref(all);
    return text;
}

static int write_header(pg_safetensors *f, int64_t data_bytes) {
    int rc = PG_ENOMEM;
    char *padded = NULL, *text = header_text(f);
    if (!text) {
        pg_fail(rc, "no memory for the header");
        goto done;
    }
    int64_t bytes = (int64_t)strlen(text), n = (bytes + 7) / 8 * 8;
    if (n > ST_MAX_HEADER) {
        rc = pg_fail(PG_EINVAL, "a header of %lld bytes; the format allows %d", (long long)n,
                     ST_MAX_HEADER);
        goto done;
    }
    padded = malloc((size_t)n + 8);
    if (!padded) {
        pg_fail(rc, "no memory for the header");
        goto done;
    }
    for (int i = 0; i < 8; i++) padded[i] = (char)(n >> (8 * i));
    memcpy(padded + 8, text, (size_t)bytes);
    memset(padded + 8 + bytes, ' ', (size_t)(n - bytes));
    PG_TRY_TO(done, rc, pg_aside_reserve(&f->aside, 8 + n + data_bytes));
    PG_TRY_TO(done, rc, pg_aside_write(&f->aside, padded, 8 + n, 0));
    f->data_start = 8 + n;
done:
    free(text);
    free(padded);
    return rc;
}

int st_buffer(pg_safetensors *f) {
    if (!f->buffer) f->buffer = malloc((size_t)(2 * CHUNK * 8));
    if (!f->buffer) return pg_fail(PG_ENOMEM, "no memory to write through");
    return PG_OK;
}

static int begin(pg_safetensors *f) {
    int64_t total = 0;
    PG_TRY(st_sort(f, by_size_then_name));
    PG_TRY(lay_out(f, &total));
    PG_TRY(st_buffer(f));
    return write_header(f, total);
}

int pg_safetensors_begin(pg_safetensors *f) {
    PG_TRY(st_writing(f, 0, "begin"));
    int rc = begin(f);
    return rc < 0 ? pg_fail_within(rc, "safetensors: %.600s: ", f->path) : rc;
}

/* ---- the data ---- */
/* n values to numbers k, k + 1, ... of the block, a run without gaps at a time. */
static int write_values(pg_safetensors *f, const st_entry *e, const st_block *b, int64_t k,
                        const char *values, int64_t n) {
    int64_t size = e->type->size, start = f->data_start + e->begin;
    for (int64_t done = 0, run; done < n; done += run) {
        int64_t at = st_block_at(b, k + done, n - done, &run);
        PG_TRY(pg_aside_write(&f->aside, values + done * size, run * size, start + at * size));
    }
    return PG_OK;
}

static int write_block(pg_safetensors *f, st_entry *e, const st_block *b, int64_t from,
                       const pg_tensor *t) {
    int64_t count = pg_tensor_count(t);
    int dtype = pg_tensor_dtype(t), to = e->type->dtype;
    PG_TRY(st_check_block(e, b, from, count));
    char *values = f->buffer, *cast = f->buffer + CHUNK * 8;
    for (int64_t done = 0; done < count; done += CHUNK) {
        int64_t n = pg_min64(CHUNK, count - done);
        PG_TRY(pg_tensor_read(t, done, values, n * pg_dtype_size(dtype)));
        if (dtype != to) pg_cast(cast, to, values, dtype, n);
        PG_TRY(write_values(f, e, b, from + done, dtype != to ? cast : values, n));
    }
    e->written += count;
    return PG_OK;
}

int pg_safetensors_write(pg_safetensors *f, const char *name, int64_t first, const pg_tensor *t) {
    return pg_safetensors_write_block(f, name, first, 0, 0, 0, t);
}

int pg_safetensors_write_block(pg_safetensors *f, const char *name, int64_t first, int64_t cols,
                               int64_t stride, int64_t from, const pg_tensor *t) {
    PG_POLL();
    PG_TRY(st_writing(f, 1, "write"));
    int64_t i = pg_safetensors_find(f, name);
    if (i < 0 || !t)
        return pg_fail(PG_EINVAL,
                       "safetensors: %s: write: \"%.200s\" is not declared, or no tensor", f->path,
                       name ? name : "");
    int rc = write_block(f, &f->entries[i], &(st_block){first, cols, stride}, from, t);
    if (rc < 0 && rc != PG_EINTR)
        return pg_fail_within(rc, "safetensors: %.600s: \"%.200s\": ", f->path, name);
    return rc;
}

int pg_safetensors_finish(pg_safetensors *f) {
    PG_TRY(st_writing(f, 1, "finish"));
    if (!f->aside.aside)
        return pg_fail(PG_EINVAL, "safetensors: %s: finish: who created the file does it", f->path);
    for (int64_t i = 0; i < f->count; i++) {
        const st_entry *e = &f->entries[i];
        if (e->written != e->count && !f->shared)
            return pg_fail(PG_EINVAL,
                           "safetensors: %s: finish: \"%.200s\" got %lld of %lld elements", f->path,
                           e->name, (long long)e->written, (long long)e->count);
    }
    int rc = pg_aside_finish(&f->aside);
    return rc < 0 ? pg_fail_within(rc, "safetensors: ") : rc;
}
