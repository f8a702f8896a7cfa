/* nccl.h: what the nccl*.c files share: groups, lanes, operations.
 *
 *   nccl.c         the table of backend.h; joining and leaving; the operations
 *   nccl_group.c   making, freeing, cancelling and reforming groups; handing ids round
 *   nccl_check.c   comparing the calls of a group's ranks
 *   nccl_watch.c   the watchdog: deaths, time limits, errors; breaking groups
 *   nccl_api.c     opening libnccl.so.2 at run time, so that one GPU needs no NCCL
 *
 * The one idea.  A group has three lanes, each a communicator with a stream of its own:
 * collectives, messages to higher ranks, messages to lower ranks.  NCCL's send ends only with its
 * receive and a communicator does one thing at a time; but messages that all go up (or all down)
 * cannot wait for each other in a circle, so ranks may send to both sides and receive afterwards.
 * A lane starts an operation after the work that the compute stream had then; at the wait the
 * compute stream waits for the lane.  The host waits for neither.
 * Kernels of NCCL occupy their multiprocessors until the peer comes, so overlapping groups must be
 * used in one order on all ranks, or they can lock each other. */
#ifndef PG_NCCL_H
#define PG_NCCL_H
#include <nccl.h>
#include <pthread.h>

#include "cuda_device.h"
#include "page.h"
#include "shm.h"
#include "store.h"

/* The functions of NCCL that we call, as pointers. */
#define NCCL_FUNCTIONS(F)                                                                          \
    F(GetVersion)                                                                                  \
    F(GetUniqueId)                                                                                 \
    F(CommInitRankConfig)                                                                          \
    F(CommFinalize)                                                                                \
    F(CommDestroy)                                                                                 \
    F(CommAbort)                                                                                   \
    F(CommGetAsyncError)                                                                           \
    F(GetErrorString)                                                                              \
    F(GetLastError)                                                                                \
    F(AllReduce)                                                                                   \
    F(AllGather)                                                                                   \
    F(ReduceScatter)                                                                               \
    F(Broadcast)                                                                                   \
    F(Send)                                                                                        \
    F(Recv)
typedef struct {
#define NCCL_POINTER(name) __typeof__(nccl##name) *name;
    NCCL_FUNCTIONS(NCCL_POINTER)
#undef NCCL_POINTER
} nccl_functions;

enum { LANE_ALL, LANE_UP, LANE_DOWN, LANES };

typedef struct nccl_op nccl_op;
typedef struct nccl_group nccl_group;

typedef struct {
    ncclComm_t comm;    /* NULL: broken, or never made */
    ncclComm_t closing; /* at the end: taken from comm, being finished */
    cudaStream_t stream;
    nccl_op *first, *last; /* under way, in order */
} nccl_lane;

struct nccl_group {
    shm_group *control;     /* the same ranks in shared memory; NULL: on several hosts */
    char name[48], key[96]; /* key: of this group among all, in the store */
    int rank, size;
    int *members; /* world ranks */
    nccl_lane lanes[LANES];
    int round, freed;    /* reforms so far */
    uint64_t calls;      /* compared through the store */
    int code;            /* why it cannot be used; PG_OK: it can */
    char text[SHM_TEXT]; /* the same in words */
    nccl_group *next;    /* all that were ever made; they end with the process */
};

struct nccl_op {
    nccl_op *next;
    nccl_group *group;
    nccl_lane *lane;
    shm_call call;
    void *note;              /* the comparison of calls, not yet done; NULL: none */
    cudaEvent_t ready, done; /* it could start; it has ended */
    int64_t since; /* ns: when the watchdog first saw it first in its lane and ready; 0: not yet */
    int waited, finished, code;
};

/* This process in its world of GPUs; `lock` guards all of it, groups and operations. */
typedef struct {
    pthread_mutex_t lock;
    nccl_functions call;
    int joined, rank, size;
    int check;    /* PG_COMM_CHECK: 0 never, 1 each call first, 2 (default) see nccl_check.c */
    double limit; /* seconds */
    nccl_group *groups; /* the world is the last */
    nccl_op *spare;     /* to be used again, with their events */
    pg_store *store;    /* NULL: all ranks are on this host */
    _Atomic int
        lost;    /* code: numbers that were waited for will not come; 0: none.  Read unlocked */
    int noticed; /* the main thread was told of `broken` */
    char lost_text[SHM_TEXT];
    nccl_group *broken; /* the first that broke and was not cancelled */
    int64_t broken_at;  /* ns: when */
    int aborting;       /* threads that abort communicators */
} nccl_world;
extern nccl_world nccl;

/* nccl_api.c */
int nccl_load(void);    /* PG_OK, or what is missing */
int nccl_version(void); /* 0: not found */
/* What a result of NCCL means, as pg_fail(PG_ECOMM). */
int nccl_error(const char *op, const char *group, ncclResult_t r, ncclComm_t comm);

/* nccl.c, for nccl_group.c: poll (locked) until the lane's communicator has
 * done what it was asked. */
int nccl_settle(nccl_group *g, nccl_lane *lane, ncclResult_t r, const char *op);

/* nccl_group.c */
int nccl_group_new(nccl_group **out, shm_group *control, const int *members, int size, int rank,
                   const char *name);
int nccl_connect(nccl_group *g); /* make its communicators; all members call it */
int nccl_split(void **impl, void *parent, const int32_t *ranks, int n, const char *name);
void nccl_free(void *impl);
int nccl_cancel(void *impl, const char *reason);
int nccl_reform(void *impl);
void nccl_close(void); /* end all communicators, within some seconds; the watchdog has stopped */

/* nccl_check.c: compare with the peers before (or while) the data moves. */
int nccl_compare(nccl_group *g, shm_call call, void **note);

/* nccl_watch.c */
int nccl_watch_start(void);
void nccl_watch_stop(void);
/* Locked: forget what has ended in this lane. */
void nccl_sweep(nccl_lane *lane);
/* Locked: no operation of this group goes on; its other ranks are told. */
void nccl_break(nccl_group *g, int code, const char *text);
/* Locked: PG_OK, or why the group cannot be used. */
int nccl_usable(nccl_group *g, const char *op);
void nccl_recycle(nccl_op *op);   /* locked */
void nccl_abort(ncclComm_t comm); /* locked: in a thread of its own, counted in `aborting` */
/* For the waits of cuda_wait.c and cuda.c. */
int nccl_tell_waiting(void); /* 1: the status page says what we wait in, where it is a collective */
void nccl_tell_running(void);
int nccl_lost(const char *op);
#endif
