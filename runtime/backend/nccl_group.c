/* nccl_group.c: groups: making their communicators, freeing, cancelling, starting afresh, ending.
 *
 * Only the listed ranks of a group call split, so each group is made from an id of its own, which
 * its first rank hands round (ncclCommSplit would need all ranks of the parent).  A freed group
 * keeps its communicators until the process ends: ranks free at different times, whenever Lua
 * collects, and a communicator must not go while a peer still reads from its buffers. */
#define _GNU_SOURCE /* pthread_timedjoin_np */
#include "../base/system.h"
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Most blocks of a kernel of NCCL in each lane, so that communicators which run side by side all
 * fit and leave multiprocessors to compute with.  NCCL_MAX_CTAS says otherwise. */
static const int most_blocks[LANES] = {16, 8, 8};

#define CLOSE_SECONDS 5            /* at most, for the end of all communicators */
#define FINISH_NS     3000000000ll /* of it, for those that end well */

static uint64_t hash_of(const int *members, int size, const char *name) {
    return pg_hash(members, (int64_t)size * (int64_t)sizeof *members,
                   pg_hash(name, (int64_t)strlen(name), 1));
}

static void drop(nccl_group *g) {
    for (int i = 0; i < LANES; i++)
        if (g->lanes[i].stream) (void)cudaStreamDestroy(g->lanes[i].stream);
    free(g->members);
    free(g);
}

int nccl_group_new(nccl_group **out, shm_group *control, const int *members, int size, int rank,
                   const char *name) {
    nccl_group *g = calloc(1, sizeof *g);
    int least, most, rc = PG_OK, twins = 0;
    if (g) g->members = calloc((size_t)size, sizeof *g->members);
    if (!g || !g->members) {
        free(g);
        return pg_fail(PG_ENOMEM, "comm_split %s: out of memory", name);
    }
    memcpy(g->members, members, (size_t)size * sizeof *members);
    pg_page_write(g->name, sizeof g->name, name);
    g->control = control;
    g->rank = rank;
    g->size = size;
    PG_TRY_TO(done, rc, cuda_check("comm_split", cudaDeviceGetStreamPriorityRange(&least, &most)));
    for (int i = 0; i < LANES; i++)
        PG_TRY_TO(done, rc,
                  cuda_check("comm_split", cudaStreamCreateWithPriority(
                                               &g->lanes[i].stream, cudaStreamNonBlocking, most)));
    uint64_t hash = hash_of(members, size, g->name);
    pthread_mutex_lock(&nccl.lock);
    for (nccl_group *other = nccl.groups; other; other = other->next)
        twins += hash_of(other->members, other->size, other->name) == hash;
    snprintf(g->key, sizeof g->key, "%.32s-%016llx-%d", g->name, (unsigned long long)hash, twins);
    g->next = nccl.groups;
    nccl.groups = g;
    pthread_mutex_unlock(&nccl.lock);
    *out = g;
done:
    if (rc < 0) drop(g);
    return rc;
}

/* ---- making communicators ---- */

typedef struct {
    ncclUniqueId lanes[LANES];
} ids;

static int hand_round(nccl_group *g, ids *all) {
    char key[PG_STORE_KEY];
    void *ticket;
    if (g->control) {
        PG_TRY(pg_collectives_shm.broadcast(g->control, all, sizeof *all, PG_U8, 0, &ticket));
        return pg_collectives_shm.wait(ticket);
    }
    snprintf(key, sizeof key, "id/%s/%d", g->key, g->round);
    if (g->rank == 0) return pg_store_set(nccl.store, key, all, sizeof *all);
    return pg_store_get(nccl.store, key, all, sizeof *all, nccl.limit);
}

static ncclResult_t begin(nccl_group *g, int lane, ncclUniqueId id, ncclComm_t *comm) {
    const char *most = getenv("NCCL_MAX_CTAS");
    ncclConfig_t c = NCCL_CONFIG_INITIALIZER;
    c.blocking = 0; /* see nccl_settle; NCCL_COMM_BLOCKING=1 overrules it */
    if (!most || !*most) c.maxCTAs = most_blocks[lane];
    return nccl.call.CommInitRankConfig(comm, g->size, id, g->rank, &c);
}

/* All lanes begin before the first is waited for: NCCL makes them side by side.  Unlocked, since
 * it may wait for peers. */
int nccl_connect(nccl_group *g) {
    ids all;
    ncclResult_t r[LANES];
    memset(&all, 0, sizeof all);
    for (int i = 0; g->rank == 0 && i < LANES; i++) {
        ncclResult_t made = nccl.call.GetUniqueId(&all.lanes[i]);
        if (made != ncclSuccess) return nccl_error("comm_split", g->name, made, NULL);
    }
    PG_TRY(hand_round(g, &all));
    ncclComm_t comms[LANES] = {NULL};
    for (int i = 0; i < LANES; i++) r[i] = begin(g, i, all.lanes[i], &comms[i]);
    pthread_mutex_lock(&nccl.lock);
    for (int i = 0; i < LANES; i++) g->lanes[i].comm = comms[i];
    int rc = g->code ? nccl_usable(g, "comm_split") : PG_OK; /* broken meanwhile */
    for (int i = 0; rc == PG_OK && i < LANES; i++)
        rc = nccl_settle(g, &g->lanes[i], r[i], "comm_split");
    pthread_mutex_unlock(&nccl.lock);
    return rc;
}

int nccl_split(void **impl, void *parent, const int32_t *ranks, int n, const char *name) {
    nccl_group *of = parent, *g = NULL;
    void *control = NULL;
    int rank = 0, rc;
    pthread_mutex_lock(&nccl.lock);
    rc = nccl_usable(of, "comm_split");
    pthread_mutex_unlock(&nccl.lock);
    PG_TRY(rc);
    if (of->control) PG_TRY(shm_split(&control, of->control, ranks, n, name));
    int *members = calloc((size_t)n, sizeof *members);
    if (!members) {
        shm_free(control);
        return pg_fail(PG_ENOMEM, "comm_split %s: out of memory", name);
    }
    for (int i = 0; i < n; i++) {
        members[i] = of->members[ranks[i]];
        if (ranks[i] == of->rank) rank = i;
    }
    rc = nccl_group_new(&g, control, members, n, rank, name);
    free(members);
    if (rc == PG_OK) rc = nccl_connect(g);
    if (rc == PG_OK) *impl = g;
    else if (g) nccl_free(g);
    else shm_free(control); /* NULL does nothing */
    return rc;
}

/* ---- freeing, cancelling, reforming ---- */

void nccl_free(void *impl) {
    nccl_group *g = impl;
    int busy = 0;
    if (!g) return;
    pthread_mutex_lock(&nccl.lock);
    for (int i = 0; i < LANES; i++) {
        nccl_sweep(&g->lanes[i]);
        busy += g->lanes[i].first != NULL;
    }
    if (busy) nccl_break(g, PG_ECANCEL, "the group was freed");
    g->freed = 1;
    shm_group *control = g->control;
    g->control = NULL;
    if (!g->code) {
        g->code = PG_ECANCEL;
        snprintf(g->text, sizeof g->text, "the group was freed");
    }
    pthread_mutex_unlock(&nccl.lock);
    if (control) shm_free(control);
}

int nccl_cancel(void *impl, const char *reason) {
    nccl_group *g = impl;
    char key[PG_STORE_KEY], text[SHM_TEXT];
    snprintf(text, sizeof text, "cancelled by rank %d: %.900s", nccl.rank, reason ? reason : "");
    if (g->control) PG_TRY(shm_cancel(g->control, reason));
    snprintf(key, sizeof key, "cancel/%s/%d", g->key, g->round);
    if (nccl.store) PG_TRY(pg_store_set(nccl.store, key, text, sizeof text));
    pthread_mutex_lock(&nccl.lock);
    nccl_break(g, PG_ECANCEL, text);
    pthread_mutex_unlock(&nccl.lock);
    return PG_OK;
}

/* What was aborted must have left the device before its streams are used again. */
static int wait_for_aborts(nccl_group *g) {
    int64_t start = pg_page_clock();
    for (int busy = 1; busy;) {
        pthread_mutex_lock(&nccl.lock);
        busy = nccl.aborting;
        pthread_mutex_unlock(&nccl.lock);
        PG_POLL();
        if ((double)(pg_page_clock() - start) * 1e-9 > nccl.limit)
            return pg_fail(PG_ECOMM, "comm_reform (%s): NCCL did not end what was under way",
                           g->name);
        if (busy) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    for (int i = 0; i < LANES; i++) PG_TRY(cuda_wait_stream(g->lanes[i].stream, "comm_reform"));
    return PG_OK;
}

int nccl_reform(void *impl) {
    nccl_group *g = impl;
    pthread_mutex_lock(&nccl.lock);
    nccl_break(g, PG_ECANCEL, "the group was reformed");
    pthread_mutex_unlock(&nccl.lock);
    PG_TRY(wait_for_aborts(g));
    if (g->control) PG_TRY(shm_reform(g->control));
    pthread_mutex_lock(&nccl.lock);
    g->code = PG_OK;
    g->round++;
    g->calls = 0;
    if (nccl.broken == g) nccl.broken = NULL;
    pthread_mutex_unlock(&nccl.lock);
    return nccl_connect(g);
}

/* ---- the end ---- */

#define EACH_LANE(g, lane)                                                                         \
    for (nccl_group *g = nccl.groups; g; g = g->next)                                              \
        for (nccl_lane *lane = g->lanes; lane < g->lanes + LANES; lane++)

/* Peers may still read what this rank has sent, so a communicator with nothing under way is
 * finished before it goes; one that is broken or busy could only wait in vain.  Locked. */
static int is_clean(const nccl_group *g, nccl_lane *lane) {
    nccl_sweep(lane);
    return !lane->first && (!g->code || g->freed) && !pg_page_mine()->failure[0];
}

static int is_finishing(const nccl_lane *lane) {
    ncclResult_t r = ncclSuccess;
    return lane->closing && nccl.call.CommGetAsyncError(lane->closing, &r) == ncclSuccess &&
           r == ncclInProgress;
}

static void nap(int64_t ns) { nanosleep(&(struct timespec){.tv_nsec = ns}, NULL); }

/* Takes the communicators from their lanes, so that whoever comes later finds none.  Those that can
 * end well all begin to, so that one which a peer holds up does not keep the others waiting;
 * the rest are aborted. */
static void begin_closing(void) {
    pthread_mutex_lock(&nccl.lock);
    EACH_LANE(g, lane) {
        ncclComm_t comm = lane->comm;
        int clean = comm && is_clean(g, lane);
        if (!lane->comm) continue; /* never made, or the sweep broke the group */
        lane->comm = NULL;
        if (clean && nccl.call.CommFinalize(comm) <= ncclInProgress) lane->closing = comm;
        else nccl_abort(comm);
    }
    pthread_mutex_unlock(&nccl.lock);
}

static void *close_all(void *unused) {
    (void)cudaSetDevice(cuda.number);
    begin_closing();
    int64_t start = pg_page_clock();
    for (int busy = 1; busy && pg_page_clock() - start < FINISH_NS; busy ? nap(200000) : (void)0) {
        busy = 0;
        EACH_LANE(g, lane) busy |= is_finishing(lane);
    }
    EACH_LANE(g, lane) {
        ncclComm_t comm = lane->closing;
        ncclResult_t r;
        if (!comm) continue;
        int ended = nccl.call.CommGetAsyncError(comm, &r) == ncclSuccess && r == ncclSuccess;
        lane->closing = NULL;
        if (ended) nccl.call.CommDestroy(comm);
        else nccl.call.CommAbort(comm);
    }
    for (int busy = 1; busy; busy ? nap(200000) : (void)0) { /* threads that abort */
        pthread_mutex_lock(&nccl.lock);
        busy = nccl.aborting;
        pthread_mutex_unlock(&nccl.lock);
    }
    return unused;
}

/* In a thread, since NCCL's own end can hang with its peer; the process ends all the same. */
void nccl_close(void) {
    pthread_t thread;
    struct timespec until;
    pthread_mutex_lock(&nccl.lock);
    for (nccl_group *g = nccl.groups; g; g = g->next)
        g->control = NULL; /* leaves in one with shm */
    pthread_mutex_unlock(&nccl.lock);
    if (pg_thread_start(&thread, close_all, NULL)) return;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CLOSE_SECONDS;
    if (pthread_timedjoin_np(thread, NULL, &until)) pthread_detach(thread);
}
