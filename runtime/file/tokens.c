/* tokens.c: read token files, many as one long run.  Neighbours: tokens_write.c, prefetch.c.
 *
 * Each file is mapped whole and its size compared with its header when it is opened; afterwards
 * only the mapping is kept (a thousand shards are more than the usual limit on open files).  A file
 * cut short while mapped raises SIGBUS: replace token files by rename, never rewrite in place. */
#include "tokens.h"

#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *width_name(int width) {
    return width == 1 ? "uint8" : width == 2 ? "uint16" : "32-bit";
}

static int32_t int32_at(const uint8_t *map, int i) {
    int32_t v;
    memcpy(&v, map + 4 * i, sizeof v);
    return v;
}

/* llm.c's header against the file: sets width and header, and checks version and count.  The count
 * is read without sign, which doubles what a file may hold. */
static int read_header(tokens_file *f, int32_t magic) {
    int version = magic == TOKENS_MAGIC_U16 ? 1 : 7;
    f->width = magic == TOKENS_MAGIC_U16 ? 2 : 4;
    f->header = TOKENS_HEADER;
    if (f->bytes < TOKENS_HEADER)
        return pg_fail(PG_EIO, "tokens: %s has %lld bytes; its llm.c header alone needs %d",
                       f->path, (long long)f->bytes, TOKENS_HEADER);
    if (int32_at(f->map, 1) != version)
        return pg_fail(PG_EIO, "tokens: %s: version %d after magic %d, where %d is known", f->path,
                       int32_at(f->map, 1), magic, version);
    int64_t told = (uint32_t)int32_at(f->map, 2), need = TOKENS_HEADER + told * f->width;
    if (f->bytes != need)
        return pg_fail(
            PG_EIO,
            "tokens: %s has %lld bytes; its header tells of %lld %s tokens, which need %lld",
            f->path, (long long)f->bytes, (long long)told, width_name(f->width), (long long)need);
    return PG_OK;
}

static int recognise(tokens_file *f, int dtype) {
    /* No format has a header before bytes, and a text may begin with any four of them. */
    int32_t magic = f->bytes >= 4 && dtype != PG_U8 ? int32_at(f->map, 0) : 0;
    if (f->bytes == 0) return pg_fail(PG_EIO, "tokens: %s is empty (0 bytes)", f->path);
    if (magic == TOKENS_MAGIC_EVAL)
        return pg_fail(PG_EIO,
                       "tokens: %s is an llm.c evaluation file (magic %d), not plain tokens",
                       f->path, magic);
    if (magic == TOKENS_MAGIC_U16 || magic == TOKENS_MAGIC_U32) {
        PG_TRY(read_header(f, magic));
    } else {
        f->width = dtype == PG_U8 ? 1 : dtype == PG_I32 ? 4 : 2;
        if (f->bytes % f->width)
            return pg_fail(PG_EIO, "tokens: %s has %lld bytes; %s tokens need %s", f->path,
                           (long long)f->bytes, width_name(f->width),
                           f->width == 2 ? "an even count" : "a multiple of 4");
    }
    f->count = (f->bytes - f->header) / f->width;
    if (f->count == 0) return pg_fail(PG_EIO, "tokens: %s holds a header and no token", f->path);
    return PG_OK;
}

static int open_file(tokens_file *f, const char *path, int dtype) {
    int rc = PG_EIO;
    struct stat st;
    f->path = strdup(path);
    if (!f->path) return pg_fail(PG_ENOMEM, "tokens: %s: no memory", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    if (fd < 0 || fstat(fd, &st) != 0) {
        pg_fail(rc, "tokens: %s: %m", path);
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        pg_fail(rc, "tokens: %s is no regular file", path);
        goto done;
    }
    f->bytes = (int64_t)st.st_size;
    void *map = f->bytes ? mmap(NULL, (size_t)f->bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    if (map == MAP_FAILED) {
        pg_fail(rc, "tokens: %s: mmap: %m", path);
        goto done;
    }
    f->map = map;
    rc = recognise(f, dtype);
done:
    if (fd >= 0) close(fd);
    return rc;
}

static int add_file(pg_tokens *s, const char *path, int dtype) {
    tokens_file *grown = realloc(s->files, (size_t)(s->file_count + 1) * sizeof *grown);
    if (!grown) return pg_fail(PG_ENOMEM, "tokens: %s: no memory", path);
    s->files = grown;
    tokens_file *f = &s->files[s->file_count++];
    *f = (tokens_file){.first = s->count};
    PG_TRY(open_file(f, path, dtype));
    s->count += f->count;
    return PG_OK;
}

static int by_bytes(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The files of one pattern, sorted by name; none is an error. */
static int add_pattern(pg_tokens *s, const char *pattern, int dtype) {
    glob_t found = {0};
    int rc = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (rc == GLOB_NOMATCH) rc = pg_fail(PG_EIO, "tokens: %s: no such file", pattern);
    else if (rc != 0) rc = pg_fail(PG_ENOMEM, "tokens: %s: no memory", pattern);
    else qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, by_bytes);
    for (size_t i = 0; i < found.gl_pathc && rc >= 0; i++)
        rc = add_file(s, found.gl_pathv[i], dtype);
    globfree(&found);
    return rc;
}

static int add_patterns(pg_tokens *s, char *patterns, int dtype) {
    char *rest = patterns;
    for (char *one; (one = strsep(&rest, "\n"));)
        if (*one) PG_TRY(add_pattern(s, one, dtype));
    if (s->file_count == 0) return pg_fail(PG_EINVAL, "tokens: no file is named");
    return PG_OK;
}

int pg_tokens_open(pg_tokens **out, const char *pattern, int dtype, int64_t vocab) {
    if (!out || !pattern) return pg_fail(PG_EINVAL, "tokens: open: NULL");
    *out = NULL;
    if (dtype != -1 && dtype != PG_U8 && dtype != PG_I32)
        return pg_fail(PG_EINVAL,
                       "tokens: dtype %s; files without a header hold u8, i32 or uint16 (-1)",
                       pg_dtype_name(dtype));
    pg_tokens *s = calloc(1, sizeof *s);
    char *copy = strdup(pattern);
    int rc = PG_ENOMEM;
    if (s) s->out.aside.fd = -1;
    if (!s || !copy) {
        pg_fail(rc, "tokens: no memory");
        goto done;
    }
    s->vocab = vocab;
    s->holders = 1;
    rc = add_patterns(s, copy, dtype);
done:
    free(copy);
    if (rc < 0) pg_tokens_close(s);
    else *out = s;
    return rc;
}

void tokens_hold(const pg_tokens *s) { ((pg_tokens *)s)->holders++; }

void pg_tokens_close(pg_tokens *s) {
    if (!s || --s->holders > 0) return;
    for (int64_t i = 0; i < s->file_count; i++) {
        if (s->files[i].map) munmap((void *)s->files[i].map, (size_t)s->files[i].bytes);
        free(s->files[i].path);
    }
    tokens_close_writer(&s->out);
    free(s->files);
    free(s);
}

int64_t pg_tokens_count(const pg_tokens *s) { return s ? s->count + s->out.count : 0; }

/* ---- reading ---- */
/* Four bytes are int32 as PG_I32 said, or uint32 behind llm.c's header. */
static int64_t id_at(const tokens_file *f, int64_t i) {
    const uint8_t *at = f->map + f->header + i * f->width;
    uint16_t two;
    uint32_t four;
    switch (f->width) {
    case 1: return *at;
    case 2: memcpy(&two, at, sizeof two); return two;
    default: memcpy(&four, at, sizeof four); return f->header ? four : (int64_t)(int32_t)four;
    }
}

static int bad_id(const tokens_file *f, int64_t i, int64_t id, int64_t limit) {
    return pg_fail(
        PG_EINVAL, "tokens: %s: token %lld (byte %lld) has id %lld; ids go from 0 to %lld", f->path,
        (long long)i, (long long)(f->header + i * f->width), (long long)id, (long long)(limit - 1));
}

static int read_file(const tokens_file *f, int64_t start, int64_t n, int64_t vocab, int32_t *dst) {
    int64_t limit = vocab > 0 ? vocab : (int64_t)1 << 31; /* what dst can hold */
    for (int64_t i = 0; i < n; i++) {
        int64_t id = id_at(f, start + i);
        if (id < 0 || id >= limit) return bad_id(f, start + i, id, limit);
        dst[i] = (int32_t)id;
    }
    return PG_OK;
}

/* The file that holds token `at`: the last whose first is not beyond it. */
static int64_t file_of(const pg_tokens *s, int64_t at) {
    int64_t low = 0, high = s->file_count - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (s->files[middle].first <= at) low = middle;
        else high = middle - 1;
    }
    return low;
}

int pg_tokens_read(const pg_tokens *s, int64_t start, int64_t n, int32_t *dst) {
    PG_POLL();
    return tokens_read_span(s, start, n, dst);
}

int tokens_read_span(const pg_tokens *s, int64_t start, int64_t n, int32_t *dst) {
    if (!s || (!dst && n)) return pg_fail(PG_EINVAL, "tokens: read: NULL");
    if (start < 0 || n < 0 || start > s->count || n > s->count - start)
        return pg_fail(PG_EINVAL, "tokens: read: needs %lld from %lld on, has %lld in %s%s",
                       (long long)n, (long long)start, (long long)s->count,
                       s->file_count ? s->files[0].path : "a file being written",
                       s->file_count > 1 ? " and the others" : "");
    for (int64_t i = n ? file_of(s, start) : 0; n > 0; i++) {
        const tokens_file *f = &s->files[i];
        int64_t from = start - f->first, now = pg_min64(n, f->count - from);
        PG_TRY(read_file(f, from, now, s->vocab, dst));
        start += now;
        dst += now;
        n -= now;
    }
    return PG_OK;
}
