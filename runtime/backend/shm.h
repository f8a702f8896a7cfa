/* shm.h: what the shm*.c files share: the layout of the segment, groups, operations, the engine.
 *
 *   shm.c          the table of backend.h; joining and leaving the world
 *   shm_block.c    making, mapping and checking the segment; the broken word
 *   shm_join.c     handing the segment round when no launcher did (torchrun, mpirun, Slurm)
 *   shm_group.c    splitting, freeing, cancelling and reforming groups
 *   shm_ops.c      allreduce, allgather, reducescatter, broadcast, barrier
 *   shm_pair.c     send and recv
 *   shm_reduce.c   arithmetic in rank order
 *   shm_progress.c the engine that moves all operations; waiting
 *   shm_watch.c    death, time limits, and the reports about them
 *
 * The one idea.  Each rank has a seat in each group with a counter, `posted`.  An operation is a
 * sequence of steps: do local work, post (count up), go on when every member has posted as often.
 * All members make the same steps, since they have compared their calls at the first; so one
 * counter orders everything, and buffers used in turns of two need no other lock. */
#ifndef PG_SHM_H
#define PG_SHM_H
#include "../base/status.h"
#include "../base/types.h"
#include "backend.h"
#include "page.h"

#define SHM_MAGIC      0x706772756e73686dull
#define SHM_VERSION    1u
#define SHM_GROUPS     4096       /* groups alive at a time in a world; a power of two */
#define SHM_TEXT       1000       /* bytes of a shared message */
#define SHM_PIPE_BYTES (1 << 20)  /* what a send may leave before its receiver comes */
#define SHM_DIRECT     (32 << 10) /* allreduce: up to here, over all ranks, each adds all alone */
#define SHM_LINE       64

/* ---- the segment ---- */
/* A message set once by whoever comes first: 0 not set, 1 being written, 2 readable. */
typedef struct {
    _Atomic uint32_t set;
    int32_t code;
    char text[SHM_TEXT];
} shm_notice;

typedef struct {
    _Atomic uint32_t used;
    int32_t size;   /* members its memory is made for; 0: none yet */
    int64_t offset; /* of its region in the file */
} shm_slot;

typedef struct {
    uint64_t magic;
    uint32_t version, ranks;
    uint64_t owner;                         /* user id */
    _Atomic int64_t top;                    /* where the next region may begin */
    shm_notice dead, failed;                /* by the launcher; by a rank that saw it */
    _Atomic uint32_t forming[PG_SHM_RANKS]; /* what this rank is leading in: see shm_group.c */
    shm_slot slots[SHM_GROUPS];             /* slot 0 is the world */
    _Alignas(SHM_LINE) pg_page pages[];
} shm_control;

/* A rank's place in a group; a cache line. */
typedef struct {
    _Alignas(SHM_LINE) _Atomic uint64_t posted;
    _Atomic uint32_t joined, reforms;
} shm_seat;

/* What a rank is about to do, compared before any output is touched; in front of its buffer. */
typedef struct {
    uint64_t number; /* of the call in its group */
    int64_t count;
    int32_t kind, dtype, root, reduce;
    int32_t bare;  /* 1: only to compare the calls of an operation whose data goes elsewhere */
    char rest[28]; /* of its cache line */
} shm_call;

/* A pair's pipe: a ring of bytes in which messages follow each other, each behind a shm_call. */
typedef struct {
    _Alignas(SHM_LINE) _Atomic uint64_t head; /* bytes written, by the sender */
    _Alignas(SHM_LINE) _Atomic uint64_t tail; /* bytes read, by the receiver */
    _Alignas(SHM_LINE) char ring[];
} shm_pipe;

typedef struct {
    int32_t size;
    _Atomic uint32_t ready, left; /* all have joined; members that have freed it */
    char name[48];
    int32_t members[PG_SHM_RANKS]; /* world ranks */
    shm_notice broken;             /* cancelled, or failed on some member */
    _Alignas(SHM_LINE) shm_seat seats[];
    /* then, each from a page boundary: two buffers a member, size * size pipes */
} shm_region;

/* ---- in this process ---- */
enum shm_kind {
    SHM_ALLREDUCE,
    SHM_ALLGATHER,
    SHM_REDUCESCATTER,
    SHM_BROADCAST,
    SHM_BARRIER,
    SHM_SEND,
    SHM_RECV,
    SHM_SPLIT,
    SHM_REFORM,
    SHM_NKINDS
};
extern const char *const shm_kind_names[SHM_NKINDS];

typedef struct shm_op shm_op;
typedef struct shm_group shm_group;

/* Operations that must follow each other: a group's collectives, or one direction of a pair. */
typedef struct shm_lane {
    shm_op *first, *last;
    struct shm_lane *next, *before; /* among the engine's lanes with work */
} shm_lane;

struct shm_group {
    shm_region *region; /* NULL after shutdown */
    char name[48];
    int slot, rank, size;
    int *members;         /* world ranks */
    uint64_t posts;       /* what the own seat says */
    uint64_t turn, calls; /* buffers filled; calls started */
    uint32_t seen;        /* while it forms: the announcement looked at last */
    int reforming;        /* 0 no, 1 waiting for all to arrive, 2 for all to be clean */
    shm_lane *lanes;      /* 0: collectives; 1 + p: to p; 1 + size + p: from p */
    shm_group *next;      /* all groups of the process */
};

enum shm_state { SHM_QUEUED, SHM_RUNNING, SHM_DONE };
enum { SHM_BLOCKED = 0, SHM_MOVED = 1, SHM_FINISHED = 2 }; /* what advance says, or a code */

struct shm_op {
    shm_op *next;
    shm_lane *lane;
    shm_group *group;
    int (*advance)(shm_op *op);                  /* one step if it can be made now; never waits */
    int (*blocker)(const shm_op *op, int after); /* next member > after it waits for, or -1 */
    shm_call call;
    const char *in;
    char *out;
    int64_t step, chunk, chunks; /* chunk in elements (bytes done, for a pair) */
    uint64_t turn;               /* of its first chunk */
    int64_t since;               /* ns: when it last moved */
    int state, code, detached;   /* detached: the progress thread moves it */
    char *text;                  /* why it failed */
};

/* The state of this process in its world, one for the process; `lock` guards everything in it and
 * in its groups and operations. */
typedef struct {
    shm_control *control; /* NULL: not joined, or left */
    int fd, rank;
    shm_group *world, *groups;
    shm_lane active; /* head of the ring of lanes with work */
    uint32_t led;    /* groups this rank has led in */
    int64_t limit;   /* ns an operation may stand still */
} shm_world;
extern shm_world shm;

/* shm_block.c */
int64_t shm_region_bytes(int size);
int64_t shm_stage_bytes(int size); /* of one buffer, without its shm_call */
shm_call *shm_stage(const shm_group *g, int member, uint64_t turn);
shm_pipe *shm_pipe_of(const shm_group *g, int from, int to);
int shm_region_map(shm_region **out, int slot);
void shm_region_unmap(shm_region *r, int size);
void shm_notice_set(shm_notice *n, int code, const char *text); /* the first one counts */
const shm_notice *shm_notice_get(const shm_notice *n);          /* NULL if not set */
const shm_notice *shm_world_broken(void);
void shm_wake(const shm_group *g); /* all members but this rank */
void shm_wake_all(shm_control *c);

/* shm_join.c */
int shm_join_by_socket(int *fd, const char *host, int port, const char *job, int rank, int size,
                       double seconds);

/* shm_group.c */
int shm_group_new(shm_group **out, const int *members, int size, int rank, const char *name);
void shm_group_drop(shm_group *g); /* its memory in this process */
int shm_split(void **impl, void *parent, const int32_t *ranks, int n, const char *name);
void shm_free(void *impl);
int shm_cancel(void *impl, const char *reason);
int shm_reform(void *impl);

/* shm_ops.c and shm_pair.c: fill in and start */
int shm_collective(shm_group *g, shm_call call, const void *in, void *out, void **ticket);
int shm_pair(shm_group *g, shm_call call, const void *in, void *out, void **ticket);
/* Meet and compare, without data: for a transport that moves the data itself. */
int shm_note(shm_group *g, shm_call call, void **ticket);

/* shm_reduce.c: y[i] = x[0][i] op x[1][i] op ..., in that order; bf16 and f16 kept in f32 between.
 * y may be one of the x. */
void shm_reduce(void *y, const void *const *x, int sources, int64_t n, int dtype, int op);

/* shm_progress.c */
shm_op *shm_op_new(shm_group *g, shm_lane *lane, shm_call call);
void shm_start(shm_op *op, void **ticket); /* queue it, and move it as far as it goes now */
void shm_detach(void *ticket);
int shm_done(void *ticket);
int shm_wait(void *ticket);
void shm_lock(void);
void shm_unlock(void);
void shm_abandon(shm_group *g, int code, const char *text); /* end all its operations; locked */
void shm_stop(void);                                        /* end the thread and all operations */

/* shm_watch.c */
int shm_fail(shm_op *op, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Why this operation cannot go on: broken, cancelled, its peer left; 0 if it may. */
int shm_broken(shm_op *op);
/* After a slice without news: the same, and whether a peer is dead or its time is over. */
int shm_watch(shm_op *op);
const char *shm_call_text(char *text, size_t bytes, const shm_call *call);
#endif
