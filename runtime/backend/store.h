/* store.h: a small key-value store on rank 0, for ranks on several hosts: NCCL's id, the first
 * failure and PG_COMM_CHECK travel by it.  Ranks of one host have shared memory instead (shm.h).
 *
 * It listens on MASTER_ADDR:MASTER_PORT.  Where that address is the loopback, it is a socket in
 * Linux's abstract namespace instead: no other host can reach it, the kernel says whose process
 * calls, and other users are turned away.  Over the network a caller must name the same job. */
#ifndef PG_STORE_H
#define PG_STORE_H
#include <stdint.h>

#define PG_STORE_KEY  128  /* bytes of a key, its end included */
#define PG_STORE_DATA 1024 /* bytes of a value at most */

typedef struct pg_store pg_store;
/* All ranks call it; rank 0 serves.  PG_ECOMM names host:port, the seconds waited and the way out. */
int pg_store_open(pg_store **out, const char *host, int port, const char *job, int rank, int size,
                  double seconds);
int pg_store_set(pg_store *s, const char *key, const void *data, int bytes);
/* Bytes of the value (at most `room` are copied), or -1 + PG_OK in *code where it is not there yet. */
int pg_store_look(pg_store *s, int *code, const char *key, void *data, int room);
/* Waits for the key; its value has exactly `bytes`. */
int pg_store_get(pg_store *s, const char *key, void *data, int bytes, double seconds);
/* Rank 0 stays until the others have left, so many seconds at most. */
void pg_store_close(pg_store *s, double seconds);
#endif
