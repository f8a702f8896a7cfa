/* hosts.c: pgrun --nnodes: the launchers of several hosts meet, tell each other of the first death
 * and of signals, and end together.
 *
 * Host 0's launcher serves the store (backend/store.h) in which the ranks meet too; the other
 * launchers call at it.  Each has a thread for that, since an answer may take seconds where the
 * network is lost and the launcher must not wait.  Main thread and this one hand words to each
 * other under one lock.
 *   host/H    a host's name: it has come        go     all have, start
 *   failed    the first failure, as a text      stop   a signal and where it was given
 *   end/H     a host's ranks have ended         over   those of all hosts have */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "../backend/store.h"
#include "../base/status.h"
#include "../base/system.h"
#include "host.h"
#include "launch.h"

#define LOOK_MS  200
#define HINT_NS  2000000000ll /* host 0 says whom it waits for */
#define PATIENCE 10.0         /* seconds more, for host 0 to say who has not come */
#define LINGER   3.0          /* seconds that the store stays for last answers */
#define NAME     64
#define MISSING  4 /* hosts named */

typedef struct {
    int number, host, again;
} stop_word;

struct host_link {
    pg_store *store;
    int me, count;                          /* this host, of so many */
    int ranks;                              /* of each */
    char self[NAME + 32], first[NAME + 32]; /* this host and host 0, in words */
    pthread_t thread;
    pthread_mutex_t lock; /* of all below */
    int wake, fd;         /* eventfds: to the thread; to the launcher */
    char failed[PG_STORE_DATA];
    stop_word stop;
    int end, quit;        /* our ranks have ended; the thread is to end */
    unsigned words, sent; /* told by the launcher; in the store */
    char heard[PG_STORE_DATA];
    host_news news;
};

static int has(host_link *l, int *code, const char *format, int host) {
    char key[PG_STORE_KEY];
    snprintf(key, sizeof key, format, host);
    return pg_store_look(l->store, code, key, NULL, 0) >= 0;
}

static void name_host(host_link *l, int host, char *text, size_t bytes) {
    char key[PG_STORE_KEY], name[NAME] = "";
    int code;
    snprintf(key, sizeof key, "host/%d", host);
    if (pg_store_look(l->store, &code, key, name, sizeof name) < 0) name[0] = 0;
    name[sizeof name - 1] = 0;
    if (name[0]) snprintf(text, bytes, "host %d (%s)", host, name);
    else snprintf(text, bytes, "host %d", host);
}

/* ---- meeting ---- */

/* "host 1", "hosts 1, 2 and 5 more"; returns how many. */
static int missing(host_link *l, char *text, size_t bytes) {
    int n = 0, code;
    size_t used = 0;
    for (int h = 1; h < l->count; h++) {
        if (has(l, &code, "host/%d", h)) continue;
        if (n++ < MISSING)
            used += (size_t)snprintf(text + used, bytes - used, "%s%d", used ? ", " : "", h);
    }
    if (n > MISSING) snprintf(text + used, bytes - used, " and %d more", n - MISSING);
    return n;
}

/* Host 0: until all are there, or one cannot be. */
static int gather(host_link *l, const char *place, double seconds) {
    char who[128], text[PG_STORE_DATA];
    int64_t start = pg_page_clock();
    for (int hinted = 0, code, n; (n = missing(l, who, sizeof who)); pg_nap_ms(20)) {
        int64_t waited = pg_page_clock() - start;
        if (pg_store_look(l->store, &code, PG_STORE_REFUSED, text, sizeof text) > 0)
            return pg_fail(PG_EINVAL, "%.900s", text);
        for (int h = 1; h < l->count; h++)
            if (has(l, &code, PG_STORE_GONE, l->count * l->ranks + h))
                return pg_fail(PG_ECOMM, "host %d went away before all were there", h);
        if ((double)waited * 1e-9 > seconds)
            return pg_fail(
                PG_ECOMM,
                "host%s %s of %d did not come to %s within %.6g s (PGRUN_TIMEOUT); start "
                "pgrun there with --node-rank %s, the same --master, -n and --nnodes",
                n > 1 ? "s" : "", who, l->count, place, seconds, n > 1 ? "N" : who);
        if (waited > HINT_NS && !hinted++)
            fprintf(stderr, "pgrun: host 0 at %s waits for host%s %s of %d\n", place,
                    n > 1 ? "s" : "", who, l->count);
    }
    return pg_store_set(l->store, "go", "", 0);
}

static int await_others(host_link *l, double seconds) {
    char text[PG_STORE_DATA];
    int64_t start = pg_page_clock();
    for (int code; !has(l, &code, "go", 0); pg_nap_ms(20)) {
        if (code < 0) return code;
        if (pg_store_look(l->store, &code, PG_STORE_FAILED, text, sizeof text) > 0)
            return pg_fail(PG_ECOMM, "%.900s", text);
        if ((double)(pg_page_clock() - start) * 1e-9 > seconds + PATIENCE)
            return pg_fail(PG_ECOMM, "the other hosts did not come within %.6g s", seconds);
    }
    return PG_OK;
}

static int meet(host_link *l, const host_options *o) {
    char name[NAME] = "", key[PG_STORE_KEY];
    int world = l->count * l->ranks;
    double seconds;
    pg_store_place at = {.host = o->master_host, .job = "", .port = o->master_port};
    PG_TRY(pg_ranks_timeout(&seconds));
    PG_TRY(pg_store_open(&l->store, &at, world + l->me, world,
                         l->me ? PG_STORE_HOST : PG_STORE_MINE, seconds));
    gethostname(name, sizeof name - 1);
    snprintf(key, sizeof key, "host/%d", l->me);
    PG_TRY(pg_store_set(l->store, key, name, sizeof name));
    snprintf(l->self, sizeof l->self, "host %d (%s)", l->me, name);
    if (l->me) {
        PG_TRY(await_others(l, seconds));
        name_host(l, 0, l->first, sizeof l->first);
        return PG_OK;
    }
    int rc = gather(l, o->master, seconds);
    if (rc < 0)
        pg_store_once(l->store, PG_STORE_FAILED, pg_errmsg(), (int)strnlen(pg_errmsg(), 900) + 1);
    return rc;
}

/* ---- the thread ---- */

static void say(host_link *l, const char *failed, stop_word stop, int end) {
    char key[PG_STORE_KEY];
    snprintf(key, sizeof key, "end/%d", l->me);
    if (failed[0]) pg_store_once(l->store, PG_STORE_FAILED, failed, (int)strlen(failed) + 1);
    if (stop.number) pg_store_set(l->store, "stop", &stop, sizeof stop);
    if (end) pg_store_set(l->store, key, "", 0);
}

/* Host 0 misses a host that has gone without a word, and knows when all have ended.  Gone is looked
 * at first: a host says that it has ended before it goes. */
static void count_hosts(host_link *l, host_news *n) {
    int ended = 0, left = 0, code;
    char text[PG_STORE_DATA], who[NAME + 32];
    for (int h = 0; h < l->count; h++) {
        int gone = h && has(l, &code, PG_STORE_GONE, l->count * l->ranks + h);
        int end = has(l, &code, "end/%d", h);
        ended += end;
        left += end || gone;
        if (!gone || end) continue;
        name_host(l, h, who, sizeof who);
        snprintf(text, sizeof text, "%s is gone: its pgrun was killed, or the network lost it",
                 who);
        pg_store_once(l->store, PG_STORE_FAILED, text, (int)strlen(text) + 1);
    }
    n->left = left == l->count;
    if (ended < l->count || n->over) return;
    pg_store_set(l->store, "over", "", 0);
    n->over = 1;
}

/* A rank tells its failure without the host. */
static void take_failure(host_link *l, host_news *n) {
    char who[NAME + 32];
    int rank;
    if (sscanf(l->heard, "rank %d ", &rank) == 1) {
        n->failed_on = rank / l->ranks;
        name_host(l, n->failed_on, who, sizeof who);
        snprintf(n->failed, sizeof n->failed, "%s: %.900s", who, l->heard);
        return;
    }
    n->failed_on = -1;
    sscanf(l->heard, "host %d ", &n->failed_on);
    snprintf(n->failed, sizeof n->failed, "%s", l->heard);
}

static void listen_to_others(host_link *l, host_news *n) {
    stop_word stop;
    int code;
    /* A rank that is stopped fails too, and may be quicker than the word that it was told to:
     * failures are believed when they are heard again. */
    if (l->heard[0] && !n->failed[0]) take_failure(l, n);
    pg_store_look(l->store, &code, PG_STORE_FAILED, l->heard, sizeof l->heard - 1);
    if (pg_store_look(l->store, &code, "stop", &stop, sizeof stop) == sizeof stop) {
        n->stop = stop.number;
        n->again = stop.again;
        name_host(l, stop.host, n->stop_on, sizeof n->stop_on);
    }
    if (!l->me) {
        count_hosts(l, n);
        return;
    }
    if (has(l, &code, "over", 0)) n->over = 1;
    if (code >= 0 || n->over) return;
    snprintf(n->failed, sizeof n->failed,
             "%s is gone: its pgrun was killed, or the network lost it", l->first);
    n->failed_on = 0;
    n->lost = 1;
}

static void *run(void *link) {
    host_link *l = link;
    host_news news = {0}, before;
    for (;;) {
        char failed[PG_STORE_DATA];
        pthread_mutex_lock(&l->lock);
        unsigned words = l->words;
        int fresh = words != l->sent, end = l->end, quit = l->quit;
        stop_word stop = l->stop;
        memcpy(failed, l->failed, sizeof failed);
        pthread_mutex_unlock(&l->lock);
        if (fresh) say(l, failed, stop, end);
        before = news;
        if (!news.lost) listen_to_others(l, &news);
        pthread_mutex_lock(&l->lock);
        l->sent = words;
        l->news = news;
        pthread_mutex_unlock(&l->lock);
        if (fresh || memcmp(&before, &news, sizeof news)) eventfd_write(l->fd, 1);
        if (quit) return NULL;
        struct pollfd p = {.fd = l->wake, .events = POLLIN};
        eventfd_t count;
        if (poll(&p, 1, LOOK_MS) > 0) eventfd_read(l->wake, &count);
    }
}

static int start_thread(host_link *l) {
    l->wake = eventfd(0, EFD_CLOEXEC);
    l->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->wake < 0 || l->fd < 0) return pg_fail(PG_EIO, "eventfd: %s", strerror(errno));
    int why = pg_thread_start(&l->thread, run, l);
    if (!why) return PG_OK;
    close(l->fd);
    l->fd = -1; /* there is no thread to end */
    return pg_fail(PG_EIO, "no thread to hear other hosts with: %s", strerror(why));
}

/* ---- for the launcher ---- */

int hosts_meet(host_link **out, const host_options *o) {
    host_link *l = *out = calloc(1, sizeof *l);
    if (!l) return pg_fail(PG_ENOMEM, "no memory for other hosts");
    pthread_mutex_init(&l->lock, NULL);
    l->wake = l->fd = -1;
    l->me = o->node_rank;
    l->count = o->nnodes;
    l->ranks = o->ranks > 0 ? o->ranks : 1;
    PG_TRY(meet(l, o));
    return start_thread(l);
}

const char *hosts_self(const host_link *l) { return l->self; }
int hosts_fd(const host_link *l) { return l ? l->fd : -1; }

static void told(host_link *l) {
    l->words++;
    pthread_mutex_unlock(&l->lock);
    eventfd_write(l->wake, 1);
}

void hosts_tell_failure(host_link *l, const char *text) {
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    snprintf(l->failed, sizeof l->failed, "%s: %.900s", l->self, text);
    told(l);
}

void hosts_tell_stop(host_link *l, int number, int again) {
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    l->stop = (stop_word){.number = number, .host = l->me, .again = again};
    told(l);
}

void hosts_tell_end(host_link *l) {
    pthread_mutex_lock(&l->lock);
    l->end = 1;
    told(l);
}

int hosts_news(host_link *l, host_news *out) {
    eventfd_t count;
    if (!l) return 0;
    (void)eventfd_read(l->fd, &count);
    pthread_mutex_lock(&l->lock);
    *out = l->news;
    out->sent = l->words == l->sent;
    pthread_mutex_unlock(&l->lock);
    return 1;
}

void hosts_leave(host_link *l) {
    if (!l) return;
    if (l->fd >= 0) {
        pthread_mutex_lock(&l->lock);
        l->quit = 1;
        told(l);
        pthread_join(l->thread, NULL);
        close(l->fd);
    }
    if (l->wake >= 0) close(l->wake);
    pg_store_close(l->store, LINGER);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
