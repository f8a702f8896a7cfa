/* store.c: see store.h.  Requests and answers are frames of one size, so that neither side parses.
 * One thread on rank 0 serves all; a slow or silent caller holds up nobody. */
#define _GNU_SOURCE /* struct ucred, accept4 */
#include "store.h"
#include "../base/status.h"
#include "page.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAGIC    0x70677331u /* raise it with every change of `frame` */
#define RETRY_MS 20
#define CALL_MS  30000 /* the longest that one answer may take */

enum { HELLO, SET, LOOK, ANSWER, REFUSED };

typedef struct {
    uint32_t magic;
    int32_t what, bytes; /* bytes < 0 in an answer: no such key */
    int32_t rank, size;
    char key[PG_STORE_KEY];
    char data[PG_STORE_DATA];
} frame;

typedef struct item {
    struct item *next;
    char key[PG_STORE_KEY];
    int bytes;
    char data[PG_STORE_DATA];
} item;

typedef struct {
    int fd, known; /* known: it has said HELLO */
    size_t have;   /* bytes of its request so far */
    frame request;
} caller;

struct pg_store {
    pthread_mutex_t lock; /* of the items on rank 0, of the socket elsewhere */
    char place[300], job[PG_STORE_KEY];
    int rank, size, fd;
    int quit; /* rank 0: an eventfd that ends the thread */
    pthread_t thread;
    item *items;
    caller *callers; /* of the thread alone */
    _Atomic int count;
};

static int is_loopback(const char *host) {
    return !strcmp(host, "localhost") || !strncmp(host, "127.", 4) || !strcmp(host, "::1");
}

typedef struct {
    struct sockaddr_storage to;
    socklen_t bytes;
} place;

static int find_place(place *p, const char *host, int port) {
    memset(p, 0, sizeof *p);
    if (is_loopback(host)) {
        struct sockaddr_un *u = (struct sockaddr_un *)&p->to;
        u->sun_family = AF_UNIX;
        int n = snprintf(u->sun_path + 1, sizeof u->sun_path - 1, "pgrun-store-%u-%d",
                         (unsigned)geteuid(), port);
        p->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
        return PG_OK;
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int why = getaddrinfo(host, service, &hints, &found);
    if (why)
        return pg_fail(PG_ECOMM,
                       "store: MASTER_ADDR=%s: %s; set it to the address of rank 0's host", host,
                       gai_strerror(why));
    memcpy(&p->to, found->ai_addr, found->ai_addrlen);
    p->bytes = found->ai_addrlen;
    freeaddrinfo(found);
    return PG_OK;
}

/* Only this user's processes, where the kernel can tell. */
static int is_ours(int fd) {
    struct sockaddr_storage a;
    struct ucred other;
    socklen_t n = sizeof a, bytes = sizeof other;
    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0) return 0;
    if (a.ss_family != AF_UNIX) return 1;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 && other.uid == geteuid();
}

/* ---- rank 0 ---- */

static item *find(pg_store *s, const char *key) {
    item *i = s->items;
    while (i && strcmp(i->key, key)) i = i->next;
    return i;
}

static int keep(pg_store *s, const char *key, const void *data, int bytes) {
    pthread_mutex_lock(&s->lock);
    item *i = find(s, key);
    if (!i && (i = calloc(1, sizeof *i))) {
        snprintf(i->key, sizeof i->key, "%s", key);
        i->next = s->items;
        s->items = i;
    }
    if (i && bytes > 0) memcpy(i->data, data, (size_t)bytes);
    if (i) i->bytes = bytes;
    pthread_mutex_unlock(&s->lock);
    return i ? PG_OK : pg_fail(PG_ENOMEM, "store: no memory for %s", key);
}

static int look(pg_store *s, const char *key, void *data, int room) {
    pthread_mutex_lock(&s->lock);
    const item *i = find(s, key);
    int bytes = i ? i->bytes : -1;
    if (bytes > 0) memcpy(data, i->data, (size_t)(bytes < room ? bytes : room));
    pthread_mutex_unlock(&s->lock);
    return bytes;
}

static void refuse(frame *f, const char *text) {
    f->what = REFUSED;
    f->bytes = snprintf(f->data, sizeof f->data, "%s", text) + 1;
}

/* One request becomes its answer; 0: hang up. */
static int serve(pg_store *s, caller *c) {
    frame *f = &c->request;
    if (f->magic != MAGIC || f->bytes < 0 || f->bytes > PG_STORE_DATA) return 0;
    f->key[PG_STORE_KEY - 1] = 0;
    if (f->what == HELLO) {
        char text[160] = "";
        if (strcmp(f->key, s->job)) snprintf(text, sizeof text, "it belongs to another job");
        else if (f->size != s->size)
            snprintf(text, sizeof text, "rank %d counts %d ranks, rank 0 counts %d", f->rank,
                     f->size, s->size);
        c->known = !text[0];
        f->what = ANSWER;
        if (text[0]) refuse(f, text);
        return 1;
    }
    if (!c->known) return 0;
    if (f->what == SET) f->bytes = keep(s, f->key, f->data, f->bytes);
    else f->bytes = look(s, f->key, f->data, PG_STORE_DATA);
    f->what = ANSWER;
    return 1;
}

/* Frames are far smaller than a socket's buffer, and a caller has one under way: send() does not
 * wait, and one that will not take its answer is hung up on. */
static int hear(pg_store *s, caller *c) {
    ssize_t n = recv(c->fd, (char *)&c->request + c->have, sizeof c->request - c->have, 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return 0;
    c->have += (size_t)n;
    if (c->have < sizeof c->request) return 1;
    c->have = 0;
    return serve(s, c) &&
           send(c->fd, &c->request, sizeof c->request, MSG_NOSIGNAL) == (ssize_t)sizeof c->request;
}

static void let_in(pg_store *s) {
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    caller *more = is_ours(fd) && s->count < 2 * s->size + 16
                       ? realloc(s->callers, ((size_t)s->count + 1) * sizeof *more)
                       : NULL;
    if (!more) {
        close(fd);
        return;
    }
    s->callers = more;
    s->callers[s->count++] = (caller){.fd = fd};
}

static void *run(void *store) {
    pg_store *s = store;
    struct pollfd *polls = calloc(2 * (size_t)s->size + 32, sizeof *polls);
    while (polls) {
        polls[0] = (struct pollfd){.fd = s->quit, .events = POLLIN};
        polls[1] = (struct pollfd){.fd = s->fd, .events = POLLIN};
        for (int i = 0; i < s->count; i++)
            polls[2 + i] = (struct pollfd){.fd = s->callers[i].fd, .events = POLLIN};
        int before = s->count;
        if (poll(polls, (nfds_t)(2 + before), -1) < 0 && errno != EINTR) break;
        if (polls[0].revents) break;
        for (int i = before - 1; i >= 0; i--)
            if (polls[2 + i].revents && !hear(s, &s->callers[i])) {
                close(s->callers[i].fd);
                s->callers[i] = s->callers[--s->count];
            }
        if (polls[1].revents) let_in(s);
    }
    free(polls);
    return NULL;
}

static int start_serving(pg_store *s, const place *p) {
    sigset_t all, before;
    int on = 1;
    setsockopt(s->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(s->fd, (const struct sockaddr *)&p->to, p->bytes) != 0 || listen(s->fd, 512) != 0)
        return pg_fail(PG_ECOMM,
                       "store: rank 0 cannot listen on %s: %s; choose another MASTER_PORT, "
                       "or set MASTER_ADDR to an address of this host",
                       s->place, strerror(errno));
    if ((s->quit = eventfd(0, EFD_CLOEXEC)) < 0)
        return pg_fail(PG_ECOMM, "store: eventfd: %s", strerror(errno));
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int why = pthread_create(&s->thread, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!why) return PG_OK;
    close(s->quit);
    s->quit = -1;
    return pg_fail(PG_ECOMM, "store: no thread to serve with: %s", strerror(why));
}

/* ---- the others ---- */

static int ask(pg_store *s, frame *f) {
    size_t have = 0;
    f->magic = MAGIC;
    f->rank = s->rank;
    f->size = s->size;
    if (s->fd < 0 || send(s->fd, f, sizeof *f, MSG_NOSIGNAL) != (ssize_t)sizeof *f)
        return pg_fail(PG_ECOMM, "store %s: rank 0 is gone", s->place);
    while (have < sizeof *f) {
        struct pollfd p = {.fd = s->fd, .events = POLLIN};
        int there = poll(&p, 1, CALL_MS);
        if (there < 0 && errno == EINTR) continue;
        if (there == 0)
            return pg_fail(PG_ECOMM, "store %s: no answer from rank 0 in %d s", s->place,
                           CALL_MS / 1000);
        ssize_t n = recv(s->fd, (char *)f + have, sizeof *f - have, 0);
        if (n <= 0) return pg_fail(PG_ECOMM, "store %s: rank 0 went away", s->place);
        have += (size_t)n;
    }
    if (f->what != REFUSED) return PG_OK;
    f->data[PG_STORE_DATA - 1] = 0;
    return pg_fail(PG_ECOMM, "store %s: rank 0 refuses rank %d: %s", s->place, s->rank, f->data);
}

static int join(pg_store *s, const place *p, double seconds) {
    int64_t start = pg_page_clock();
    while (connect(s->fd, (const struct sockaddr *)&p->to, p->bytes) != 0) {
        int why = errno;
        PG_POLL();
        if (why == EISCONN) break;
        if ((double)(pg_page_clock() - start) * 1e-9 > seconds)
            return pg_fail(
                PG_ECOMM,
                "store: rank %d did not reach rank 0 at %s within %.6g s: %s; is "
                "rank 0 started, are MASTER_ADDR and MASTER_PORT alike on all hosts, and "
                "is the port open?",
                s->rank, s->place, seconds, strerror(why));
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000l}, NULL);
        close(s->fd); /* a socket that was refused may not be used again */
        s->fd = socket(p->to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (s->fd < 0) return pg_fail(PG_ECOMM, "store: socket: %s", strerror(errno));
    }
    if (!is_ours(s->fd))
        return pg_fail(PG_ECOMM, "store: another user listens on %s; choose another MASTER_PORT",
                       s->place);
    frame hello = {.what = HELLO};
    memcpy(hello.key, s->job, sizeof hello.key);
    return ask(s, &hello);
}

int pg_store_open(pg_store **out, const char *host, int port, const char *job, int rank, int size,
                  double seconds) {
    place p;
    *out = NULL;
    PG_TRY(find_place(&p, host, port));
    pg_store *s = calloc(1, sizeof *s);
    if (!s) return pg_fail(PG_ENOMEM, "store: out of memory");
    pthread_mutex_init(&s->lock, NULL);
    snprintf(s->place, sizeof s->place, "%s:%d", host, port);
    snprintf(s->job, sizeof s->job, "%s", job);
    s->rank = rank;
    s->size = size;
    s->quit = -1;
    s->fd = socket(p.to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = s->fd < 0 ? pg_fail(PG_ECOMM, "store: socket: %s", strerror(errno))
             : rank    ? join(s, &p, seconds)
                       : start_serving(s, &p);
    if (rc < 0) pg_store_close(s, 0);
    else *out = s;
    return rc;
}

static int check_key(const char *key, int bytes) {
    if (strlen(key) < PG_STORE_KEY && bytes >= 0 && bytes <= PG_STORE_DATA) return PG_OK;
    return pg_fail(PG_EINVAL, "store: key of %zu bytes with %d; at most %d and %d", strlen(key),
                   bytes, PG_STORE_KEY - 1, PG_STORE_DATA);
}

int pg_store_set(pg_store *s, const char *key, const void *data, int bytes) {
    PG_TRY(check_key(key, bytes));
    if (!s->rank) return keep(s, key, data, bytes);
    frame f = {.what = SET, .bytes = bytes};
    snprintf(f.key, sizeof f.key, "%s", key);
    if (bytes) memcpy(f.data, data, (size_t)bytes);
    pthread_mutex_lock(&s->lock);
    int rc = ask(s, &f);
    pthread_mutex_unlock(&s->lock);
    if (rc == PG_OK && f.bytes < 0)
        rc = pg_fail(PG_ECOMM, "store %s: %s is not taken", s->place, key);
    return rc;
}

int pg_store_look(pg_store *s, int *code, const char *key, void *data, int room) {
    *code = check_key(key, 0);
    if (*code < 0) return -1;
    if (!s->rank) return look(s, key, data, room);
    frame f = {.what = LOOK};
    snprintf(f.key, sizeof f.key, "%s", key);
    pthread_mutex_lock(&s->lock);
    *code = ask(s, &f);
    pthread_mutex_unlock(&s->lock);
    if (*code < 0 || f.bytes > PG_STORE_DATA) return -1;
    if (f.bytes > 0) memcpy(data, f.data, (size_t)(f.bytes < room ? f.bytes : room));
    return f.bytes;
}

int pg_store_get(pg_store *s, const char *key, void *data, int bytes, double seconds) {
    int64_t start = pg_page_clock();
    for (int code, n;;) {
        n = pg_store_look(s, &code, key, data, bytes);
        if (code < 0) return code;
        if (n >= 0)
            return n == bytes ? PG_OK
                              : pg_fail(PG_ECOMM, "store %s: %s has %d bytes, not %d", s->place,
                                        key, n, bytes);
        PG_POLL();
        if ((double)(pg_page_clock() - start) * 1e-9 > seconds)
            return pg_fail(PG_ECOMM, "store %s: rank %d waited %.6g s for \"%s\" (PGRUN_TIMEOUT)",
                           s->place, s->rank, seconds, key);
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000l / 4}, NULL);
    }
}

void pg_store_close(pg_store *s, double seconds) {
    if (!s) return;
    for (int64_t end = pg_page_clock() + (int64_t)(seconds * 1e9);
         s->quit >= 0 && atomic_load(&s->count) && pg_page_clock() < end;)
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000l}, NULL);
    if (s->quit >= 0) {
        if (eventfd_write(s->quit, 1) == 0) pthread_join(s->thread, NULL);
        close(s->quit);
    }
    for (int i = 0; i < s->count; i++) close(s->callers[i].fd);
    free(s->callers);
    for (item *i = s->items, *next; i; i = next) {
        next = i->next;
        free(i);
    }
    if (s->fd >= 0) close(s->fd);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
