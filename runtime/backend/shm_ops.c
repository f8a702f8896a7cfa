/* shm_ops.c: the collectives of a group, as steps between which all members meet (see shm.h).
 *
 * Data passes through two buffers a member, used in turns: in a chunk's first step each member puts
 * its share into its buffer and posts; in the next all take what they want.  A large allreduce has
 * a step between: each member adds up its own slice of the chunk, over all buffers in rank order,
 * and leaves the sum in its own buffer.  So each element is copied twice and added once, whatever
 * the number of ranks.
 * A buffer is filled again two turns later, after a meeting that every member reaches only when it
 * has taken all of the turn before last: nothing else guards it.  The first step also carries the
 * call itself; all compare all calls before the first output is touched. */
#include "shm.h"

#include <string.h>

static int64_t size_of(const shm_op *op) { return pg_dtype_size(op->call.dtype); }
static char *buffer(const shm_op *op, int member, int64_t chunk) {
    return (char *)(shm_stage(op->group, member, op->turn + (uint64_t)chunk) + 1);
}
/* Elements of this chunk. */
static int64_t extent(const shm_op *op, int64_t chunk) {
    return pg_min64(op->chunk, op->call.count - chunk * op->chunk);
}

/* Slices begin on cache lines, so that two members never write one. */
static int64_t slice_at(const shm_op *op, int64_t n, int member) {
    int64_t line = SHM_LINE / size_of(op), size = op->group->size;
    int64_t each = ((n + size - 1) / size + line - 1) / line * line;
    return pg_min64(n, each * member);
}

static void move_in(char *to, const char *from, int64_t bytes) {
    if (bytes > 0 && to != from) memcpy(to, from, (size_t)bytes);
}

/* One chunk's first step: this member's share into its buffer. */
static void put(shm_op *op, int64_t c) {
    shm_group *g = op->group;
    int64_t size = size_of(op), n = extent(op, c);
    char *to = buffer(op, g->rank, c);
    if (op->call.bare) return;
    switch (op->call.kind) {
    case SHM_REDUCESCATTER: /* a part for each member, one behind the other */
        for (int j = 0; j < g->size; j++)
            move_in(to + j * n * size, op->in + (j * op->call.count + c * op->chunk) * size,
                    n * size);
        break;
    case SHM_BROADCAST:
        if (g->rank != op->call.root) break;
        move_in(to, op->in + c * op->chunk * size, n * size);
        break;
    case SHM_BARRIER: break;
    default: move_in(to, op->in + c * op->chunk * size, n * size);
    }
}

/* Add up elements [from, to) of all members' buffers into y. */
static void fold(const shm_op *op, int64_t c, char *y, int64_t from, int64_t to) {
    const void *x[PG_SHM_RANKS];
    for (int j = 0; j < op->group->size; j++) x[j] = buffer(op, j, c) + from * size_of(op);
    shm_reduce(y, x, op->group->size, to - from, op->call.dtype, op->call.reduce);
}

static int is_sliced(const shm_op *op) {
    return op->call.kind == SHM_ALLREDUCE && !op->call.bare &&
           op->call.count * size_of(op) * op->group->size > SHM_DIRECT;
}

/* One chunk's last step: what this member wants of all buffers. */
static void take(shm_op *op, int64_t c) {
    shm_group *g = op->group;
    int64_t size = size_of(op), n = extent(op, c), at = c * op->chunk;
    if (op->call.bare) return;
    char *out = op->out + at * size;
    switch (op->call.kind) {
    case SHM_ALLREDUCE:
        if (!is_sliced(op)) fold(op, c, out, 0, n);
        for (int j = 0; is_sliced(op) && j < g->size; j++) {
            int64_t from = slice_at(op, n, j), to = slice_at(op, n, j + 1);
            move_in(out + from * size, buffer(op, j, c) + from * size, (to - from) * size);
        }
        break;
    case SHM_ALLGATHER:
        for (int j = 0; j < g->size; j++) {
            char *to = op->out + (j * op->call.count + at) * size;
            if (j == g->rank) move_in(to, op->in + at * size, n * size);
            else move_in(to, buffer(op, j, c), n * size);
        }
        break;
    case SHM_REDUCESCATTER: fold(op, c, out, g->rank * n, (g->rank + 1) * n); break;
    case SHM_BROADCAST:
        if (g->rank != op->call.root) move_in(out, buffer(op, op->call.root, c), n * size);
        break;
    default: break;
    }
}

static int same_call(const shm_call *a, const shm_call *b) {
    return a->number == b->number && a->kind == b->kind && a->dtype == b->dtype &&
           a->count == b->count && a->root == b->root && a->reduce == b->reduce;
}

/* All members compare with the first, so all come to the same verdict and stay in step. */
static int compare(shm_op *op) {
    const shm_group *g = op->group;
    const shm_call *first = shm_stage(g, 0, op->turn);
    for (int j = 1; j < g->size; j++) {
        const shm_call *other = shm_stage(g, j, op->turn);
        if (same_call(first, other)) continue;
        char a[96], b[96];
        return shm_fail(op, PG_ECOMM,
                        "group %s: rank %d calls %s, rank %d calls %s (call %llu of the "
                        "group); all its ranks must make the same calls in the same order",
                        g->name, g->members[0], shm_call_text(a, sizeof a, first), g->members[j],
                        shm_call_text(b, sizeof b, other), (unsigned long long)first->number);
    }
    return 0;
}

/* The next member after `after` that has not posted as often as this one. */
static int lagging(const shm_op *op, int after) {
    const shm_group *g = op->group;
    for (int j = after + 1; j < g->size; j++)
        if (atomic_load(&g->region->seats[j].posted) < g->posts) return j;
    return -1;
}

/* Only the last to post need ring: before that nobody can go on. */
static void post(shm_op *op) {
    shm_group *g = op->group;
    atomic_store(&g->region->seats[g->rank].posted, ++g->posts);
    if (lagging(op, -1) < 0) shm_wake(g);
}

static void start_call(shm_op *op) {
    shm_group *g = op->group;
    op->turn = g->turn++;
    op->call.number = ++g->calls;
    *shm_stage(g, g->rank, op->turn) = op->call;
}

/* Steps: put 0, [add 0], take 0 and put 1, [add 1], ... take last. */
static int advance(shm_op *op) {
    shm_group *g = op->group;
    int64_t steps = is_sliced(op) ? 2 : 1, c = op->step / steps;
    if (op->step > 0 && lagging(op, -1) >= 0) return SHM_BLOCKED;
    if (op->step == 0) start_call(op);
    if (op->step == 1) PG_TRY(compare(op));
    if (op->step % steps == 1 % steps && steps == 2) {
        int64_t n = extent(op, c), from = slice_at(op, n, g->rank),
                to = slice_at(op, n, g->rank + 1);
        fold(op, c, buffer(op, g->rank, c) + from * size_of(op), from, to);
    } else {
        if (c > 0) take(op, c - 1);
        if (c == op->chunks) return SHM_FINISHED;
        if (c > 0) g->turn++;
        put(op, c);
    }
    op->step++;
    post(op);
    return SHM_MOVED;
}

int shm_collective(shm_group *g, shm_call call, const void *in, void *out, void **ticket) {
    shm_op *op = shm_op_new(g, &g->lanes[0], call);
    if (!op) return PG_ENOMEM;
    int64_t shares = call.kind == SHM_REDUCESCATTER ? g->size : 1;
    int64_t size = pg_dtype_size(call.dtype);
    op->chunk = shm_stage_bytes(g->size) / shares / size;
    op->chunks = call.bare ? 1 : pg_max64(1, (call.count + op->chunk - 1) / op->chunk);
    op->in = in;
    op->out = out;
    op->advance = advance;
    op->blocker = lagging;
    shm_start(op, ticket);
    return PG_OK;
}

int shm_note(shm_group *g, shm_call call, void **ticket) {
    call.bare = 1;
    if (call.kind == SHM_SEND || call.kind == SHM_RECV)
        return shm_pair(g, call, NULL, NULL, ticket);
    return shm_collective(g, call, NULL, NULL, ticket);
}
