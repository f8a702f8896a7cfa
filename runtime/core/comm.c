/* comm.c: ranks, groups and collectives: what pg.h promises, checked, then the backend's table.
 *
 * A group of one has no backend part: its collectives are copies or nothing.  An asynchronous call
 * keeps a view of each tensor, so that their storage outlives the operation whatever Lua frees. */
#include "../backend/page.h"
#include "../backend/ranks.h"
#include "../base/capture.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

struct pg_comm {
    const pg_collective_ops *ops; /* NULL with impl */
    void *impl;                   /* the backend's group; NULL: a group of one */
    int rank, size;
    char name[48];
};

struct pg_work {
    const pg_collective_ops *ops;
    void *ticket; /* NULL: it was done at once */
    pg_tensor *held[2];
    pg_work *next; /* among the dropped */
};

/* The process's ranks; joined once. */
static struct {
    int joined;
    double limit; /* of pg_comm_timeout; 0: not called */
    pg_comm comm;
    pg_work *dropped; /* that nobody waits for; perhaps still under way */
} world;

int pg_comm_init(void) {
    if (world.joined) return PG_OK;
    PG_POLL();
    const pg_backend *b = pg_backend_device();
    if (!b) return PG_EDEVICE;
    pg_comm *c = &world.comm;
    *c = (pg_comm){.size = 1, .name = "world"};
    if (b->collectives) {
        PG_TRY(b->collectives->world(&c->impl, &c->rank, &c->size));
        if (c->impl) c->ops = b->collectives;
        if (world.limit > 0) b->collectives->timeout(world.limit);
    }
    world.joined = 1;
    return PG_OK;
}

pg_comm *pg_comm_world(void) { return pg_comm_init() < 0 ? NULL : &world.comm; }
int pg_comm_rank(const pg_comm *c) { return c ? c->rank : -1; }
int pg_comm_size(const pg_comm *c) { return c ? c->size : 0; }

static int check_comm(const char *op, const pg_comm *c) {
    return c ? PG_OK : pg_fail(PG_EINVAL, "%s: the group is missing (NULL)", op);
}

static int check_list(const pg_comm *parent, const int32_t *ranks, int n, int *rank) {
    *rank = -1;
    if (!ranks || n < 1 || n > parent->size)
        return pg_fail(PG_EINVAL, "comm_split: %d ranks out of group %s, which has %d", n,
                       parent->name, parent->size);
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= parent->size)
            return pg_fail(PG_EINVAL, "comm_split: rank %d; group %s has ranks 0 to %d", ranks[i],
                           parent->name, parent->size - 1);
        for (int j = 0; j < i; j++)
            if (ranks[i] == ranks[j])
                return pg_fail(PG_EINVAL, "comm_split: rank %d is listed twice", ranks[i]);
        if (ranks[i] == parent->rank) *rank = i;
    }
    if (*rank < 0)
        return pg_fail(PG_EINVAL,
                       "comm_split: rank %d is not in its list; only listed ranks call it",
                       parent->rank);
    return PG_OK;
}

int pg_comm_split(pg_comm **out, pg_comm *parent, const int32_t *ranks, int n, const char *name) {
    int rank, code = PG_OK;
    PG_POLL();
    if (!out || !name) return pg_fail(PG_EINVAL, "comm_split: no name or no place for the group");
    *out = NULL;
    PG_TRY(check_comm("comm_split", parent));
    PG_TRY(check_list(parent, ranks, n, &rank));
    pg_comm *c = calloc(1, sizeof *c);
    if (!c) return pg_fail(PG_ENOMEM, "comm_split %s: out of memory", name);
    c->rank = rank;
    c->size = n;
    pg_page_write(c->name, sizeof c->name, name);
    if (n > 1) {
        c->ops = parent->ops;
        code = c->ops->split(&c->impl, parent->impl, ranks, n, c->name);
    }
    if (code < 0) free(c);
    else *out = c;
    return code;
}

void pg_comm_free(pg_comm *c) {
    if (!c || c == &world.comm) return;
    if (c->impl) c->ops->free(c->impl);
    free(c);
}

/* ---- works ---- */
static int hold(pg_tensor **held, const pg_tensor *t) {
    PG_TRY(pg_tensor_view(held, (pg_tensor *)t, 0, 1, &t->count));
    t->storage->works++;
    return PG_OK;
}

static void drop_work(pg_work *w) {
    for (int i = 0; i < 2 && w->held[i]; i++) {
        w->held[i]->storage->works--;
        pg_tensor_free(w->held[i]);
    }
    free(w);
}

/* Finalizers run at any time, also between an error and the reading of its text; so the dropped are
 * only listed there, and freed when the next asynchronous call or pg_storage_drop begins and finds
 * them done: until then their tensors' blocks are no one else's.  An error of theirs is told by the
 * next call of the broken group. */
void pg_work_drop(pg_work *w) {
    if (!w) return;
    if (w->ticket && w->ops->drop) w->ops->drop(w->ticket);
    w->next = world.dropped;
    world.dropped = w;
}

void pg_works_sweep(void) {
    for (pg_work **at = &world.dropped; *at;) {
        pg_work *w = *at;
        if (pg_work_done(w) == 0) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        pg_work_wait(w);
    }
}

/* A collective goes to a stream of its ranks' group, and its call is compared on the host. */
static int outside_graph(const pg_comm *c, const char *op) {
    if (!c->impl) return PG_OK;
    return pg_capture_bars(op, "ranks compare their calls on the host, each time; call it outside");
}

/* Where the caller wants it later, a work that holds out and in; else *w stays NULL. */
static int begin(pg_work **w, pg_work **work, const pg_comm *c, const char *op,
                 const pg_tensor *out, const pg_tensor *in) {
    *w = NULL;
    PG_TRY(outside_graph(c, op));
    if (!work) return PG_OK;
    *work = NULL;
    pg_works_sweep();
    if (!(*w = calloc(1, sizeof **w))) return pg_fail(PG_ENOMEM, "%s: out of memory", op);
    int code = hold(&(*w)->held[0], out);
    if (code >= 0 && in) code = hold(&(*w)->held[1], in);
    if (code < 0) drop_work(*w);
    return code < 0 ? code : PG_OK;
}

/* The call was issued with this code and ticket: wait for it here, or hand the work out. */
static int finish(const pg_comm *c, pg_work *w, pg_work **work, int code, void *ticket) {
    if (code < 0) {
        if (w) drop_work(w);
        return code;
    }
    if (!w) return ticket ? c->ops->wait(ticket) : PG_OK;
    w->ops = c->ops;
    w->ticket = ticket;
    if (ticket && c->ops->detach) c->ops->detach(ticket);
    *work = w;
    return PG_OK;
}

int pg_work_wait(pg_work *w) {
    if (!w) return pg_fail(PG_EINVAL, "work: it is missing (NULL); wait once only");
    if (w->ticket) PG_TRY(pg_capture_bars("work", "it began outside; wait for it before"));
    int code = w->ticket ? w->ops->wait(w->ticket) : PG_OK;
    drop_work(w);
    return code;
}

int pg_work_done(pg_work *w) {
    if (!w) return pg_fail(PG_EINVAL, "work: it is missing (NULL); ask before the wait");
    return w->ticket ? w->ops->done(w->ticket) : 1;
}

/* ---- collectives ---- */
static int check_tensor(const char *op, const pg_tensor *t) {
    if (!t) return pg_fail(PG_EINVAL, "%s: a tensor is missing (NULL)", op);
    return pg_tensor_usable(t, op);
}

static int check_sum(const char *op, const pg_tensor *t, int reduce) {
    if (t->dtype == PG_U8 || t->dtype == PG_I16)
        return pg_fail(PG_EINVAL, "%s: %s is not summed over ranks; use i32", op,
                       pg_dtype_name(t->dtype));
    if (reduce < PG_OP_SUM || reduce > PG_OP_MIN)
        return pg_fail(PG_EINVAL, "%s: reduce op %d; 0 is sum, 1 max, 2 min", op, reduce);
    return PG_OK;
}

static int check_rank(const char *op, const pg_comm *c, const char *role, int rank) {
    if (rank >= 0 && rank < c->size) return PG_OK;
    return pg_fail(PG_EINVAL, "%s (%s): %s %d; the group has ranks 0 to %d", op, c->name, role,
                   rank, c->size - 1);
}

/* whole holds a part of each rank. */
static int check_parts(const char *op, const pg_comm *c, const pg_tensor *whole,
                       const pg_tensor *part) {
    if (whole->dtype == part->dtype && whole->count == part->count * c->size) return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "%s (%s): %s for %d ranks and %s for one; dtypes must be equal and the "
                   "counts %d to 1",
                   op, c->name, pg_shape_text(whole), c->size, pg_shape_text(part), c->size);
}

/* 1: nobody to talk to, or shapes alone; what is left is to copy in to out (where they differ). */
static int is_local(const pg_comm *c) { return !c->impl || !pg_backend_now()->kernels; }

static int copy_local(pg_tensor *out, const pg_tensor *in) {
    const pg_backend *b = pg_backend_now();
    int64_t bytes = out->count * pg_dtype_size(out->dtype);
    if (!b->kernels || !bytes || pg_tensor_at(out) == pg_tensor_at(in)) return PG_OK;
    return b->memory->copy(pg_tensor_at(out), pg_tensor_at(in), bytes, b->stream);
}

int pg_allreduce(pg_comm *c, pg_tensor *t, int op, pg_work **work) {
    pg_work *w;
    void *ticket = NULL;
    int code = PG_OK;
    PG_POLL();
    PG_TRY(check_comm("allreduce", c));
    PG_TRY(check_tensor("allreduce", t));
    PG_TRY(check_sum("allreduce", t, op));
    PG_TRY(begin(&w, work, c, "allreduce", t, NULL));
    if (!is_local(c))
        code = c->ops->allreduce(c->impl, pg_tensor_at(t), t->count, t->dtype, op, &ticket);
    return finish(c, w, work, code, ticket);
}

int pg_allgather(pg_comm *c, pg_tensor *out, const pg_tensor *in, pg_work **work) {
    pg_work *w;
    void *ticket = NULL;
    PG_POLL();
    PG_TRY(check_comm("allgather", c));
    PG_TRY(check_tensor("allgather", out));
    PG_TRY(check_tensor("allgather", in));
    PG_TRY(check_parts("allgather", c, out, in));
    PG_TRY(begin(&w, work, c, "allgather", out, in));
    int code = is_local(c) ? copy_local(out, in)
                           : c->ops->allgather(c->impl, pg_tensor_at(out), pg_tensor_at(in),
                                               in->count, in->dtype, &ticket);
    return finish(c, w, work, code, ticket);
}

int pg_reducescatter(pg_comm *c, pg_tensor *out, const pg_tensor *in, int op, pg_work **work) {
    pg_work *w;
    void *ticket = NULL;
    PG_POLL();
    PG_TRY(check_comm("reducescatter", c));
    PG_TRY(check_tensor("reducescatter", out));
    PG_TRY(check_tensor("reducescatter", in));
    PG_TRY(check_sum("reducescatter", in, op));
    PG_TRY(check_parts("reducescatter", c, in, out));
    PG_TRY(begin(&w, work, c, "reducescatter", out, in));
    int code = is_local(c) ? (c->size == 1 ? copy_local(out, in) : PG_OK)
                           : c->ops->reducescatter(c->impl, pg_tensor_at(out), pg_tensor_at(in),
                                                   out->count, out->dtype, op, &ticket);
    return finish(c, w, work, code, ticket);
}

int pg_broadcast(pg_comm *c, pg_tensor *t, int root, pg_work **work) {
    pg_work *w;
    void *ticket = NULL;
    int code = PG_OK;
    PG_POLL();
    PG_TRY(check_comm("broadcast", c));
    PG_TRY(check_tensor("broadcast", t));
    PG_TRY(check_rank("broadcast", c, "root", root));
    PG_TRY(begin(&w, work, c, "broadcast", t, NULL));
    if (!is_local(c))
        code = c->ops->broadcast(c->impl, pg_tensor_at(t), t->count, t->dtype, root, &ticket);
    return finish(c, w, work, code, ticket);
}

static int check_peer(const char *op, const pg_comm *c, int peer) {
    PG_TRY(check_rank(op, c, "peer", peer));
    if (peer != c->rank) return PG_OK;
    return pg_fail(PG_EINVAL, "%s (%s): peer %d is this rank itself; copy instead", op, c->name,
                   peer);
}

int pg_send(pg_comm *c, const pg_tensor *t, int peer, pg_work **work) {
    pg_work *w;
    void *ticket = NULL;
    int code = PG_OK;
    PG_POLL();
    PG_TRY(check_comm("send", c));
    PG_TRY(check_tensor("send", t));
    PG_TRY(check_peer("send", c, peer));
    PG_TRY(begin(&w, work, c, "send", t, NULL));
    if (!is_local(c))
        code = c->ops->send(c->impl, pg_tensor_at(t), t->count, t->dtype, peer, &ticket);
    return finish(c, w, work, code, ticket);
}

int pg_recv(pg_comm *c, pg_tensor *t, int peer, pg_work **work) {
    pg_work *w;
    void *ticket = NULL;
    int code = PG_OK;
    PG_POLL();
    PG_TRY(check_comm("recv", c));
    PG_TRY(check_tensor("recv", t));
    PG_TRY(check_peer("recv", c, peer));
    PG_TRY(begin(&w, work, c, "recv", t, NULL));
    if (!is_local(c))
        code = c->ops->recv(c->impl, pg_tensor_at(t), t->count, t->dtype, peer, &ticket);
    return finish(c, w, work, code, ticket);
}

int pg_barrier(pg_comm *c) {
    void *ticket = NULL;
    PG_POLL();
    PG_TRY(check_comm("barrier", c));
    if (is_local(c)) return PG_OK;
    PG_TRY(outside_graph(c, "barrier"));
    PG_TRY(c->ops->barrier(c->impl, &ticket));
    return c->ops->wait(ticket);
}

double pg_comm_timeout(double seconds) {
    double before = world.limit;
    if (!(before > 0)) pg_ranks_timeout(&before); /* what is wrong with it, joining tells */
    if (!(seconds > 0)) return before;
    world.limit = seconds;
    if (world.comm.ops) world.comm.ops->timeout(seconds);
    return before;
}

int pg_comm_cancel(pg_comm *c, const char *reason) {
    PG_TRY(check_comm("comm_cancel", c));
    return c->impl ? c->ops->cancel(c->impl, reason ? reason : "") : PG_OK;
}

int pg_comm_reform(pg_comm *c) {
    PG_TRY(check_comm("comm_reform", c));
    return c->impl ? c->ops->reform(c->impl) : PG_OK;
}

/* ---- the status page ---- */
void pg_status_step(int64_t step) { atomic_store(&pg_page_mine()->step, step); }

void pg_status_where(const char *file_line) {
    pg_page *p = pg_page_mine();
    pg_page_write(p->where, sizeof p->where, file_line);
}

void pg_status_fail(const char *message) {
    pg_page *p = pg_page_mine();
    if (!atomic_load(&p->failed_at)) atomic_store(&p->failed_at, pg_page_clock());
    pg_page_write(p->failure, sizeof p->failure, message);
}
