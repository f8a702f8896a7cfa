/* nccl_check.c: do the ranks of a group make the same call?  NCCL itself does not ask: ranks that
 * differ hang, or get each other's numbers.
 *
 * On one host the calls meet in shared memory (shm_note).  Small collectives wait for that first:
 * nothing is touched when they differ, and 5 us more are little beside what NCCL needs to start.
 * Larger ones and messages go on at once, since a host that waits for its peers' hosts cannot run
 * ahead of its device; their comparison is looked at while they run, and the watchdog breaks the
 * group with both sides' calls.  PG_COMM_CHECK=1 makes every collective wait, 0 compares nothing.
 * On several hosts calls are compared only with PG_COMM_CHECK=1, through the
 * store: some 100 us each. */
#include "nccl.h"

#include <stdio.h>

#define SMALL (64 << 10) /* bytes */

static int is_pair(const shm_call *c) { return c->kind == SHM_SEND || c->kind == SHM_RECV; }

static int compare_here(nccl_group *g, shm_call call, void **note) {
    int64_t bytes = call.count * pg_dtype_size(call.dtype);
    PG_TRY(shm_note(g->control, call, note));
    if (!is_pair(&call) && (nccl.check == 1 || bytes <= SMALL)) {
        void *ticket = *note;
        *note = NULL;
        return shm_wait(ticket);
    }
    shm_detach(*note);
    return PG_OK;
}

/* Each rank shows its call; the first compares and tells the verdict.  All read it before they show
 * the next, so one key a rank is enough. */
static int compare_by_store(nccl_group *g, shm_call call) {
    char key[PG_STORE_KEY], a[96], b[96];
    struct {
        uint64_t number;
        char text[SHM_TEXT - 8];
    } verdict = {0};
    call.number = ++g->calls;
    snprintf(key, sizeof key, "call/%s/%d", g->key, g->rank);
    if (g->rank) PG_TRY(pg_store_set(nccl.store, key, &call, sizeof call));
    for (int i = 1; g->rank == 0 && i < g->size; i++) {
        shm_call other = {0};
        snprintf(key, sizeof key, "call/%s/%d", g->key, i);
        int64_t start = pg_page_clock();
        while (other.number != call.number) {
            double left = nccl.limit - (double)(pg_page_clock() - start) * 1e-9;
            PG_TRY(pg_store_get(nccl.store, key, &other, sizeof other, left > 0 ? left : 0));
            if (left <= 0)
                return pg_fail(PG_ECOMM,
                               "%s (%s): rank %d made no call within %.6g s (PGRUN_TIMEOUT)",
                               shm_kind_names[call.kind], g->name, g->members[i], nccl.limit);
        }
        if (other.kind != call.kind || other.count != call.count || other.dtype != call.dtype ||
            other.root != call.root || other.reduce != call.reduce)
            snprintf(
                verdict.text, sizeof verdict.text,
                "group %s: rank %d calls %s, rank %d calls %s; all its ranks must make the same "
                "calls in the same order",
                g->name, g->members[0], shm_call_text(a, sizeof a, &call), g->members[i],
                shm_call_text(b, sizeof b, &other));
    }
    verdict.number = g->rank ? 0 : call.number;
    snprintf(key, sizeof key, "verdict/%s", g->key);
    if (!g->rank) PG_TRY(pg_store_set(nccl.store, key, &verdict, sizeof verdict));
    while (verdict.number != call.number)
        PG_TRY(pg_store_get(nccl.store, key, &verdict, sizeof verdict, nccl.limit));
    return verdict.text[0] ? pg_fail(PG_ECOMM, "%s", verdict.text) : PG_OK;
}

int nccl_compare(nccl_group *g, shm_call call, void **note) {
    *note = NULL;
    if (!nccl.check) return PG_OK;
    if (g->control) return compare_here(g, call, note);
    return nccl.check == 1 && !is_pair(&call) ? compare_by_store(g, call) : PG_OK;
}
