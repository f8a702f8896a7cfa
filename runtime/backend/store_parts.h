/* store_parts.h: what store.c (calling) and store_serve.c (answering) share.
 *
 * Requests and answers are frames of one size, so that neither side parses.
 *
 * A caller says HELLO with a random word; the server answers with a random word of its own and, to
 * show that it has the secret, the HMAC of both; the caller's PROOF is another HMAC of the same.
 * So neither shows the secret to whoever may sit at the other end, and nothing can be played back.
 * What follows is not signed: who can change packets on the way can still do harm. */
#ifndef PG_STORE_PARTS_H
#define PG_STORE_PARTS_H
#include <pthread.h>
#include <sys/socket.h>

#include "../base/sha256.h"
#include "secret.h"
#include "store.h"

#define MAGIC 0x70677332u /* raise it with every change of `frame` */
#define WORD  32          /* random bytes of each side */

enum { HELLO, PROOF, SET, ONCE, LOOK, ANSWER, REFUSED };

typedef struct {
    uint32_t magic;
    int32_t what, bytes; /* bytes < 0 in an answer: no such key */
    int32_t rank, size;
    char key[PG_STORE_KEY];
    char data[PG_STORE_DATA];
} frame;

/* What both sides sign.  No gaps, so that it can be taken as bytes. */
typedef struct {
    char role[8];
    unsigned char caller[WORD], server[WORD];
    int32_t rank, size;
    char job[PG_STORE_KEY];
} oath;

typedef struct item {
    struct item *next;
    char key[PG_STORE_KEY];
    int bytes;
    char data[PG_STORE_DATA];
} item;

typedef struct {
    int fd, known; /* known: it has proved that it belongs here */
    int64_t since; /* ns */
    size_t have;   /* bytes of its request so far */
    oath oath;
    frame request;
} caller;

struct pg_store {
    pthread_mutex_t lock; /* of the server's items, of the socket elsewhere */
    char place[300], job[PG_STORE_KEY];
    const char *server; /* who serves, in words */
    pg_secret secret;
    int rank, size, fd;
    int hung_up; /* the server has, in the midst of an answer; not at the server */
    int quit;    /* of the server: an eventfd that ends the thread; -1 elsewhere */
    pthread_t thread;
    item *items;
    caller *callers; /* of the thread alone */
    _Atomic int count;
};

typedef struct {
    struct sockaddr_storage to;
    socklen_t bytes;
} place;

/* ---- store.c ---- */
int store_is_ours(int fd);         /* only this user's processes, where the kernel can tell */
void store_notice_silence(int fd); /* a host that is switched off sends no word of it */
int store_draw(unsigned char word[WORD]); /* 1, or 0: no random numbers */
void store_sign(const pg_store *s, unsigned char out[PG_SHA256_BYTES], const char *role, oath *o);
int store_same(const void *a, const void *b, size_t bytes); /* takes as long wherever they differ */

/* ---- store_serve.c ---- */
int store_serve(pg_store *s, place *at);
int store_keep(pg_store *s, const char *key, const void *data, int bytes, int once);
int store_find(pg_store *s, const char *key, void *data, int room); /* bytes, or -1 */
void store_stop(pg_store *s, double seconds); /* it stays until all have left, so long at most */
#endif
