/* backend.h: the contract of a backend: three tables, for memory, kernels and collectives.
 *
 * cpu:   malloc behind the pool, kernels/NAME.c, shared memory between the ranks of one host.
 * shape: no data at all; kernels and collectives are NULL and the core stops after its checks.
 * cuda:  comes as libpg_cuda.so and fills the same three tables.
 * The core asks pg_backend_now() and never names a device. */
#ifndef PG_BACKEND_H
#define PG_BACKEND_H
#include "../../kernels/kernels.h"

typedef struct {                  /* raw blocks; the pool (pool.h) stands in front of these */
    void *(*take)(int64_t bytes); /* NULL: none left.  64-byte aligned */
    void (*give)(void *block, int64_t bytes);
    int (*upload)(void *device, const void *host, int64_t bytes, pg_stream s); /* done on return */
    int (*download)(void *host, const void *device, int64_t bytes,
                    pg_stream s); /* done on return */
    int (*copy)(void *to, const void *from, int64_t bytes, pg_stream s);
    int (*sync)(void);
    int64_t (*available)(void);                       /* bytes this process may use at start */
    int host_visible;                                 /* 1: the host may read blocks directly */
    int (*set)(void *block, int byte, int64_t bytes); /* each byte; PG_POOL=0 poisons with it */
    /* Host buffers that the device reads and writes by itself (pg_host in pg.h); NULL where blocks
     * are host memory anyway.  transfer returns at once; see join and settle. */
    int (*pin)(void **pinned, void **data, int64_t bytes);
    void (*unpin)(void *pinned); /* waits for its transfers */
    int (*transfer)(void *pinned, void *device, void *host, int64_t bytes, int to_device);
    int (*join)(void *pinned);   /* later work on the device's stream sees its transfers */
    int (*settle)(void *pinned); /* the host waits for them */
    /* Moments on the device's own clock (pg_marks in pg.h); NULL where the host's clock tells them,
     * because an op is done when its call returns. */
    int (*mark_new)(void **mark);
    int (*mark_set)(void *mark); /* behind the work that the device's stream has now */
    int (*mark_read)(double *seconds, void *from, void *to); /* waits for both */
    void (*mark_free)(void *mark);
} pg_memory_ops;

/* Collectives on raw pointers.  `impl` is the transport's group.  All are asynchronous: they fill
 * *ticket, and wait(ticket) ends it (returns its code and frees it).  A rank calls the operations
 * of one group in the same order as its peers; different groups are independent.  The core has
 * checked counts, dtypes and ranks, and never comes here for a group of one. */
typedef struct {
    int (*world)(void **impl, int *rank, int *size); /* join by the environment */
    int (*split)(void **impl, void *parent, const int32_t *ranks, int n, const char *name);
    void (*free)(void *impl); /* harmless after shutdown, as is wait */
    int (*allreduce)(void *impl, void *data, int64_t n, int dtype, int op, void **ticket);
    int (*allgather)(void *impl, void *out, const void *in, int64_t n_in, int dtype, void **ticket);
    int (*reducescatter)(void *impl, void *out, const void *in, int64_t n_out, int dtype, int op,
                         void **ticket);
    int (*broadcast)(void *impl, void *data, int64_t n, int dtype, int root, void **ticket);
    int (*send)(void *impl, const void *data, int64_t n, int dtype, int peer, void **ticket);
    int (*recv)(void *impl, void *data, int64_t n, int dtype, int peer, void **ticket);
    int (*barrier)(void *impl, void **ticket);
    void (*detach)(void *ticket); /* the caller does not wait now: move it in the background;
                                        NULL where it moves anyway */
    /* Nobody will wait, but what the device does later comes after it, where it writes:
     * who kept the tensor finds the result.  Gives no message, frees nothing; NULL where
     * only a wait ends it. */
    void (*drop)(void *ticket);
    int (*done)(void *ticket); /* 1 done, 0 not yet, negative failed */
    int (*wait)(void *ticket);
    void (*timeout)(double seconds);
    int (*cancel)(void *impl, const char *reason);
    int (*reform)(void *impl);
    void (*shutdown)(void); /* leave the world; nothing stays behind */
} pg_collective_ops;

/* Work recorded and replayed; pg_graph_* of pg.h.  Between begin and end what the stream is
 * given is noted down and not done; the core has seen to it that nothing waits for it and that
 * no block is given back. */
typedef struct {
    int (*begin)(void);
    int (*end)(void **graph);   /* graph NULL: what was recorded is dropped.  It ends in any case */
    int (*launch)(void *graph); /* on the stream; does not wait */
    void (*free)(void *graph);  /* also while it runs */
} pg_graph_ops;

typedef struct pg_backend {
    const char *name;
    const pg_memory_ops *memory;
    const pg_kernels *kernels;            /* NULL: shapes alone */
    const pg_collective_ops *collectives; /* NULL: a world of one */
    const pg_graph_ops *graphs;           /* NULL: none */
    pg_stream stream;
} pg_backend;

/* Raise it with every change of kernels.h or this file: a plug-in built with another is refused. */
#define PG_BACKEND_ABI 7

/* The backend in force; opens "auto" at the first call if pg_init was not
 * called.  NULL + message. */
const pg_backend *pg_backend_now(void);
/* Like pg_backend_now, but never the shape table: the real device under pg_shape_only. */
const pg_backend *pg_backend_device(void);
int pg_backend_closed(void); /* 1 after pg_shutdown */
/* "name value" lines about the CUDA plug-in, its libraries and GPUs; opens no device. */
void pg_backend_cuda_info(char *text, size_t bytes);
extern const pg_backend pg_backend_cpu, pg_backend_shape;
extern const pg_collective_ops pg_collectives_shm;
#endif
