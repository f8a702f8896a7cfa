/* store_serve.c: the server's side of store.h: one thread answers all; a slow or silent
 * caller holds up nobody. */
#define _GNU_SOURCE /* accept4 */
#include "store_parts.h"
#include "../base/status.h"
#include "../base/system.h"
#include "page.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define PROOF_NS  10000000000ll /* a caller has that long to show that it has the secret */
#define STRANGERS 64            /* who may be at it besides a job's ranks and launchers */
#define LOOK_MS   20            /* between two looks whether the callers have left */

static item *find(pg_store *s, const char *key) {
    item *i = s->items;
    while (i && strcmp(i->key, key)) i = i->next;
    return i;
}

/* once: what is there stays. */
int store_keep(pg_store *s, const char *key, const void *data, int bytes, int once) {
    pthread_mutex_lock(&s->lock);
    item *i = find(s, key);
    if (i && once) {
        pthread_mutex_unlock(&s->lock);
        return PG_OK;
    }
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

int store_find(pg_store *s, const char *key, void *data, int room) {
    pthread_mutex_lock(&s->lock);
    const item *i = find(s, key);
    int bytes = i ? i->bytes : -1;
    if (bytes > 0 && room > 0) memcpy(data, i->data, (size_t)(bytes < room ? bytes : room));
    pthread_mutex_unlock(&s->lock);
    return bytes;
}

static void refuse(frame *f, const char *text) {
    f->what = REFUSED;
    f->bytes = snprintf(f->data, sizeof f->data, "%s", text) + 1;
}

/* HELLO: its word is kept; the answer is ours and our proof. */
static int greet(const pg_store *s, caller *c) {
    frame *f = &c->request;
    oath *o = &c->oath;
    *o = (oath){.rank = f->rank, .size = f->size};
    memcpy(o->job, f->key, sizeof o->job);
    memcpy(o->caller, f->data, WORD);
    if (c->known || !store_draw(o->server)) return 0;
    memcpy(f->data, o->server, WORD);
    store_sign(s, (unsigned char *)f->data + WORD, "server", o);
    f->what = ANSWER;
    return 1;
}

static int admit(pg_store *s, caller *c) {
    frame *f = &c->request;
    unsigned char mine[PG_SHA256_BYTES];
    char text[200] = "";
    const oath *o = &c->oath;
    const char *kind = o->rank < o->size ? "rank" : "host";
    int number = o->rank < o->size ? o->rank : o->rank - o->size;
    store_sign(s, mine, "caller", &c->oath);
    if (c->known || !o->size || !store_same(mine, f->data, sizeof mine)) return 0;
    if (strncmp(o->job, s->job, sizeof o->job))
        snprintf(text, sizeof text, "it belongs to another job");
    else if (o->size != s->size)
        snprintf(text, sizeof text, "%s %d counts %d ranks, %s 0 counts %d%s", kind, number,
                 o->size, kind, s->size,
                 *kind == 'h' ? "; give -n and --nnodes alike on all hosts" : "");
    for (int i = 0; i < s->count; i++)
        if (s->callers[i].known && s->callers[i].oath.rank == o->rank)
            snprintf(text, sizeof text, "%s %d is here already; each has a number of its own", kind,
                     number);
    c->known = !text[0];
    f->what = ANSWER;
    if (text[0] && *kind == 'h') store_keep(s, PG_STORE_REFUSED, text, (int)strlen(text) + 1, 0);
    if (text[0]) refuse(f, text);
    return 1;
}

/* One request becomes its answer; 0: hang up. */
static int serve(pg_store *s, caller *c) {
    frame *f = &c->request;
    if (f->magic != MAGIC || f->bytes < 0 || f->bytes > PG_STORE_DATA) return 0;
    f->key[PG_STORE_KEY - 1] = 0;
    if (f->what == HELLO) return greet(s, c);
    if (f->what == PROOF) return admit(s, c);
    if (!c->known) return 0;
    if (f->what == LOOK) f->bytes = store_find(s, f->key, f->data, PG_STORE_DATA);
    else f->bytes = store_keep(s, f->key, f->data, f->bytes, f->what == ONCE);
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

/* Those who knew the secret are missed. */
static void let_go(pg_store *s, caller *c) {
    char key[PG_STORE_KEY];
    snprintf(key, sizeof key, PG_STORE_GONE, c->oath.rank);
    if (c->known) store_keep(s, key, "", 0, 0);
    close(c->fd);
    *c = s->callers[--s->count];
}

static int most_callers(const pg_store *s) { return 2 * s->size + STRANGERS; }

/* Where strangers fill the room, the one who has been silent for longest goes: whoever has the
 * secret needs a moment, and they have had it. */
static int make_room(pg_store *s) {
    caller *oldest = NULL;
    if (s->count < most_callers(s)) return 1;
    for (int i = 0; i < s->count; i++) {
        caller *c = &s->callers[i];
        if (!c->known && (!oldest || c->since < oldest->since)) oldest = c;
    }
    if (oldest) let_go(s, oldest);
    return oldest != NULL;
}

static void let_in(pg_store *s) {
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    store_notice_silence(fd);
    caller *more = store_is_ours(fd) && make_room(s)
                       ? realloc(s->callers, ((size_t)s->count + 1) * sizeof *more)
                       : NULL;
    if (!more) {
        close(fd);
        return;
    }
    s->callers = more;
    s->callers[s->count++] = (caller){.fd = fd, .since = pg_page_clock()};
}

static void *run(void *store) {
    pg_store *s = store;
    struct pollfd *polls = calloc((size_t)most_callers(s) + 2, sizeof *polls);
    while (polls) {
        int before = s->count, strangers = 0;
        polls[0] = (struct pollfd){.fd = s->quit, .events = POLLIN};
        polls[1] = (struct pollfd){.fd = s->fd, .events = POLLIN};
        for (int i = 0; i < before; i++) {
            polls[2 + i] = (struct pollfd){.fd = s->callers[i].fd, .events = POLLIN};
            strangers += !s->callers[i].known;
        }
        if (poll(polls, (nfds_t)(2 + before), strangers ? 1000 : -1) < 0 && errno != EINTR) break;
        if (polls[0].revents) break;
        int64_t now = pg_page_clock();
        for (int i = before - 1; i >= 0; i--) {
            caller *c = &s->callers[i];
            int stays = !polls[2 + i].revents || hear(s, c);
            if (!stays || (!c->known && now - c->since > PROOF_NS)) let_go(s, c);
        }
        if (polls[1].revents) let_in(s);
    }
    free(polls);
    return NULL;
}

/* A host's own name often means 127.0.1.1 there; whoever serves under it listens everywhere. */
static void widen(place *p) {
    struct sockaddr_in *a = (struct sockaddr_in *)&p->to;
    if (a->sin_family == AF_INET && ntohl(a->sin_addr.s_addr) >> 24 == 127)
        a->sin_addr.s_addr = htonl(INADDR_ANY);
}

int store_serve(pg_store *s, place *p) {
    int on = 1;
    widen(p);
    setsockopt(s->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(s->fd, (const struct sockaddr *)&p->to, p->bytes) != 0 || listen(s->fd, 512) != 0)
        return pg_fail(PG_ECOMM,
                       "store: %s cannot listen on %s: %s; choose another port, or an address of "
                       "this host (--master, or MASTER_ADDR and MASTER_PORT)",
                       s->server, s->place, strerror(errno));
    if ((s->quit = eventfd(0, EFD_CLOEXEC)) < 0)
        return pg_fail(PG_ECOMM, "store: eventfd: %s", strerror(errno));
    int why = pg_thread_start(&s->thread, run, s);
    if (!why) return PG_OK;
    close(s->quit);
    s->quit = -1;
    return pg_fail(PG_ECOMM, "store: no thread to serve with: %s", strerror(why));
}

void store_stop(pg_store *s, double seconds) {
    for (int64_t end = pg_page_clock() + (int64_t)(seconds * 1e9);
         s->quit >= 0 && atomic_load(&s->count) && pg_page_clock() < end;)
        pg_nap_ms(LOOK_MS);
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
}
