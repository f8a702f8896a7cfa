/* store.c: see store.h: finding the server, proving oneself, asking. */
#include "store_parts.h"
#include "../base/status.h"
#include "../base/system.h"
#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_MS   20
#define CONNECT_MS 2000  /* the longest that one attempt to connect may take */
#define CALL_MS    30000 /* the longest that one answer may take */
#define SILENT_MS  6000  /* a host that the network has lost is taken for gone */

static int is_loopback(const char *host) {
    return !strcmp(host, "localhost") || !strncmp(host, "127.", 4) || !strcmp(host, "::1");
}

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
                       "store: MASTER_ADDR=%s: %s; set it (or --master) to the address of rank 0's "
                       "host",
                       host, gai_strerror(why));
    memcpy(&p->to, found->ai_addr, found->ai_addrlen);
    p->bytes = found->ai_addrlen;
    freeaddrinfo(found);
    return PG_OK;
}

/* Only this user's processes, where the kernel can tell. */
int store_is_ours(int fd) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0) return 0;
    return a.ss_family != AF_UNIX || pg_same_user(fd);
}

static int is_near(const place *p) { return p->to.ss_family == AF_UNIX; }

/* A host that is switched off sends no word of it. */
void store_notice_silence(int fd) {
    int on = 1, idle = 3, every = 1, times = 3, all = SILENT_MS;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &all, sizeof all);
}

/* ---- the secret ---- */

void store_sign(const pg_store *s, unsigned char out[PG_SHA256_BYTES], const char *role, oath *o) {
    snprintf(o->role, sizeof o->role, "%s", role);
    pg_hmac(out, s->secret.text, strlen(s->secret.text), o, sizeof *o);
}

/* In the same time wherever they differ. */
int store_same(const void *a, const void *b, size_t bytes) {
    const unsigned char *x = a, *y = b;
    int difference = 0;
    for (size_t i = 0; i < bytes; i++) difference |= x[i] ^ y[i];
    return !difference;
}

int store_draw(unsigned char word[WORD]) { return getrandom(word, WORD, 0) == WORD; }

/* ---- the others ---- */

static int ask(pg_store *s, frame *f) {
    size_t have = 0;
    f->magic = MAGIC;
    f->rank = s->rank;
    f->size = s->size;
    if (s->fd < 0 || send(s->fd, f, sizeof *f, MSG_NOSIGNAL) != (ssize_t)sizeof *f) {
        s->hung_up = 1;
        return pg_fail(PG_ECOMM, "store %s: %s is gone", s->place, s->server);
    }
    while (have < sizeof *f) {
        struct pollfd p = {.fd = s->fd, .events = POLLIN};
        int there = poll(&p, 1, CALL_MS);
        if (there < 0 && errno == EINTR) continue;
        if (there == 0)
            return pg_fail(PG_ECOMM, "store %s: no answer from %s in %d s", s->place, s->server,
                           CALL_MS / 1000);
        ssize_t n = recv(s->fd, (char *)f + have, sizeof *f - have, 0);
        if (n <= 0) {
            s->hung_up = 1;
            return pg_fail(PG_ECOMM, "store %s: %s went away", s->place, s->server);
        }
        have += (size_t)n;
    }
    if (f->what != REFUSED) return PG_OK;
    f->data[PG_STORE_DATA - 1] = 0;
    return pg_fail(PG_ECOMM, "store %s: refused by %s: %s", s->place, s->server, f->data);
}

static int introduce(pg_store *s) {
    frame f = {.what = HELLO};
    unsigned char theirs[PG_SHA256_BYTES];
    oath o = {.rank = s->rank, .size = s->size};
    if (!store_draw(o.caller))
        return pg_fail(PG_ECOMM, "store: no random numbers: %s", strerror(errno));
    memcpy(o.job, s->job, sizeof o.job);
    memcpy(f.key, s->job, sizeof f.key);
    memcpy(f.data, o.caller, WORD);
    PG_TRY(ask(s, &f));
    memcpy(o.server, f.data, WORD);
    store_sign(s, theirs, "server", &o);
    if (!store_same(theirs, f.data + WORD, sizeof theirs))
        return pg_fail(
            PG_ECOMM,
            "store %s: %s has another secret; PGRUN_SECRET, or the file %s, must be alike "
            "on all hosts",
            s->place, s->server, PG_SECRET_FILE);
    f = (frame){.what = PROOF};
    store_sign(s, (unsigned char *)f.data, "caller", &o);
    return ask(s, &f);
}

/* 0, or an errno.  Where packets are lost without a word, the kernel alone
 * would try for minutes. */
static int reach(int fd, const place *p) {
    int flags = fcntl(fd, F_GETFL), why = 0;
    socklen_t bytes = sizeof why;
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    if (connect(fd, (const struct sockaddr *)&p->to, p->bytes) != 0) why = errno;
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    if (why == EINPROGRESS) {
        if (poll(&ready, 1, CONNECT_MS) <= 0) return ETIMEDOUT;
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &bytes);
    }
    fcntl(fd, F_SETFL, flags);
    return why;
}

/* A socket that was refused may not be used again. */
static int anew(pg_store *s, const place *p) {
    pg_nap_ms(RETRY_MS);
    close(s->fd);
    s->fd = socket(p->to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return s->fd < 0 ? pg_fail(PG_ECOMM, "store: socket: %s", strerror(errno)) : PG_OK;
}

/* Again where the server hung up: among very many strangers it does so to make room (let_in). */
static int join(pg_store *s, const place *p, double seconds) {
    int64_t start = pg_page_clock();
    for (int why, rc, turn = 0;; turn++) {
        if (turn) PG_TRY(anew(s, p));
        PG_POLL();
        int late = (double)(pg_page_clock() - start) * 1e-9 > seconds;
        if ((why = reach(s->fd, p))) {
            if (!late) continue;
            return pg_fail(
                PG_ECOMM,
                "store: no word from %s at %s within %.6g s (PGRUN_TIMEOUT): %s; is it started, do "
                "all hosts name the same address (--master, or MASTER_ADDR and MASTER_PORT), and "
                "is the port open?",
                s->server, s->place, seconds, strerror(why));
        }
        store_notice_silence(s->fd);
        if (!store_is_ours(s->fd))
            return pg_fail(PG_ECOMM,
                           "store: another user listens on %s; choose another MASTER_PORT",
                           s->place);
        s->hung_up = 0;
        if ((rc = introduce(s)) == PG_OK || !s->hung_up || late) return rc;
    }
}

static const char *const servers[] = {[PG_STORE_MINE] = "this process",
                                      [PG_STORE_RANK] = "rank 0",
                                      [PG_STORE_HOST] = "pgrun on host 0"};

int pg_store_open(pg_store **out, const pg_store_place *at, int rank, int size, int whose,
                  double seconds) {
    place p;
    *out = NULL;
    PG_TRY(find_place(&p, at->host, at->port));
    pg_store *s = calloc(1, sizeof *s);
    if (!s) return pg_fail(PG_ENOMEM, "store: out of memory");
    pthread_mutex_init(&s->lock, NULL);
    snprintf(s->place, sizeof s->place, "%s:%d", at->host, at->port);
    snprintf(s->job, sizeof s->job, "%s", at->job);
    s->server = servers[whose];
    s->rank = rank;
    s->size = size;
    s->fd = s->quit = -1;
    int rc = is_near(&p) ? PG_OK : pg_secret_read(&s->secret);
    if (rc == PG_OK && (s->fd = socket(p.to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0)
        rc = pg_fail(PG_ECOMM, "store: socket: %s", strerror(errno));
    if (rc == PG_OK) rc = whose == PG_STORE_MINE ? store_serve(s, &p) : join(s, &p, seconds);
    if (rc < 0) pg_store_close(s, 0);
    else *out = s;
    return rc;
}

static int check_key(const char *key, int bytes) {
    if (strlen(key) < PG_STORE_KEY && bytes >= 0 && bytes <= PG_STORE_DATA) return PG_OK;
    return pg_fail(PG_EINVAL, "store: key of %zu bytes with %d; at most %d and %d", strlen(key),
                   bytes, PG_STORE_KEY - 1, PG_STORE_DATA);
}

static int put(pg_store *s, const char *key, const void *data, int bytes, int once) {
    PG_TRY(check_key(key, bytes));
    if (s->quit >= 0) return store_keep(s, key, data, bytes, once);
    frame f = {.what = once ? ONCE : SET, .bytes = bytes};
    snprintf(f.key, sizeof f.key, "%s", key);
    if (bytes) memcpy(f.data, data, (size_t)bytes);
    pthread_mutex_lock(&s->lock);
    int rc = ask(s, &f);
    pthread_mutex_unlock(&s->lock);
    if (rc == PG_OK && f.bytes < 0)
        rc = pg_fail(PG_ECOMM, "store %s: %s is not taken", s->place, key);
    return rc;
}

int pg_store_set(pg_store *s, const char *key, const void *data, int bytes) {
    return put(s, key, data, bytes, 0);
}

int pg_store_once(pg_store *s, const char *key, const void *data, int bytes) {
    return put(s, key, data, bytes, 1);
}

int pg_store_look(pg_store *s, int *code, const char *key, void *data, int room) {
    *code = check_key(key, 0);
    if (*code < 0) return -1;
    if (s->quit >= 0) return store_find(s, key, data, room);
    frame f = {.what = LOOK};
    snprintf(f.key, sizeof f.key, "%s", key);
    pthread_mutex_lock(&s->lock);
    *code = ask(s, &f);
    pthread_mutex_unlock(&s->lock);
    if (*code < 0 || f.bytes > PG_STORE_DATA) return -1;
    if (f.bytes > 0 && room > 0) memcpy(data, f.data, (size_t)(f.bytes < room ? f.bytes : room));
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
        pg_nap_ms(RETRY_MS / 4);
    }
}

void pg_store_close(pg_store *s, double seconds) {
    if (!s) return;
    store_stop(s, seconds);
    if (s->fd >= 0) close(s->fd);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
