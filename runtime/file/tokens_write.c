/* tokens_write.c: write one token file in llm.c's format, aside and renamed; see aside.h. */
#include "tokens.h"

#include <stdlib.h>
#include <string.h>

#define BUFFER_IDS ((int64_t)64 << 10)

int pg_tokens_create(pg_tokens **out, const char *path, int64_t vocab) {
    if (!out || !path) return pg_fail(PG_EINVAL, "tokens: create: NULL");
    *out = NULL;
    if (vocab < 1 || vocab > (int64_t)1 << 31)
        return pg_fail(PG_EINVAL, "tokens: %s: a vocabulary of %lld; 1 to 2^31 can be written",
                       path, (long long)vocab);
    pg_tokens *s = calloc(1, sizeof *s);
    if (!s) return pg_fail(PG_ENOMEM, "tokens: %s: no memory", path);
    tokens_writer *w = &s->out;
    s->vocab = vocab;
    s->holders = 1;
    w->width = vocab > 65536 ? 4 : 2;
    w->aside.fd = -1;
    w->buffer = malloc((size_t)(BUFFER_IDS * w->width));
    int rc = w->buffer ? PG_OK : pg_fail(PG_ENOMEM, "tokens: %s: no memory", path);
    if (rc == PG_OK) rc = pg_aside_open(&w->aside, path);
    if (rc < 0) {
        pg_tokens_close(s);
        return rc;
    }
    *out = s;
    return PG_OK;
}

void tokens_close_writer(tokens_writer *w) {
    pg_aside_close(&w->aside);
    free(w->buffer);
    w->buffer = NULL;
}

static int still_writing(const pg_tokens *s, const char *op) {
    if (s && s->out.aside.fd >= 0) return PG_OK;
    return pg_fail(PG_EINVAL, "tokens: %s: the file is not open for writing", op);
}

/* On failure the ids stay buffered, so that count and file agree if it is tried again. */
static int flush(tokens_writer *w) {
    int64_t at = TOKENS_HEADER + (w->count - w->buffered) * w->width;
    PG_TRY(pg_aside_write(&w->aside, w->buffer, w->buffered * w->width, at));
    w->buffered = 0;
    return PG_OK;
}

int pg_tokens_append(pg_tokens *s, const int32_t *ids, int64_t n) {
    PG_TRY(still_writing(s, "append"));
    tokens_writer *w = &s->out;
    if (n < 0 || (n && !ids)) return pg_fail(PG_EINVAL, "tokens: append: %lld ids", (long long)n);
    if (n > INT32_MAX - w->count)
        return pg_fail(PG_EINVAL,
                       "tokens: %s: an llm.c file holds at most %d tokens; write several",
                       w->aside.path, INT32_MAX);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->vocab)
            return pg_fail(PG_EINVAL, "tokens: %s: id %d at place %lld; ids go from 0 to %lld",
                           w->aside.path, ids[i], (long long)(w->count + i),
                           (long long)s->vocab - 1);
    for (int64_t i = 0; i < n; i++) {
        if (w->buffered == BUFFER_IDS) PG_TRY(flush(w));
        uint16_t two = (uint16_t)ids[i];
        const void *id = w->width == 2 ? (const void *)&two : &ids[i];
        memcpy(w->buffer + w->buffered++ * w->width, id, (size_t)w->width);
        w->count++;
    }
    return PG_OK;
}

int pg_tokens_finish(pg_tokens *s) {
    PG_TRY(still_writing(s, "finish"));
    tokens_writer *w = &s->out;
    int32_t header[TOKENS_HEADER / 4] = {w->width == 2 ? TOKENS_MAGIC_U16 : TOKENS_MAGIC_U32,
                                         w->width == 2 ? 1 : 7, (int32_t)w->count};
    PG_TRY(flush(w));
    PG_TRY(pg_aside_write(&w->aside, header, TOKENS_HEADER, 0));
    return pg_aside_finish(&w->aside);
}
