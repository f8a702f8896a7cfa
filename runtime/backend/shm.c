/* shm.c: collectives between the CPU ranks of one host: the table of
 * backend.h, joining, leaving. */
#include "shm.h"
#include "ranks.h"

#include <limits.h>
#include <stdlib.h>

shm_world shm;

static void timeout(double seconds) {
    if (!(seconds > 0)) return; /* NaN too */
    shm_lock();
    shm.limit = seconds > 9e9 ? INT64_MAX / 2 : (int64_t)(seconds * 1e9);
    shm_unlock();
}

/* Through the launcher's file descriptor, or handed round by rank 0. */
static int join_block(const pg_ranks *r, double limit, void **map, int *fd) {
    pg_page_mine();
    if ((*map = pg_page_map(fd))) return PG_OK;
    const char *text = getenv("PG_SHM_FD");
    if (text && *text) {
        char *end;
        long n = strtol(text, &end, 10);
        if (*end || n < 0 || n > INT_MAX)
            return pg_fail(PG_EINVAL, "PG_SHM_FD=%s; it is set by pgrun's launcher alone", text);
        *fd = (int)n;
    } else {
        PG_TRY(shm_join_by_socket(fd, r->host, r->port, r->job, r->rank, r->size, limit));
    }
    PG_TRY(pg_page_open(*fd, r->local_rank));
    *map = pg_page_map(fd);
    return PG_OK;
}

static int enter(void *map, int fd, int rank, int size) {
    int members[PG_SHM_RANKS];
    for (int i = 0; i < size; i++) members[i] = i;
    PG_TRY(shm_group_new(&shm.world, members, size, rank, "world"));
    shm.control = map;
    shm.fd = fd;
    shm.rank = rank;
    shm.active.next = shm.active.before = &shm.active;
    shm.world->slot = 0;
    int code = shm_region_map(&shm.world->region, 0);
    if (code < 0) {
        shm_group_drop(shm.world);
        shm.world = NULL;
        shm.control = NULL;
        return code;
    }
    shm.groups = shm.world;
    return PG_OK;
}

static int world(void **impl, int *rank, int *size) {
    pg_ranks r;
    double limit;
    void *map;
    int fd;
    PG_TRY(pg_ranks_read(&r));
    *impl = NULL;
    *rank = r.rank;
    *size = r.size;
    if (r.size == 1) return PG_OK;
    PG_TRY(pg_ranks_timeout(&limit));
    if (r.local_size != r.size || r.local_rank != r.rank)
        return pg_fail(PG_EINVAL,
                       "ranks: %d of %d ranks are on this host (%s); the cpu backend joins "
                       "the ranks of one host, several hosts need cuda",
                       r.local_size, r.size, r.source);
    if (!shm.control) {
        PG_TRY(join_block(&r, limit, &map, &fd));
        if (pg_page_ranks(map) != r.size)
            return pg_fail(PG_ECOMM, "ranks: %s says %d ranks, the shared block has %d", r.source,
                           r.size, pg_page_ranks(map));
        if (pg_page_mine()->state == PG_PAGE_LEFT)
            return pg_fail(PG_ECOMM, "ranks: rank %d has left its world; start a new process",
                           r.rank);
        PG_TRY(enter(map, fd, r.rank, r.size));
        timeout(limit);
    }
    *impl = shm.world;
    return PG_OK;
}

/* Memory that others may still read stays in the file until they have left too.  The groups'
 * records stay for the handles that point at them. */
static void leave_world(void) {
    if (!shm.control) return;
    shm_stop();
    shm_control *c = shm.control;
    atomic_store(&c->pages[shm.rank].state, PG_PAGE_LEFT);
    shm_wake_all(c);
    shm_lock();
    for (shm_group *g = shm.groups; g; g = g->next) {
        shm_region_unmap(g->region, g->size);
        g->region = NULL;
    }
    shm.control = NULL;
    shm_unlock();
}

/* The core has checked counts, dtypes and ranks; only the world may be gone. */
static int check(const shm_group *g, const char *op) {
    return g->region ? PG_OK
                     : pg_fail(PG_ECOMM, "%s (%s): this rank has left its world", op, g->name);
}

static int allreduce(void *impl, void *data, int64_t n, int dtype, int op, void **ticket) {
    PG_TRY(check(impl, "allreduce"));
    shm_call call = {.kind = SHM_ALLREDUCE, .count = n, .dtype = dtype, .reduce = op};
    return shm_collective(impl, call, data, data, ticket);
}

static int allgather(void *impl, void *out, const void *in, int64_t n_in, int dtype,
                     void **ticket) {
    PG_TRY(check(impl, "allgather"));
    shm_call call = {.kind = SHM_ALLGATHER, .count = n_in, .dtype = dtype};
    return shm_collective(impl, call, in, out, ticket);
}

static int reducescatter(void *impl, void *out, const void *in, int64_t n_out, int dtype, int op,
                         void **ticket) {
    PG_TRY(check(impl, "reducescatter"));
    shm_call call = {.kind = SHM_REDUCESCATTER, .count = n_out, .dtype = dtype, .reduce = op};
    return shm_collective(impl, call, in, out, ticket);
}

static int broadcast(void *impl, void *data, int64_t n, int dtype, int root, void **ticket) {
    PG_TRY(check(impl, "broadcast"));
    shm_call call = {.kind = SHM_BROADCAST, .count = n, .dtype = dtype, .root = root};
    return shm_collective(impl, call, data, data, ticket);
}

static int barrier(void *impl, void **ticket) {
    PG_TRY(check(impl, "barrier"));
    return shm_collective(impl, (shm_call){.kind = SHM_BARRIER, .dtype = PG_U8}, NULL, NULL,
                          ticket);
}

static int send_to(void *impl, const void *data, int64_t n, int dtype, int peer, void **ticket) {
    PG_TRY(check(impl, "send"));
    shm_call call = {.kind = SHM_SEND, .count = n, .dtype = dtype, .root = peer};
    return shm_pair(impl, call, data, NULL, ticket);
}

static int recv_from(void *impl, void *data, int64_t n, int dtype, int peer, void **ticket) {
    PG_TRY(check(impl, "recv"));
    shm_call call = {.kind = SHM_RECV, .count = n, .dtype = dtype, .root = peer};
    return shm_pair(impl, call, NULL, data, ticket);
}

const pg_collective_ops pg_collectives_shm = {
    .world = world,
    .split = shm_split,
    .free = shm_free,
    .allreduce = allreduce,
    .allgather = allgather,
    .reducescatter = reducescatter,
    .broadcast = broadcast,
    .send = send_to,
    .recv = recv_from,
    .barrier = barrier,
    .detach = shm_detach,
    .done = shm_done,
    .wait = shm_wait,
    .timeout = timeout,
    .cancel = shm_cancel,
    .reform = shm_reform,
    .shutdown = leave_world,
};
