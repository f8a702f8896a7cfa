/* fake_nccl.h: enough of CUDA and NCCL, on host memory, to run nccl*.c without a GPU: streams,
 * events, and communicators between processes that were forked after fake_open().
 *
 * Each operation is a thread that begins when the one before it on its communicator has
 * ended, meets its peers in a room of shared memory, and ends when its numbers are there or
 * its communicator is aborted.  As with the real one, a send ends with its receive, and
 * nobody compares calls. */
#ifndef PG_FAKE_NCCL_H
#define PG_FAKE_NCCL_H
#include "../../runtime/backend/nccl.h"
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define FAKE_ROOMS 64
#define FAKE_RANKS 8
#define FAKE_BYTES (256 << 10) /* of a rank's share of an operation */

typedef struct {
    _Atomic int64_t came[FAKE_RANKS], left[FAKE_RANKS]; /* operations begun and ended, by rank */
    _Atomic int64_t sent[FAKE_RANKS][FAKE_RANKS], taken[FAKE_RANKS][FAKE_RANKS];
    _Atomic int gone; /* ranks that have begun to finalize it, or aborted it */
    char data[FAKE_RANKS][FAKE_BYTES];
} fake_room;

typedef struct {
    _Atomic int rooms, failures; /* handed out; NCCL_ASYNC errors to report, by room - 1 */
    fake_room room[FAKE_ROOMS];
} fake_world;
static fake_world *fake;
static _Atomic int fake_stuck; /* of this process: no communicator comes to its end */

typedef struct {
    _Atomic int done;
} fake_end;

struct ncclComm {
    int room, rank, size;
    _Atomic int aborted, finalized;
    int64_t calls, sends[FAKE_RANKS], recvs[FAKE_RANKS];
    fake_end *last;
};
struct CUstream_st {
    _Atomic(fake_end *) tail;
};
struct CUevent_st {
    _Atomic(fake_end *) end;
};

static inline void fake_open(void) {
    fake = mmap(NULL, sizeof *fake, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static inline int fake_ended(const fake_end *e) {
    return !e || atomic_load(&((fake_end *)e)->done);
}
static inline void fake_nap(void) { nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL); }

/* ---- CUDA ---- */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    (void)flags;
    return (*e = calloc(1, sizeof **e)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    e->end = s->tail;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    return fake_ended(e->end) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    return fake_ended(s->tail) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    (void)flags;
    if (!fake_ended(e->end)) s->tail = e->end;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    (void)flags, (void)priority;
    return (*s = calloc(1, sizeof **s)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    free(s);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = *most = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    (void)device;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **out, size_t bytes) {
    return (*out = malloc(bytes)) ? cudaSuccess : cudaErrorMemoryAllocation;
}

/* Of cuda.c, cuda_wait.c and the kernels. */
cuda_device cuda = {.name = "a fake", .bus = "0000:00:00.0", .count = 1};
int cuda_check(const char *op, int error) {
    return error ? pg_fail(PG_EDEVICE, "%s: fake error %d", op, error) : PG_OK;
}
cudaEvent_t cuda_event_new(void) {
    cudaEvent_t e;
    return cudaEventCreateWithFlags(&e, 0) ? NULL : e;
}
int cuda_wait_event(cudaEvent_t e, const char *op) {
    (void)op;
    while (cudaEventQuery(e)) fake_nap();
    return PG_OK;
}
int cuda_wait_stream(cudaStream_t s, const char *op) {
    (void)op;
    while (cudaStreamQuery(s)) fake_nap();
    return PG_OK;
}

/* ---- NCCL ---- */
typedef struct {
    ncclComm_t comm;
    fake_end *after, *end;
    int kind, peer, op;
    int64_t number, bytes; /* of the call, or of the message of its pair */
    const void *in;
    void *out;
} fake_job;

static inline int fake_gone(const fake_job *j) { return atomic_load(&j->comm->aborted); }

static inline void fake_collect(const fake_job *j, fake_room *room) {
    int size = j->comm->size, rank = j->comm->rank;
    for (int i = 0; i < size; i++) {
        const char *from = room->data[i];
        if (j->kind == SHM_ALLGATHER) memcpy((char *)j->out + i * j->bytes, from, (size_t)j->bytes);
        if (j->kind == SHM_BROADCAST && i == j->peer) memcpy(j->out, from, (size_t)j->bytes);
        if (j->kind == SHM_REDUCESCATTER) from += rank * j->bytes;
        if (j->kind != SHM_ALLREDUCE && j->kind != SHM_REDUCESCATTER) continue;
        const int32_t *x = (const int32_t *)from; /* tests add i32 alone */
        int32_t *y = j->out;
        for (int64_t k = 0; k < j->bytes / 4; k++)
            y[k] = !i ? x[k] : j->op == ncclMax ? (x[k] > y[k] ? x[k] : y[k]) : x[k] + y[k];
    }
}

static inline void fake_collective(fake_job *j, fake_room *room) {
    int size = j->comm->size, rank = j->comm->rank;
    for (int i = 0; i < size; i++) /* all have left the call before */
        while (atomic_load(&room->left[i]) < j->number - 1 && !fake_gone(j)) fake_nap();
    if (fake_gone(j)) return;
    memcpy(room->data[rank], j->in, (size_t)(j->bytes * (j->kind == SHM_REDUCESCATTER ? size : 1)));
    atomic_store(&room->came[rank], j->number);
    for (int i = 0; i < size; i++)
        while (atomic_load(&room->came[i]) < j->number && !fake_gone(j)) fake_nap();
    if (fake_gone(j)) return;
    fake_collect(j, room);
    atomic_store(&room->left[rank], j->number);
}

static inline void fake_pair(fake_job *j, fake_room *room) {
    int me = j->comm->rank, from = j->kind == SHM_SEND ? me : j->peer, to = me + j->peer - from;
    _Atomic int64_t *sent = &room->sent[from][to], *taken = &room->taken[from][to];
    if (j->kind == SHM_SEND) {
        memcpy(room->data[me], j->in, (size_t)j->bytes);
        atomic_store(sent, j->number);
        while (atomic_load(taken) < j->number && !fake_gone(j)) fake_nap();
        return;
    }
    while (atomic_load(sent) < j->number && !fake_gone(j)) fake_nap();
    if (fake_gone(j)) return;
    memcpy(j->out, room->data[from], (size_t)j->bytes);
    atomic_store(taken, j->number);
}

static void *fake_run(void *job) {
    fake_job *j = job;
    while (!fake_ended(j->after) && !fake_gone(j)) fake_nap();
    fake_room *room = &fake->room[j->comm->room];
    if (j->kind == SHM_SEND || j->kind == SHM_RECV) fake_pair(j, room);
    else fake_collective(j, room);
    atomic_store(&j->end->done, 1);
    free(j);
    return NULL;
}

/* Ends and communicators are never freed: others may still look at them. */
static inline ncclResult_t fake_issue(fake_job job, int64_t n, ncclDataType_t type,
                                      cudaStream_t s) {
    fake_job *j = malloc(sizeof *j);
    pthread_t thread;
    int64_t size = type == ncclInt32 || type == ncclFloat32 ? 4 : type == ncclUint8 ? 1 : 8;
    ncclComm_t c = job.comm;
    job.bytes = n * size;
    job.number = job.kind == SHM_SEND   ? ++c->sends[job.peer]
                 : job.kind == SHM_RECV ? ++c->recvs[job.peer]
                                        : ++c->calls;
    job.after = c->last;
    job.end = c->last = calloc(1, sizeof *job.end);
    s->tail = job.end;
    *j = job;
    if (pthread_create(&thread, NULL, fake_run, j)) return ncclSystemError;
    pthread_detach(thread);
    return ncclInProgress; /* as non-blocking communicators say */
}

static ncclResult_t fake_id(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    int room = atomic_fetch_add(&fake->rooms, 1);
    memcpy(id, &room, sizeof room);
    return room < FAKE_ROOMS ? ncclSuccess : ncclInternalError;
}
static ncclResult_t fake_init(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                              ncclConfig_t *config) {
    ncclComm_t c = calloc(1, sizeof *c);
    if (!c || config->blocking != 0 || size > FAKE_RANKS) return ncclInvalidArgument;
    memcpy(&c->room, &id, sizeof c->room);
    c->rank = rank;
    c->size = size;
    *out = c;
    return ncclInProgress;
}
static ncclResult_t fake_abort(ncclComm_t c) {
    if (!atomic_exchange(&c->aborted, 1) && !c->finalized)
        atomic_fetch_add(&fake->room[c->room].gone, 1);
    while (!fake_ended(c->last) || atomic_load(&fake_stuck)) fake_nap();
    return ncclSuccess;
}
/* Ends when all ranks have begun it. */
static ncclResult_t fake_finalize(ncclComm_t c) {
    if (c->aborted || atomic_exchange(&c->finalized, 1)) return ncclInvalidUsage;
    atomic_fetch_add(&fake->room[c->room].gone, 1);
    return ncclInProgress;
}
static ncclResult_t fake_state(ncclComm_t c, ncclResult_t *r) {
    *r = atomic_load(&fake->failures) == c->room + 1 ? ncclRemoteError : ncclSuccess;
    if (c->finalized && atomic_load(&fake->room[c->room].gone) < c->size) *r = ncclInProgress;
    return ncclSuccess;
}
static const char *fake_text(ncclResult_t r) {
    return r == ncclRemoteError ? "remote error" : "fake";
}
static const char *fake_last(ncclComm_t c) {
    (void)c;
    return "";
}
static ncclResult_t fake_version(int *version) {
    *version = 22809;
    return ncclSuccess;
}
static ncclResult_t fake_allreduce(const void *in, void *out, size_t n, ncclDataType_t type,
                                   ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    fake_job j = {.comm = c, .kind = SHM_ALLREDUCE, .op = (int)op, .in = in, .out = out};
    return fake_issue(j, (int64_t)n, type, s);
}
static ncclResult_t fake_allgather(const void *in, void *out, size_t n, ncclDataType_t type,
                                   ncclComm_t c, cudaStream_t s) {
    return fake_issue((fake_job){.comm = c, .kind = SHM_ALLGATHER, .in = in, .out = out},
                      (int64_t)n, type, s);
}
static ncclResult_t fake_reducescatter(const void *in, void *out, size_t n, ncclDataType_t type,
                                       ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    fake_job j = {.comm = c, .kind = SHM_REDUCESCATTER, .op = (int)op, .in = in, .out = out};
    return fake_issue(j, (int64_t)n, type, s);
}
static ncclResult_t fake_broadcast(const void *in, void *out, size_t n, ncclDataType_t type,
                                   int root, ncclComm_t c, cudaStream_t s) {
    fake_job j = {.comm = c, .kind = SHM_BROADCAST, .peer = root, .in = in, .out = out};
    return fake_issue(j, (int64_t)n, type, s);
}
static ncclResult_t fake_send(const void *in, size_t n, ncclDataType_t type, int peer, ncclComm_t c,
                              cudaStream_t s) {
    return fake_issue((fake_job){.comm = c, .kind = SHM_SEND, .peer = peer, .in = in}, (int64_t)n,
                      type, s);
}
static ncclResult_t fake_recv(void *out, size_t n, ncclDataType_t type, int peer, ncclComm_t c,
                              cudaStream_t s) {
    return fake_issue((fake_job){.comm = c, .kind = SHM_RECV, .peer = peer, .out = out}, (int64_t)n,
                      type, s);
}

/* Of nccl_api.c. */
int nccl_load(void) {
    nccl.call = (nccl_functions){
        .GetVersion = fake_version,
        .GetUniqueId = fake_id,
        .CommInitRankConfig = fake_init,
        .CommFinalize = fake_finalize,
        .CommDestroy = fake_abort,
        .CommAbort = fake_abort,
        .CommGetAsyncError = fake_state,
        .GetErrorString = fake_text,
        .GetLastError = fake_last,
        .AllReduce = fake_allreduce,
        .AllGather = fake_allgather,
        .ReduceScatter = fake_reducescatter,
        .Broadcast = fake_broadcast,
        .Send = fake_send,
        .Recv = fake_recv,
    };
    return PG_OK;
}
int nccl_error(const char *op, const char *group, ncclResult_t r, ncclComm_t comm) {
    (void)comm;
    return pg_fail(PG_ECOMM, "%s (%s): NCCL: %s", op, group, fake_text(r));
}
#endif
