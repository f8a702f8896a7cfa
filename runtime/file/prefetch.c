/* prefetch.c: a thread that reads token spans ahead of the trainer, over tokens.c.
 *
 * A ring of `depth` batches: ask() fills in starts at its head, the thread reads them in order,
 * take() empties the tail.  An error waits in its slot until the batch is taken.  The thread leaves
 * signals to the main one (system.h) and never touches Lua. */
#include "../base/system.h"
#include "tokens.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POLL_NS     50000000 /* 50 ms between two looks at the interrupt flag */
#define ERROR_BYTES 2048

typedef struct {
    int64_t *starts; /* [rows] */
    int32_t *ids;    /* [rows,span] */
    int code;        /* of reading it */
    char error[ERROR_BYTES];
} slot;

struct pg_prefetch {
    const pg_tokens *tokens; /* held */
    int64_t rows, span;
    slot *slots;
    int depth;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t asked, read;        /* something was */
    uint64_t n_asked, n_read, n_taken; /* n_taken <= n_read <= n_asked <= n_taken + depth */
    int started, stop;                 /* stop: under the lock */
};

static void read_slot(const pg_prefetch *p, slot *s) {
    s->code = PG_OK;
    for (int64_t i = 0; i < p->rows && s->code >= 0; i++)
        s->code = tokens_read_span(p->tokens, s->starts[i], p->span, s->ids + i * p->span);
    if (s->code < 0) strncpy(s->error, pg_errmsg(), ERROR_BYTES - 1);
}

static void *read_ahead(void *self) {
    pg_prefetch *p = self;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->n_read == p->n_asked && !p->stop) pthread_cond_wait(&p->asked, &p->lock);
        if (p->stop) break;
        slot *s = &p->slots[p->n_read % (uint64_t)p->depth];
        pthread_mutex_unlock(&p->lock);
        read_slot(p, s); /* nobody else touches it until n_read moves on */
        pthread_mutex_lock(&p->lock);
        p->n_read++;
        pthread_cond_signal(&p->read);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static int make_slots(pg_prefetch *p) {
    p->slots = calloc((size_t)p->depth, sizeof *p->slots);
    if (!p->slots) return PG_ENOMEM;
    for (int i = 0; i < p->depth; i++) {
        p->slots[i].starts = malloc((size_t)p->rows * sizeof(int64_t));
        p->slots[i].ids = malloc((size_t)(p->rows * p->span) * sizeof(int32_t));
        if (!p->slots[i].starts || !p->slots[i].ids) return PG_ENOMEM;
    }
    return PG_OK;
}

static int start_thread(pg_prefetch *p) {
    int error = pg_thread_start(&p->thread, read_ahead, p);
    if (error) return pg_fail(PG_ENOMEM, "prefetch: no thread: %s", strerror(error));
    p->started = 1;
    return PG_OK;
}

int pg_prefetch_new(pg_prefetch **out, const pg_tokens *s, int64_t rows, int64_t span, int depth) {
    if (!out || !s) return pg_fail(PG_EINVAL, "prefetch: NULL");
    *out = NULL;
    if (rows < 1 || span < 1 || depth < 1 || depth > 1024 || rows > INT32_MAX / span)
        return pg_fail(PG_EINVAL,
                       "prefetch: %lld rows of %lld tokens, %d deep; each at least 1, "
                       "a batch below 2^31 tokens, depth to 1024",
                       (long long)rows, (long long)span, depth);
    pg_prefetch *p = calloc(1, sizeof *p);
    if (!p) return pg_fail(PG_ENOMEM, "prefetch: no memory");
    p->tokens = s;
    tokens_hold(s);
    p->rows = rows;
    p->span = span;
    p->depth = depth;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->asked, NULL);
    pthread_cond_init(&p->read, NULL);
    int rc = make_slots(p);
    if (rc < 0)
        pg_fail(rc, "prefetch: no memory for %d batches of %lld tokens", depth,
                (long long)(rows * span));
    else rc = start_thread(p);
    if (rc < 0) pg_prefetch_free(p);
    else *out = p;
    return rc;
}

void pg_prefetch_free(pg_prefetch *p) {
    if (!p) return;
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        p->stop = 1;
        pthread_cond_signal(&p->asked);
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL); /* at most one batch later */
    }
    for (int i = 0; p->slots && i < p->depth; i++) {
        free(p->slots[i].starts);
        free(p->slots[i].ids);
    }
    free(p->slots);
    pg_tokens_close((pg_tokens *)p->tokens);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->asked);
    pthread_cond_destroy(&p->read);
    free(p);
}

int pg_prefetch_ask(pg_prefetch *p, const int64_t *starts) {
    if (!p || !starts) return pg_fail(PG_EINVAL, "prefetch: ask: NULL");
    pthread_mutex_lock(&p->lock);
    int full = p->n_asked == p->n_taken + (uint64_t)p->depth;
    if (!full) {
        slot *s = &p->slots[p->n_asked % (uint64_t)p->depth];
        memcpy(s->starts, starts, (size_t)p->rows * sizeof *starts);
        p->n_asked++;
        pthread_cond_signal(&p->asked);
    }
    pthread_mutex_unlock(&p->lock);
    if (full)
        return pg_fail(PG_EINVAL, "prefetch: ask: %d batches are out already; take one first",
                       p->depth);
    return PG_OK;
}

/* Until the oldest batch is read; the lock is held. */
static int wait_for_batch(pg_prefetch *p) {
    while (p->n_read == p->n_taken) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += POLL_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&p->read, &p->lock, &until);
        if (p->n_read == p->n_taken) PG_POLL();
    }
    return PG_OK;
}

int pg_prefetch_take(pg_prefetch *p, int32_t *dst) {
    if (!p || !dst) return pg_fail(PG_EINVAL, "prefetch: take: NULL");
    pthread_mutex_lock(&p->lock);
    int rc = p->n_asked == p->n_taken ? pg_fail(PG_EINVAL, "prefetch: take: nothing was asked for")
                                      : wait_for_batch(p);
    if (rc == PG_OK) {
        slot *s = &p->slots[p->n_taken % (uint64_t)p->depth];
        if (s->code < 0) rc = pg_fail(s->code, "%s", s->error);
        else memcpy(dst, s->ids, (size_t)(p->rows * p->span) * sizeof *dst);
        p->n_taken++;
    }
    pthread_mutex_unlock(&p->lock);
    return rc;
}
