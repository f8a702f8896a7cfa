/* store.h: a small key-value store, for ranks on several hosts: NCCL's id, the first failure and
 * PG_COMM_CHECK travel by it; so do the words of the launchers (host/hosts.c).  Ranks of one host
 * have shared memory instead (shm.h).
 *
 * Where pgrun starts the ranks (--nnodes), its launcher on host 0 serves; else rank 0 does.  It
 * listens on MASTER_ADDR:MASTER_PORT.  Where that address is the loopback, it is a socket in
 * Linux's abstract namespace instead: no other host can reach it, the kernel says whose process
 * calls, and other users are turned away.  Over the network each side proves that it has the secret
 * of secret.h, and the caller names the same job. */
#ifndef PG_STORE_H
#define PG_STORE_H
#include <stdint.h>

#define PG_STORE_KEY    128      /* bytes of a key, its end included */
#define PG_STORE_DATA   1024     /* bytes of a value at most */
#define PG_STORE_FAILED "failed" /* key: the first failure of the job, a text with its end */
/* Keys that the server makes: what it last refused a launcher for; that caller has hung up. */
#define PG_STORE_REFUSED "refused"
#define PG_STORE_GONE    "gone/%d"

typedef struct pg_store pg_store;
typedef struct {
    const char *host, *job; /* job: tells two jobs of one user apart; may be "" */
    int port;
} pg_store_place;
/* Who serves: this process; rank 0; host 0's pgrun. */
enum { PG_STORE_MINE, PG_STORE_RANK, PG_STORE_HOST };

/* All callers and the server give the same place and size.  rank: of this caller, from 0; the
 * launcher of host h is size + h.  PG_ECOMM names host:port, the seconds waited and the way out;
 * PG_EINVAL: there is no secret. */
int pg_store_open(pg_store **out, const pg_store_place *at, int rank, int size, int whose,
                  double seconds);
int pg_store_set(pg_store *s, const char *key, const void *data, int bytes);
/* The first that is written stays. */
int pg_store_once(pg_store *s, const char *key, const void *data, int bytes);
/* Bytes of the value (at most `room` are copied; 0: none), or -1 + PG_OK in *code where it is not
 * there yet. */
int pg_store_look(pg_store *s, int *code, const char *key, void *data, int room);
/* Waits for the key; its value has exactly `bytes`. */
int pg_store_get(pg_store *s, const char *key, void *data, int bytes, double seconds);
/* The server stays until the others have left, so many seconds at most. */
void pg_store_close(pg_store *s, double seconds);
#endif
