/* shm_pair.c: send and recv: a ring of bytes for each ordered pair of a group's ranks.
 *
 * A message is its shm_call, then its data.  The sender needs no receiver until the ring is full;
 * a longer message flows on as the receiver takes, in pieces, so that both
 * copy at the same time. */
#include "shm.h"

#include <stdio.h>
#include <string.h>

#define PIECE (128 << 10) /* bytes a step: the receiver may start on them */
#define HEAD  ((int64_t)sizeof(shm_call))

static int is_send(const shm_op *op) { return op->call.kind == SHM_SEND; }
static int64_t all_bytes(const shm_op *op) {
    return op->call.bare ? 0 : op->call.count * pg_dtype_size(op->call.dtype);
}

static shm_pipe *pipe_of(const shm_op *op) {
    int me = op->group->rank, peer = op->call.root;
    return is_send(op) ? shm_pipe_of(op->group, me, peer) : shm_pipe_of(op->group, peer, me);
}

/* Bytes this side may move now; too few for a whole shm_call count as none. */
static int64_t ready_bytes(const shm_op *op) {
    shm_pipe *p = pipe_of(op);
    int64_t held = (int64_t)(atomic_load(&p->head) - atomic_load(&p->tail));
    int64_t ready = is_send(op) ? SHM_PIPE_BYTES - held : held;
    return op->step == 0 && ready < HEAD ? 0 : ready;
}

static void ring_write(shm_pipe *p, uint64_t at, const void *from, int64_t bytes) {
    int64_t i = (int64_t)(at % SHM_PIPE_BYTES), first = pg_min64(bytes, SHM_PIPE_BYTES - i);
    if (first > 0) memcpy(p->ring + i, from, (size_t)first);
    if (bytes > first) memcpy(p->ring, (const char *)from + first, (size_t)(bytes - first));
}

static void ring_read(const shm_pipe *p, uint64_t at, void *to, int64_t bytes) {
    int64_t i = (int64_t)(at % SHM_PIPE_BYTES), first = pg_min64(bytes, SHM_PIPE_BYTES - i);
    if (first > 0) memcpy(to, p->ring + i, (size_t)first);
    if (bytes > first) memcpy((char *)to + first, p->ring, (size_t)(bytes - first));
}

/* The data behind an unexpected head cannot be skipped safely: the group is broken for all. */
static int unexpected(shm_op *op, const shm_call *sent) {
    shm_group *g = op->group;
    char a[96], b[96], text[SHM_TEXT];
    snprintf(text, sizeof text,
             "group %s: rank %d calls %s to rank %d, which calls %s; both sides "
             "must name the same dtype and count",
             g->name, g->members[op->call.root], shm_call_text(a, sizeof a, sent),
             g->members[g->rank], shm_call_text(b, sizeof b, &op->call));
    shm_notice_set(&g->region->broken, PG_ECOMM, text);
    shm_wake(g);
    return shm_fail(op, PG_ECOMM, "%s", text);
}

static int advance(shm_op *op) {
    shm_pipe *p = pipe_of(op);
    int64_t ready = ready_bytes(op), left = all_bytes(op) - op->chunk;
    if (op->step > 0 && left == 0) return SHM_FINISHED;
    if (ready == 0) return SHM_BLOCKED;
    int64_t head = op->step == 0 ? HEAD : 0;
    uint64_t at = atomic_load(is_send(op) ? &p->head : &p->tail);
    if (is_send(op)) {
        if (head) ring_write(p, at, &op->call, HEAD);
    } else if (head) {
        shm_call sent;
        ring_read(p, at, &sent, HEAD);
        if (sent.dtype != op->call.dtype || sent.count != op->call.count)
            return unexpected(op, &sent);
    }
    int64_t n = pg_min64(left, pg_min64(PIECE, ready - head));
    if (is_send(op)) ring_write(p, at + (uint64_t)head, op->in + op->chunk, n);
    else ring_read(p, at + (uint64_t)head, op->out + op->chunk, n);
    atomic_store(is_send(op) ? &p->head : &p->tail, at + (uint64_t)(head + n));
    pg_page_ring(&shm.control->pages[op->group->members[op->call.root]]);
    op->chunk += n;
    op->step = 1;
    return op->chunk == all_bytes(op) ? SHM_FINISHED : SHM_MOVED;
}

static int waits_for(const shm_op *op, int after) {
    int blocked = ready_bytes(op) == 0 && (op->step == 0 || op->chunk < all_bytes(op));
    return blocked && op->call.root > after ? op->call.root : -1;
}

int shm_pair(shm_group *g, shm_call call, const void *in, void *out, void **ticket) {
    int lane = 1 + call.root + (call.kind == SHM_RECV ? g->size : 0);
    shm_op *op = shm_op_new(g, &g->lanes[lane], call);
    if (!op) return PG_ENOMEM;
    op->in = in;
    op->out = out;
    op->advance = advance;
    op->blocker = waits_for;
    shm_start(op, ticket);
    return PG_OK;
}
