/* safetensors.c: the table of a safetensors file, the same for reading and writing. */
#include "safetensors.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const st_type types[] = {
    {"F32", 4, PG_F32}, {"F64", 8, PG_F64}, {"BF16", 2, PG_BF16}, {"F16", 2, PG_F16},
    {"I32", 4, PG_I32}, {"I64", 8, PG_I64}, {"U8", 1, PG_U8},     {"BOOL", 1, -1},
    {"I8", 1, -1},      {"F8_E5M2", 1, -1}, {"F8_E4M3", 1, -1},   {"I16", 2, PG_I16},
    {"U16", 2, -1},     {"U32", 4, -1},     {"U64", 8, -1},
};
#define TYPES (int)(sizeof types / sizeof *types)

const st_type *st_type_named(const char *name) {
    for (int i = 0; i < TYPES; i++)
        if (!strcmp(types[i].name, name)) return &types[i];
    return NULL;
}

const st_type *st_type_of(int dtype) {
    for (int i = 0; i < TYPES; i++)
        if (types[i].dtype == dtype && dtype >= 0) return &types[i];
    return NULL;
}

pg_safetensors *st_new(const char *path) {
    pg_safetensors *f = calloc(1, sizeof *f);
    char *copy = strdup(path);
    if (!f || !copy) {
        free(f);
        free(copy);
        pg_fail(PG_ENOMEM, "safetensors: %s: no memory for a handle", path);
        return NULL;
    }
    f->path = copy;
    f->fd = f->aside.fd = -1;
    return f;
}

void pg_safetensors_close(pg_safetensors *f) {
    if (!f) return;
    if (f->map) munmap((void *)f->map, (size_t)f->bytes);
    if (f->fd >= 0) close(f->fd);
    pg_aside_close(&f->aside);
    for (int64_t i = 0; i < f->count; i++) free(f->entries[i].name);
    for (int64_t i = 0; i < f->meta_count; i++) {
        free(f->metas[i].key);
        free(f->metas[i].value);
    }
    free(f->entries);
    free(f->by_name);
    free(f->metas);
    free(f->buffer);
    free(f->path);
    free(f);
}

int st_shape(st_entry *e, const st_type *type, int ndim, const int64_t *dims) {
    *e = (st_entry){.type = type, .ndim = ndim, .count = 1};
    for (int i = 0; i < ndim; i++) {
        if (dims[i] < 0)
            return pg_fail(PG_EINVAL, "dim %d is %lld, below 0", i, (long long)dims[i]);
        if (__builtin_mul_overflow(e->count, dims[i], &e->count))
            return pg_fail(PG_EINVAL, "the product of the shape is beyond 2^63");
        e->dims[i] = dims[i];
    }
    if (__builtin_mul_overflow(e->count, (int64_t)type->size, &e->end))
        return pg_fail(PG_EINVAL, "the shape needs more than 2^63 bytes");
    return PG_OK;
}

/* *items with room for one more of `size` bytes; doubles. */
static int grow(void *items, int64_t count, int64_t *room, size_t size) {
    if (count < *room) return PG_OK;
    int64_t more = *room ? 2 * *room : 16;
    void *grown = realloc(*(void **)items, (size_t)more * size);
    if (!grown) return pg_fail(PG_ENOMEM, "no memory for %lld entries", (long long)more);
    *(void **)items = grown;
    *room = more;
    return PG_OK;
}

/* A copy, counted against ST_MAX_TEXT. */
static int keep_text(pg_safetensors *f, char **out, const char *text) {
    int64_t bytes = (int64_t)strlen(text) + 1;
    *out = NULL;
    if (f->text_bytes + bytes > ST_MAX_TEXT)
        return pg_fail(PG_EINVAL, "more than %lld bytes of names and metadata",
                       (long long)ST_MAX_TEXT);
    if (!(*out = strdup(text))) return pg_fail(PG_ENOMEM, "no memory for a name");
    f->text_bytes += bytes;
    return PG_OK;
}

int st_add_entry(pg_safetensors *f, const char *name, const st_entry *like) {
    if (f->count >= ST_MAX_ENTRIES)
        return pg_fail(PG_EINVAL, "more than %d tensors", ST_MAX_ENTRIES);
    PG_TRY(grow(&f->entries, f->count, &f->room, sizeof *f->entries));
    st_entry *e = &f->entries[f->count];
    *e = *like;
    PG_TRY(keep_text(f, &e->name, name));
    f->count++;
    return PG_OK;
}

int st_add_meta(pg_safetensors *f, const char *key, const char *value) {
    if (f->meta_count >= ST_MAX_ENTRIES)
        return pg_fail(PG_EINVAL, "more than %d metadata entries", ST_MAX_ENTRIES);
    PG_TRY(grow(&f->metas, f->meta_count, &f->meta_room, sizeof *f->metas));
    st_meta *m = &f->metas[f->meta_count];
    PG_TRY(keep_text(f, &m->key, key));
    int rc = keep_text(f, &m->value, value);
    if (rc < 0) {
        free(m->key);
        return rc;
    }
    f->meta_count++;
    return PG_OK;
}

static int names_in_order(const void *a, const void *b, void *file) {
    const st_entry *entries = ((pg_safetensors *)file)->entries;
    return strcmp(entries[*(const int32_t *)a].name, entries[*(const int32_t *)b].name);
}

static int metas_in_order(const void *a, const void *b) {
    return strcmp(((const st_meta *)a)->key, ((const st_meta *)b)->key);
}

static int sort_metas(pg_safetensors *f) {
    if (f->meta_count > 1) qsort(f->metas, (size_t)f->meta_count, sizeof *f->metas, metas_in_order);
    for (int64_t i = 1; i < f->meta_count; i++)
        if (!strcmp(f->metas[i - 1].key, f->metas[i].key))
            return pg_fail(PG_EINVAL, "__metadata__: duplicate name \"%.200s\"", f->metas[i].key);
    return PG_OK;
}

int st_sort(pg_safetensors *f, int (*order)(const void *, const void *)) {
    PG_TRY(sort_metas(f));
    size_t n = (size_t)f->count;
    if (n == 0) return PG_OK;
    qsort(f->entries, n, sizeof *f->entries, order);
    free(f->by_name);
    f->by_name = malloc(n * sizeof *f->by_name);
    if (!f->by_name) return pg_fail(PG_ENOMEM, "no memory to sort %zu names", n);
    for (size_t i = 0; i < n; i++) f->by_name[i] = (int32_t)i;
    qsort_r(f->by_name, n, sizeof *f->by_name, names_in_order, f);
    for (size_t i = 1; i < n; i++) {
        const char *name = f->entries[f->by_name[i]].name;
        if (!strcmp(f->entries[f->by_name[i - 1]].name, name))
            return pg_fail(PG_EINVAL, "duplicate name \"%.200s\"", name);
    }
    return PG_OK;
}

/* ---- what both tell ---- */
int64_t pg_safetensors_count(const pg_safetensors *f) { return f ? f->count : 0; }

const char *pg_safetensors_name(const pg_safetensors *f, int64_t i) {
    return f && i >= 0 && i < f->count ? f->entries[i].name : NULL;
}

int64_t pg_safetensors_find(const pg_safetensors *f, const char *name) {
    if (!f || !name || !f->by_name) return -1;
    for (int64_t low = 0, high = f->count - 1; low <= high;) {
        int64_t middle = low + (high - low) / 2;
        int c = strcmp(f->entries[f->by_name[middle]].name, name);
        if (c == 0) return f->by_name[middle];
        if (c < 0) low = middle + 1;
        else high = middle - 1;
    }
    return -1;
}

int pg_safetensors_info(const pg_safetensors *f, int64_t i, int *dtype, int *ndim, int64_t *dims) {
    if (!f || i < 0 || i >= f->count)
        return pg_fail(PG_EINVAL, "safetensors: entry %lld of %lld", (long long)i,
                       (long long)pg_safetensors_count(f));
    const st_entry *e = &f->entries[i];
    if (dtype) *dtype = e->type->dtype;
    if (ndim) *ndim = e->ndim;
    if (dims && e->ndim) memcpy(dims, e->dims, (size_t)e->ndim * sizeof *dims);
    return PG_OK;
}

const char *pg_safetensors_meta(const pg_safetensors *f, const char *key) {
    if (!f || !key) return NULL;
    for (int64_t i = 0; i < f->meta_count; i++)
        if (!strcmp(f->metas[i].key, key)) return f->metas[i].value;
    return NULL;
}
