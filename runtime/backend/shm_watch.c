/* shm_watch.c: when an operation cannot go on, and what to tell the person who waits. */
#include "shm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const shm_kind_names[SHM_NKINDS] = {"allreduce", "allgather",  "reducescatter",
                                                "broadcast", "barrier",    "send",
                                                "recv",      "comm_split", "comm_reform"};

const char *shm_call_text(char *text, size_t bytes, const shm_call *c) {
    static const char *const reduce_names[] = {"sum", "max", "min"};
    int kind = c->kind >= 0 && c->kind < SHM_NKINDS ? c->kind : SHM_BARRIER;
    const char *name = shm_kind_names[kind], *dtype = pg_dtype_name(c->dtype);
    long long count = (long long)c->count;
    if (kind == SHM_BARRIER) snprintf(text, bytes, "%s", name);
    else if (kind == SHM_BROADCAST)
        snprintf(text, bytes, "%s %s x %lld from root %d", name, dtype, count, c->root);
    else if (c->reduce > PG_OP_SUM && c->reduce <= PG_OP_MIN)
        snprintf(text, bytes, "%s (%s) %s x %lld", name, reduce_names[c->reduce], dtype, count);
    else snprintf(text, bytes, "%s %s x %lld", name, dtype, count);
    return text;
}

int shm_fail(shm_op *op, int code, const char *format, ...) {
    char text[2 * SHM_TEXT];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    free(op->text);
    op->text = strdup(text); /* NULL when memory is short: the code still says it */
    return op->code = code;
}

static const char *op_name(const shm_op *op) { return shm_kind_names[op->call.kind]; }

int shm_broken(shm_op *op) {
    const shm_group *g = op->group;
    const shm_notice *n = shm_world_broken();
    if (n) return shm_fail(op, PG_ECOMM, "%s (%s): %s", op_name(op), g->name, n->text);
    if (op->call.kind == SHM_REFORM || !g->region) return 0;
    if (op->call.kind == SHM_SPLIT && g->rank == 0) return 0; /* sees it itself */
    n = shm_notice_get(&g->region->broken);
    if (n) return shm_fail(op, n->code, "%s (%s): %s", op_name(op), g->name, n->text);
    if (g->reforming)
        return shm_fail(op, PG_ECOMM, "%s (%s): the last reform did not end; reform it again",
                        op_name(op), g->name);
    return 0;
}

/* Leave the operation, and break the group for its other members: they could only wait in vain. */
static int give_up(shm_op *op, int code, const char *text) {
    char others[SHM_TEXT];
    shm_fail(op, code, "%s", text);
    if (op->group->region && op->call.kind != SHM_REFORM) {
        snprintf(others, sizeof others, "rank %d gave up: %.900s", shm.rank, text);
        shm_notice_set(&op->group->region->broken, code, others);
        shm_wake(op->group);
    }
    return code;
}

static int peer_left(shm_op *op, int peer) {
    char text[SHM_TEXT], state[800];
    pg_page_describe(state, sizeof state, &shm.control->pages[peer], peer);
    snprintf(text, sizeof text, "%s (%s): %s while rank %d waits for it", op_name(op),
             op->group->name, state, shm.rank);
    return give_up(op, PG_ECOMM, text);
}

/* Every rank that lives learns of a death, not only those that wait for the dead one. */
static int peer_died(shm_op *op, int peer) {
    const pg_page *p = &shm.control->pages[peer];
    char text[SHM_TEXT], state[700];
    long long step = (long long)p->step;
    snprintf(state, sizeof state, "rank %d (pid %d) died", peer, (int)p->pid);
    size_t used = strlen(state);
    if (p->failure[0]) snprintf(state + used, sizeof state - used, ": %.500s", p->failure);
    else if (step >= 0)
        snprintf(state + used, sizeof state - used, " at step %lld%s%.150s", step,
                 p->where[0] ? ", last at " : "", p->where);
    snprintf(text, sizeof text, "%s", state);
    shm_notice_set(&shm.control->failed, PG_ECOMM, text);
    shm_wake_all(shm.control);
    return shm_broken(op);
}

static int too_late(shm_op *op, int peer, double waited) {
    const shm_group *g = op->group;
    char text[2 * SHM_TEXT], call[128];
    snprintf(text, sizeof text,
             "%s (%s): rank %d waited %.1f s for rank %d, time limit %.6g s "
             "(PGRUN_TIMEOUT)",
             shm_call_text(call, sizeof call, &op->call), g->name, shm.rank, waited, peer,
             (double)shm.limit * 1e-9);
    for (int i = 0; i < g->size; i++) {
        size_t used = strlen(text);
        char state[800];
        pg_page_describe(state, sizeof state, &shm.control->pages[g->members[i]], g->members[i]);
        if (used + strlen(state) + 24 > 1600) {
            snprintf(text + used, sizeof text - used, "; and %d more", g->size - i);
            break;
        }
        snprintf(text + used, sizeof text - used, "; %s", state);
    }
    return give_up(op, PG_ECOMM, text);
}

/* A peer that left or died before it did its part cannot do it any more; so look at its state first
 * and at its part again after.  All that lag are looked at: the first may only be slow. */
int shm_watch(shm_op *op) {
    int code = shm_broken(op), first = op->blocker(op, -1);
    if (code < 0 || first < 0) return code;
    for (int i = first; i >= 0; i = op->blocker(op, i)) {
        int peer = op->group->members[i];
        const pg_page *p = &shm.control->pages[peer];
        int left = p->state == PG_PAGE_LEFT, dead = !left && pg_page_dead(p);
        if ((left || dead) && op->blocker(op, i - 1) == i)
            return left ? peer_left(op, peer) : peer_died(op, peer);
    }
    int64_t waited = pg_page_clock() - op->since;
    if (waited <= shm.limit) return 0;
    return too_late(op, op->group->members[first], (double)waited * 1e-9);
}
