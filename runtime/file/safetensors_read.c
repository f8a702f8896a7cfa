/* safetensors_read.c: open, check and read a safetensors file.  Neighbours: safetensors.c (the
 * table), safetensors_write.c.
 *
 * A file is believed only after every check has passed, so a torn or hostile one is refused at open
 * with its own reason.  The header may be 100 MB of anything: it is walked member by member, and
 * only one member at a time goes through jansson, which checks UTF-8, escapes, numbers and repeated
 * keys.  Memory is bounded by the ST_MAX_ numbers, not by what the header claims. */
#include "cast.h"
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MEMBER_BYTES ((int64_t)64 << 10) /* text of a name, or of a tensor's entry */
#define META_BYTES   ((int64_t)4 << 20)  /* text of one metadata value */
#define CAST_CHUNK   ((int64_t)64 << 10) /* elements converted at a time */
#define COPY_CHUNK   ((int64_t)16 << 20) /* bytes between two looks at the interrupt flag */

/* ---- a JSON object, member by member ---- */
typedef struct {
    const char *at, *end;
    int members;
} walk;
typedef struct {
    const char *key, *value;
    int64_t key_bytes, value_bytes;
} member;

static void skip_space(walk *w) {
    while (w->at < w->end && memchr(" \t\r\n", *w->at, 4)) w->at++;
}

/* The byte after a string that starts at p; NULL if it does not end. */
static const char *string_end(const char *p, const char *end) {
    for (p++; p < end; p++) {
        if (*p == '"') return p + 1;
        if (*p == '\\') p++;
    }
    return NULL;
}

/* The byte after any value that starts at p.  Only brackets are counted: whether they match is left
 * to jansson, which reads this piece later. */
static const char *value_end(const char *p, const char *end) {
    int64_t depth = 0;
    while (p < end) {
        if (*p == '"') {
            if (!(p = string_end(p, end))) return NULL;
        } else if (*p == '{' || *p == '[') {
            depth++;
            p++;
        } else if (*p == '}' || *p == ']') {
            if (depth == 0) return p; /* no value at all */
            depth--;
            p++;
        } else if (depth == 0) { /* a number or a word */
            while (p < end && !memchr(" \t\r\n,}]", *p, 7)) p++;
        } else {
            p++;
            continue;
        }
        if (depth == 0) return p;
    }
    return NULL;
}

static int broken(const walk *w, const char *start, const char *what) {
    return pg_fail(PG_EIO, "header byte %lld: %s", (long long)(w->at - start), what);
}

/* 1 and the next member, 0 at the object's end, negative on an error.  `start` is for messages. */
static int next_member(walk *w, const char *start, member *m) {
    skip_space(w);
    if (w->members == 0) {
        if (w->at >= w->end || *w->at != '{') return broken(w, start, "{ expected");
        w->at++;
        skip_space(w);
    }
    if (w->at < w->end && *w->at == '}') {
        w->at++;
        return 0;
    }
    if (w->members++ > 0) {
        if (w->at >= w->end || *w->at != ',') return broken(w, start, ", or } expected");
        w->at++;
        skip_space(w);
    }
    const char *stop;
    if (w->at >= w->end || *w->at != '"') return broken(w, start, "a quoted name expected");
    if (!(stop = string_end(w->at, w->end))) return broken(w, start, "a name without its end");
    m->key = w->at;
    m->key_bytes = stop - w->at;
    w->at = stop;
    skip_space(w);
    if (w->at >= w->end || *w->at != ':') return broken(w, start, ": expected");
    w->at++;
    skip_space(w);
    if (!(stop = value_end(w->at, w->end))) return broken(w, start, "a value without its end");
    m->value = w->at;
    m->value_bytes = stop - w->at;
    w->at = stop;
    return 1;
}

/* ---- one member through jansson ---- */
static int parse(json_t **out, const char *text, int64_t bytes, int64_t limit, const char *what) {
    json_error_t error;
    if (bytes > limit)
        return pg_fail(PG_EIO, "%s is %lld bytes long; at most %lld are read", what,
                       (long long)bytes, (long long)limit);
    *out = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    if (!*out) return pg_fail(PG_EIO, "%s: %s", what, error.text);
    return PG_OK;
}

static int whole_numbers(const json_t *list, int64_t *out, size_t most, const char *what) {
    if (!json_is_array(list)) return pg_fail(PG_EIO, "%s is missing or no list", what);
    size_t n = json_array_size(list);
    if (n > most) return pg_fail(PG_EIO, "%s has %zu numbers; at most %zu are read", what, n, most);
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(list, i);
        if (!json_is_integer(x) || json_integer_value(x) < 0)
            return pg_fail(PG_EIO, "%s holds something other than whole numbers", what);
        out[i] = json_integer_value(x);
    }
    return (int)n;
}

/* {"dtype":..., "shape":[...], "data_offsets":[begin,end]} against the bytes that are there. */
static int read_entry(st_entry *e, const json_t *j, int64_t data_bytes) {
    if (!json_is_object(j)) return pg_fail(PG_EIO, "the entry is no object");
    const char *dtype = json_string_value(json_object_get(j, "dtype"));
    const st_type *type = dtype ? st_type_named(dtype) : NULL;
    if (!type) return pg_fail(PG_EIO, "bad dtype %s", dtype ? dtype : "(missing)");
    int64_t dims[PG_MAX_DIMS], offsets[2];
    int ndim = whole_numbers(json_object_get(j, "shape"), dims, PG_MAX_DIMS, "shape");
    PG_TRY(ndim);
    int two = whole_numbers(json_object_get(j, "data_offsets"), offsets, 2, "data_offsets");
    PG_TRY(two);
    if (two != 2) return pg_fail(PG_EIO, "data_offsets has %d numbers, not 2", two);
    if (json_object_size(j) != 3)
        return pg_fail(PG_EIO, "an unknown key beside dtype, shape and data_offsets");
    PG_TRY(st_shape(e, type, ndim, dims));
    int64_t need = e->end;
    e->begin = offsets[0];
    e->end = offsets[1];
    if (e->begin > e->end)
        return pg_fail(PG_EIO, "data_offsets [%lld,%lld] run backwards", (long long)e->begin,
                       (long long)e->end);
    if (e->end - e->begin != need)
        return pg_fail(PG_EIO,
                       "wrong byte count: data_offsets hold %lld, shape and dtype need %lld",
                       (long long)(e->end - e->begin), (long long)need);
    if (e->end > data_bytes)
        return pg_fail(PG_EIO,
                       "ends at byte %lld beyond the end of the data (%lld bytes): cut short?",
                       (long long)e->end, (long long)data_bytes);
    return PG_OK;
}

static int add_entry(pg_safetensors *f, const char *name, const member *m) {
    json_t *value = NULL;
    st_entry e;
    int rc;
    PG_TRY_TO(done, rc, parse(&value, m->value, m->value_bytes, MEMBER_BYTES, "its entry"));
    PG_TRY_TO(done, rc, read_entry(&e, value, f->bytes - f->data_start));
    rc = st_add_entry(f, name, &e);
done:
    json_decref(value);
    return rc < 0 ? pg_fail_within(rc, "tensor \"%.200s\": ", name) : rc;
}

static int add_metadata(pg_safetensors *f, const char *start, const member *m) {
    walk w = {m->value, m->value + m->value_bytes, 0};
    member inner;
    int more;
    while ((more = next_member(&w, start, &inner)) > 0) {
        json_t *key = NULL, *value = NULL;
        int rc;
        PG_TRY_TO(next, rc, parse(&key, inner.key, inner.key_bytes, MEMBER_BYTES, "a key"));
        PG_TRY_TO(next, rc, parse(&value, inner.value, inner.value_bytes, META_BYTES, "a value"));
        if (!json_is_string(value))
            rc = pg_fail(PG_EIO, "\"%.200s\" is no string", json_string_value(key));
        else rc = st_add_meta(f, json_string_value(key), json_string_value(value));
    next:
        json_decref(key);
        json_decref(value);
        if (rc < 0) return pg_fail_within(rc, "__metadata__: ");
    }
    return more;
}

/* ---- the whole header ---- */
static int read_members(pg_safetensors *f, const char *start, int64_t bytes) {
    walk w = {start, start + bytes, 0};
    member m;
    int more, metadata = 0;
    if (bytes == 0 || *start != '{') return pg_fail(PG_EIO, "the header does not begin with {");
    while ((more = next_member(&w, start, &m)) > 0) {
        json_t *key = NULL;
        PG_TRY(parse(&key, m.key, m.key_bytes, MEMBER_BYTES, "a name"));
        int rc;
        if (strcmp(json_string_value(key), "__metadata__") != 0)
            rc = add_entry(f, json_string_value(key), &m);
        else if (metadata++) rc = pg_fail(PG_EIO, "duplicate name \"__metadata__\"");
        else rc = add_metadata(f, start, &m);
        json_decref(key);
        PG_TRY(rc);
    }
    PG_TRY(more);
    skip_space(&w);
    return w.at == w.end ? PG_OK : broken(&w, start, "text after the closing }");
}

/* Empty tensors first among those that begin together: they end where they begin. */
static int by_offset(const void *a, const void *b) {
    const st_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The entries, sorted by offset, tile the data: each begins where the last one ends. */
static int check_tiling(const pg_safetensors *f) {
    int64_t at = 0, data = f->bytes - f->data_start;
    for (int64_t i = 0; i < f->count; i++) {
        const st_entry *e = &f->entries[i];
        if (e->begin < at)
            return pg_fail(PG_EIO,
                           "overlap: \"%.200s\" begins at byte %lld, \"%.200s\" ends at %lld",
                           e->name, (long long)e->begin, f->entries[i - 1].name, (long long)at);
        if (e->begin > at)
            return pg_fail(PG_EIO, "hole: bytes %lld to %lld before \"%.200s\" belong to no tensor",
                           (long long)at, (long long)e->begin, e->name);
        at = e->end;
    }
    if (at < data)
        return pg_fail(PG_EIO, "trailing bytes: %lld after the last tensor",
                       (long long)(data - at));
    return PG_OK;
}

static int check(pg_safetensors *f) {
    uint64_t header = 0;
    if (f->bytes < 8)
        return pg_fail(PG_EIO, "%lld bytes; even an empty file has 8 before its header",
                       (long long)f->bytes);
    for (int i = 0; i < 8; i++) header |= (uint64_t)(uint8_t)f->map[i] << (8 * i);
    if (header > ST_MAX_HEADER)
        return pg_fail(PG_EIO, "header length %llu is above the format's limit of %d",
                       (unsigned long long)header, ST_MAX_HEADER);
    if ((int64_t)header > f->bytes - 8)
        return pg_fail(
            PG_EIO, "header of %llu bytes runs past the end of the file (%lld bytes): cut short?",
            (unsigned long long)header, (long long)f->bytes);
    f->data_start = 8 + (int64_t)header;
    PG_TRY(read_members(f, f->map + 8, (int64_t)header));
    PG_TRY(st_sort(f, by_offset));
    return check_tiling(f);
}

static int map_file(pg_safetensors *f) {
    struct stat st;
    /* O_NONBLOCK: a FIFO must not hang us; it has no effect on files. */
    f->fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0 || fstat(f->fd, &st) != 0) return pg_fail(PG_EIO, "%m");
    if (!S_ISREG(st.st_mode)) return pg_fail(PG_EIO, "is no regular file");
    f->bytes = (int64_t)st.st_size;
    if (f->bytes == 0) return PG_OK; /* cannot be mapped; check() refuses it */
    void *map = mmap(NULL, (size_t)f->bytes, PROT_READ, MAP_PRIVATE, f->fd, 0);
    if (map == MAP_FAILED) return pg_fail(PG_EIO, "mmap: %m");
    f->map = map;
    return PG_OK;
}

int pg_safetensors_open(pg_safetensors **out, const char *path) {
    if (!out || !path) return pg_fail(PG_EINVAL, "safetensors: open: NULL");
    *out = NULL;
    pg_safetensors *f = st_new(path);
    if (!f) return PG_ENOMEM;
    int rc = map_file(f);
    if (rc == PG_OK) rc = check(f);
    if (rc < 0) {
        pg_safetensors_close(f);
        return pg_fail_within(rc == PG_ENOMEM ? rc : PG_EIO, "safetensors: %.600s: ", path);
    }
    *out = f;
    return PG_OK;
}

/* ---- numbers ---- */
static int copy_same(pg_tensor *t, const char *from, int64_t count, int64_t size) {
    int64_t chunk = COPY_CHUNK / size;
    for (int64_t done = 0; done < count; done += chunk) {
        int64_t n = pg_min64(chunk, count - done);
        PG_TRY(pg_tensor_write(t, done, from + done * size, n * size));
    }
    return PG_OK;
}

/* n numbers of the block from k on, as dtype; data: the entry's first byte. */
static void gather(char *to, int dtype, const char *data, const st_type *type, const st_block *b,
                   int64_t k, int64_t n) {
    int64_t size = pg_dtype_size(dtype);
    for (int64_t done = 0, run; done < n; done += run) {
        const char *at = data + st_block_at(b, k + done, n - done, &run) * type->size;
        if (dtype == type->dtype) memcpy(to + done * size, at, (size_t)(run * size));
        else pg_cast(to + done * size, dtype, at, type->dtype, run);
    }
}

static int copy_gathered(pg_tensor *t, const char *data, const st_type *type, const st_block *b,
                         int64_t from, int64_t count) {
    int dtype = pg_tensor_dtype(t), rc = PG_OK;
    int64_t size = pg_dtype_size(dtype);
    char *buffer = malloc((size_t)(CAST_CHUNK * size));
    if (!buffer) return pg_fail(PG_ENOMEM, "no memory to convert");
    for (int64_t done = 0; done < count && rc >= 0; done += CAST_CHUNK) {
        int64_t n = pg_min64(CAST_CHUNK, count - done);
        gather(buffer, dtype, data, type, b, from + done, n);
        rc = pg_tensor_write(t, done, buffer, n * size);
    }
    free(buffer);
    return rc;
}

/* A file that shrank since open would raise SIGBUS where it is touched; one cut at this very moment
 * still may.  Files are replaced by rename, never rewritten, so this is somebody else's doing. */
static int still_whole(const pg_safetensors *f) {
    struct stat st;
    if (fstat(f->fd, &st) != 0) return pg_fail(PG_EIO, "%m");
    if ((int64_t)st.st_size < f->bytes)
        return pg_fail(PG_EIO, "the file shrank from %lld to %lld bytes while open",
                       (long long)f->bytes, (long long)st.st_size);
    return PG_OK;
}

static int read_block(const pg_safetensors *f, const st_entry *e, const st_block *b, int64_t from,
                      pg_tensor *t) {
    int64_t count = pg_tensor_count(t), run;
    if (e->type->dtype < 0)
        return pg_fail(PG_EINVAL, "dtype %s has no tensor type here", e->type->name);
    PG_TRY(st_check_block(e, b, from, count));
    PG_TRY(still_whole(f));
    const char *data = f->map + f->data_start + e->begin;
    int64_t at = st_block_at(b, from, count, &run);
    if (run == count && e->type->dtype == pg_tensor_dtype(t))
        return copy_same(t, data + at * e->type->size, count, e->type->size);
    return copy_gathered(t, data, e->type, b, from, count);
}

int pg_safetensors_read(const pg_safetensors *f, int64_t i, int64_t first, pg_tensor *t) {
    return pg_safetensors_read_block(f, i, first, 0, 0, 0, t);
}

int pg_safetensors_read_block(const pg_safetensors *f, int64_t i, int64_t first, int64_t cols,
                              int64_t stride, int64_t from, pg_tensor *t) {
    PG_POLL();
    if (!f || !t || !f->map || i < 0 || i >= f->count)
        return pg_fail(PG_EINVAL, "safetensors: read: entry %lld of %lld, tensor %p", (long long)i,
                       (long long)pg_safetensors_count(f), (void *)t);
    int rc = read_block(f, &f->entries[i], &(st_block){first, cols, stride}, from, t);
    if (rc < 0 && rc != PG_EINTR)
        return pg_fail_within(rc, "safetensors: %.600s: \"%.200s\": ", f->path, f->entries[i].name);
    return rc;
}
