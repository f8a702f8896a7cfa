/* nccl.c: collectives between GPUs: the table of backend.h, joining and leaving, the operations. */
#include "nccl.h"
#include "ranks.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINGER 3.0 /* seconds that rank 0 stays for the others to hear how it ended */

static void end_process(int status, void *unused);

nccl_world nccl = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void timeout(double seconds) {
    if (!(seconds > 0)) return;
    pthread_mutex_lock(&nccl.lock);
    nccl.limit = seconds;
    pthread_mutex_unlock(&nccl.lock);
    if (!nccl.store) pg_collectives_shm.timeout(seconds);
}

/* ---- joining ---- */

/* Two ranks on one GPU: NCCL would hang or refuse in words of its own. */
static int refuse_sharing(const nccl_group *g) {
    struct place {
        char bus[32];
    } mine, *all = calloc((size_t)g->size, sizeof *all);
    void *ticket;
    if (!all) return pg_fail(PG_ENOMEM, "ranks: out of memory");
    snprintf(mine.bus, sizeof mine.bus, "%s", cuda.bus);
    int rc = pg_collectives_shm.allgather(g->control, all, &mine, sizeof mine, PG_U8, &ticket);
    if (rc == PG_OK) rc = pg_collectives_shm.wait(ticket);
    for (int i = 0; rc == PG_OK && i < g->size; i++)
        for (int j = 0; rc == PG_OK && j < i; j++)
            if (!strcmp(all[i].bus, all[j].bus))
                rc = pg_fail(PG_EDEVICE,
                             "ranks %d and %d would both use one GPU (%s at %s, %d visible); "
                             "start at most a rank a GPU, or use --device cpu",
                             j, i, cuda.name, all[i].bus, cuda.count);
    free(all);
    return rc;
}

static int read_settings(void) {
    const char *check = getenv("PG_COMM_CHECK");
    nccl.check = check && (!strcmp(check, "0") || !strcmp(check, "1")) ? check[0] - '0' : 2;
    return pg_ranks_timeout(&nccl.limit);
}

/* Ranks of one host meet in shared memory, those of several in the store. */
static int meet(const pg_ranks *r, void **control) {
    int rank, size;
    *control = NULL;
    if (r->local_size == r->size) return pg_collectives_shm.world(control, &rank, &size);
    pg_store_place at = {.host = r->host, .port = r->port, .job = r->job};
    int whose = r->served ? PG_STORE_HOST : r->rank ? PG_STORE_RANK : PG_STORE_MINE;
    return pg_store_open(&nccl.store, &at, r->rank, r->size, whose, nccl.limit);
}

static int join_world(const pg_ranks *r) {
    void *control;
    char id[64];
    if (nccl.groups) /* what was made then would be taken for this world */
        return pg_fail(PG_ECOMM, "ranks: this process could not join its ranks before; start it "
                                 "again");
    PG_TRY(read_settings());
    PG_TRY(nccl_load());
    on_exit(end_process, NULL);
    PG_TRY(meet(r, &control));
    int *members = calloc((size_t)r->size, sizeof *members);
    if (!members) return pg_fail(PG_ENOMEM, "ranks: out of memory");
    for (int i = 0; i < r->size; i++) members[i] = i;
    nccl_group *g;
    int rc = nccl_group_new(&g, control, members, r->size, r->rank, "world");
    free(members);
    PG_TRY(rc);
    nccl.rank = r->rank;
    nccl.size = r->size;
    if (control && !cuda.shared) PG_TRY(refuse_sharing(g));
    snprintf(id, sizeof id, "pgrun-%d", r->rank);
    if (cuda.shared) setenv("NCCL_HOSTID", id, 1); /* else NCCL refuses; so it goes by sockets */
    PG_TRY(nccl_watch_start());
    PG_TRY(nccl_connect(g));
    /* once more: exit handlers run backwards, and those of CUDA and NCCL that came since would take
     * their state away before we have left */
    on_exit(end_process, NULL);
    nccl.joined = 1;
    return PG_OK;
}

static int world(void **impl, int *rank, int *size) {
    pg_ranks r;
    PG_TRY(pg_ranks_read(&r));
    *impl = NULL;
    *rank = r.rank;
    *size = r.size;
    if (r.size == 1) return PG_OK;
    if (!nccl.joined) PG_TRY(join_world(&r));
    nccl_group *g = nccl.groups;
    while (g->next) g = g->next;
    *impl = g;
    return PG_OK;
}

static void leave_world(void) {
    const char *failure = pg_page_mine()->failure;
    if (!nccl.groups) return;
    nccl_watch_stop();
    if (nccl.store && failure[0]) {
        char text[SHM_TEXT];
        snprintf(text, sizeof text, "rank %d failed: %.900s", nccl.rank, failure);
        pg_store_once(nccl.store, PG_STORE_FAILED, text,
                      (int)strlen(text) + 1); /* or none is left */
    }
    nccl_close(); /* where it takes too long its thread goes on, see end_process */
    if (nccl.store) pg_store_close(nccl.store, LINGER);
    else pg_collectives_shm.shutdown();
    nccl.store = NULL;
}

/* The last thing that runs here: nothing of CUDA's and NCCL's own end.  A communicator that a peer
 * holds up, or one that is being aborted, has threads inside them still, and the two would meet in
 * memory that one has freed.  The kernel takes back what they would. */
static void end_process(int status, void *unused) {
    (void)unused;
    pg_shutdown();
    fflush(NULL);
    _exit(status);
}

/* ---- operations ---- */

static const ncclDataType_t types[PG_NDTYPES] = {
    [PG_F32] = ncclFloat32, [PG_F64] = ncclFloat64, [PG_BF16] = ncclBfloat16,
    [PG_F16] = ncclFloat16, [PG_I32] = ncclInt32,   [PG_I64] = ncclInt64,
    [PG_U8] = ncclUint8,    [PG_I16] = ncclFloat16, /* moved, never summed */
};
static const ncclRedOp_t reduces[] = {
    [PG_OP_SUM] = ncclSum, [PG_OP_MAX] = ncclMax, [PG_OP_MIN] = ncclMin};

static ncclResult_t issue(const shm_call *c, const nccl_lane *lane, const void *in, void *out) {
    size_t n = (size_t)c->count;
    ncclDataType_t type = types[c->dtype];
    ncclComm_t comm = lane->comm;
    cudaStream_t s = lane->stream;
    switch (c->kind) {
    case SHM_ALLREDUCE: return nccl.call.AllReduce(in, out, n, type, reduces[c->reduce], comm, s);
    case SHM_ALLGATHER: return nccl.call.AllGather(in, out, n, type, comm, s);
    case SHM_REDUCESCATTER:
        return nccl.call.ReduceScatter(in, out, n, type, reduces[c->reduce], comm, s);
    case SHM_BROADCAST: return nccl.call.Broadcast(in, out, n, type, c->root, comm, s);
    case SHM_SEND: return nccl.call.Send(in, n, type, c->root, comm, s);
    default: return nccl.call.Recv(out, n, type, c->root, comm, s);
    }
}

/* The communicators are non-blocking: what they were asked goes on in NCCL's threads, so
 * that nothing waits for a peer where neither the watchdog nor Ctrl-C could end it.
 * Locked; free during naps. */
int nccl_settle(nccl_group *g, nccl_lane *lane, ncclResult_t r, const char *op) {
    int64_t start = pg_page_clock();
    while (r == ncclInProgress) {
        char text[SHM_TEXT];
        int64_t waited = pg_page_clock() - start;
        pthread_mutex_unlock(&nccl.lock);
        if (waited < 200000) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        pthread_mutex_lock(&nccl.lock);
        PG_TRY(nccl_usable(g, op)); /* the watchdog may have broken it meanwhile */
        if (pg_interrupted()) {
            snprintf(text, sizeof text, "rank %d was interrupted in %s", nccl.rank, op);
            nccl_break(g, PG_ECANCEL, text);
            return pg_fail(PG_EINTR, "%s (%s): interrupted", op, g->name);
        }
        if ((double)waited * 1e-9 > nccl.limit) {
            snprintf(text, sizeof text,
                     "rank %d waited %.6g s for the other ranks to come to %s "
                     "(PGRUN_TIMEOUT)",
                     nccl.rank, nccl.limit, op);
            nccl_break(g, PG_ECOMM, text);
            return nccl_usable(g, op);
        }
        ncclResult_t asked = nccl.call.CommGetAsyncError(lane->comm, &r);
        if (asked != ncclSuccess) r = asked;
    }
    if (r == ncclSuccess) return PG_OK;
    nccl_error(op, g->name, r, lane->comm);
    char text[SHM_TEXT];
    snprintf(text, sizeof text, "%.900s", pg_errmsg());
    nccl_break(g, PG_ECOMM, text);
    return pg_fail(PG_ECOMM, "%s", text);
}

/* Locked. */
static nccl_op *new_op(nccl_group *g, nccl_lane *lane, shm_call call) {
    nccl_op *op = nccl.spare;
    if (op) nccl.spare = op->next;
    else if (!(op = calloc(1, sizeof *op))) {
        pg_fail(PG_ENOMEM, "%s: out of memory for its handle", shm_kind_names[call.kind]);
        return NULL;
    }
    if (!op->ready) op->ready = cuda_event_new();
    if (!op->done) op->done = cuda_event_new();
    if (!op->ready || !op->done) {
        op->next = nccl.spare;
        nccl.spare = op;
        return NULL;
    }
    *op = (nccl_op){.group = g, .lane = lane, .call = call, .ready = op->ready, .done = op->done};
    return op;
}

/* Locked: behind the work that the compute stream has now; the host goes on. */
static int launch(nccl_op *op, const void *in, void *out) {
    nccl_lane *lane = op->lane;
    const char *name = shm_kind_names[op->call.kind];
    PG_TRY(nccl_usable(op->group, name));
    nccl_sweep(lane);
    PG_TRY(cuda_check(name, cudaEventRecord(op->ready, cuda.stream)));
    PG_TRY(cuda_check(name, cudaStreamWaitEvent(lane->stream, op->ready, 0)));
    PG_TRY(nccl_settle(op->group, lane, issue(&op->call, lane, in, out), name));
    PG_TRY(cuda_check(name, cudaEventRecord(op->done, lane->stream)));
    if (lane->last) lane->last->next = op;
    else lane->first = op;
    lane->last = op;
    return PG_OK;
}

static int start(nccl_group *g, shm_call call, const void *in, void *out, void **ticket) {
    void *note;
    int up = call.kind == SHM_SEND ? call.root > g->rank : call.root < g->rank;
    int pair = call.kind == SHM_SEND || call.kind == SHM_RECV;
    nccl_lane *lane = &g->lanes[!pair ? LANE_ALL : up ? LANE_UP : LANE_DOWN];
    pthread_mutex_lock(&nccl.lock);
    int rc = nccl_usable(g, shm_kind_names[call.kind]);
    pthread_mutex_unlock(&nccl.lock);
    PG_TRY(rc);
    PG_TRY(nccl_compare(g, call, &note));
    pthread_mutex_lock(&nccl.lock);
    nccl_op *op = new_op(g, lane, call);
    rc = op ? launch(op, in, out) : PG_ENOMEM;
    if (rc == PG_OK) {
        op->note = note;
        *ticket = op;
    } else {
        if (op) nccl_recycle(op);
        if (note) { /* its peers cannot go on either */
            char text[SHM_TEXT];
            snprintf(text, sizeof text, "%.900s", pg_errmsg());
            nccl_break(g, PG_ECOMM, text);
            shm_wait(note);
            pg_fail(rc, "%s", text);
        }
    }
    pthread_mutex_unlock(&nccl.lock);
    return rc;
}

static int allreduce(void *g, void *data, int64_t n, int dtype, int op, void **ticket) {
    shm_call call = {.kind = SHM_ALLREDUCE, .count = n, .dtype = dtype, .reduce = op};
    return start(g, call, data, data, ticket);
}

static int allgather(void *g, void *out, const void *in, int64_t n_in, int dtype, void **ticket) {
    shm_call call = {.kind = SHM_ALLGATHER, .count = n_in, .dtype = dtype};
    return start(g, call, in, out, ticket);
}

static int reducescatter(void *g, void *out, const void *in, int64_t n_out, int dtype, int op,
                         void **ticket) {
    shm_call call = {.kind = SHM_REDUCESCATTER, .count = n_out, .dtype = dtype, .reduce = op};
    return start(g, call, in, out, ticket);
}

static int broadcast(void *g, void *data, int64_t n, int dtype, int root, void **ticket) {
    shm_call call = {.kind = SHM_BROADCAST, .count = n, .dtype = dtype, .root = root};
    return start(g, call, data, data, ticket);
}

static int send_to(void *g, const void *data, int64_t n, int dtype, int peer, void **ticket) {
    shm_call call = {.kind = SHM_SEND, .count = n, .dtype = dtype, .root = peer};
    return start(g, call, data, NULL, ticket);
}

static int recv_from(void *g, void *data, int64_t n, int dtype, int peer, void **ticket) {
    shm_call call = {.kind = SHM_RECV, .count = n, .dtype = dtype, .root = peer};
    return start(g, call, NULL, data, ticket);
}

/* The ranks' hosts meet; what their devices still do is not waited for. */
static int barrier(void *impl, void **ticket) {
    nccl_group *g = impl;
    *ticket = NULL;
    shm_call call = {.kind = SHM_BARRIER, .dtype = PG_U8};
    if (g->control) {
        pthread_mutex_lock(&nccl.lock);
        int rc = nccl_usable(g, "barrier");
        pthread_mutex_unlock(&nccl.lock);
        PG_TRY(rc);
        PG_TRY(shm_note(g->control, call, ticket));
        void *note = *ticket;
        *ticket = NULL;
        return shm_wait(note);
    }
    static void *word; /* 4 bytes for NCCL to add up */
    void *sum;
    if (!word && cudaMalloc(&word, 256) != cudaSuccess)
        return pg_fail(PG_ENOMEM, "barrier: no memory");
    PG_TRY(allreduce(g, word, 1, PG_I32, PG_OP_MAX, &sum));
    int rc = cuda_wait_event(((nccl_op *)sum)->done, "barrier");
    int code = pg_collectives_nccl.wait(sum);
    return rc < 0 ? rc : code;
}

/* ---- waiting ---- */

static int broken_code(const nccl_op *op) {
    nccl.noticed = 1;
    return pg_fail(op->code, "%s (%s): %s", shm_kind_names[op->call.kind], op->group->name,
                   op->group->text);
}

static int done(void *ticket) {
    nccl_op *op = ticket;
    if (!op) return 1;
    pthread_mutex_lock(&nccl.lock);
    nccl_sweep(op->lane);
    int code = op->code < 0 ? broken_code(op) : op->finished;
    pthread_mutex_unlock(&nccl.lock);
    return code;
}

/* The compute stream waits, the host does not: numbers that never come are
 * told by the next read. */
static int wait(void *ticket) {
    nccl_op *op = ticket;
    int code = PG_OK;
    if (!op) return PG_OK;
    pthread_mutex_lock(&nccl.lock);
    if (op->code < 0) code = broken_code(op);
    else code = cuda_check("wait", cudaStreamWaitEvent(cuda.stream, op->done, 0));
    op->waited = 1;
    if (op->finished) nccl_recycle(op); /* else the sweep does it */
    pthread_mutex_unlock(&nccl.lock);
    return code;
}

/* As a wait, but it stays its caller's.  What is only read is left alone: a message may go on its
 * way while its sender computes, and whether the peer comes for it is not ours to wait for. */
static void drop(void *ticket) {
    nccl_op *op = ticket;
    pthread_mutex_lock(&nccl.lock);
    if (op->code == PG_OK && op->call.kind != SHM_SEND)
        (void)cudaStreamWaitEvent(cuda.stream, op->done, 0);
    pthread_mutex_unlock(&nccl.lock);
}

const pg_collective_ops pg_collectives_nccl = {
    .world = world,
    .split = nccl_split,
    .free = nccl_free,
    .allreduce = allreduce,
    .allgather = allgather,
    .reducescatter = reducescatter,
    .broadcast = broadcast,
    .send = send_to,
    .recv = recv_from,
    .barrier = barrier,
    .drop = drop,
    .done = done,
    .wait = wait,
    .timeout = timeout,
    .cancel = nccl_cancel,
    .reform = nccl_reform,
    .shutdown = leave_world,
};
