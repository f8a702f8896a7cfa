/* nccl_watch.c: the watchdog: a thread that looks round ten times a second for a dead rank,
 * a cancelled group, an error of NCCL, calls that differ, and operations past their time
 * limit; and what follows.
 *
 * A broken group's communicators are aborted, each by a thread of its own since that can hang too.
 * The kernels that waited end, the main thread comes back from its wait and raises the
 * error.  Where it does not come back, stuck inside the driver, the process ends the hard
 * way after a grace time. */
#include "../base/system.h"
#include "nccl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 100000000l    /* between two looks */
#define FAR     10            /* looks between two at the store */
#define GRACE   10000000000ll /* ns for the main thread to notice */

static struct {
    pthread_mutex_t lock; /* of quit */
    pthread_cond_t wake;
    pthread_t thread;
    int running, quit, looks;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* ---- breaking ---- */

static void *abort_one(void *comm) {
    (void)cudaSetDevice(cuda.number);
    nccl.call.CommAbort(comm);
    pthread_mutex_lock(&nccl.lock);
    nccl.aborting--;
    pthread_mutex_unlock(&nccl.lock);
    return NULL;
}

void nccl_recycle(nccl_op *op) {
    op->next = nccl.spare;
    nccl.spare = op;
}

static void give_up(nccl_op *op, const nccl_group *g) {
    void *note = op->note;
    op->note = NULL;
    /* a comparison under way ends at once, since the group is marked broken */
    int same = !op->code && (!note || shm_wait(note) == PG_OK);
    int came = same && cudaEventQuery(op->done) == cudaSuccess; /* before the group broke */
    op->finished = 1;
    if (!came) op->code = g->code;
    if (!op->waited) return;
    if (came) {
        nccl_recycle(op);
        return;
    }
    nccl.lost = g->code; /* the compute stream has numbers that never came */
    snprintf(nccl.lost_text, sizeof nccl.lost_text, "%s (%s): %.900s",
             shm_kind_names[op->call.kind], g->name, g->text);
    nccl_recycle(op);
}

void nccl_abort(ncclComm_t comm) {
    pthread_t thread;
    nccl.aborting++;
    if (pg_thread_start(&thread, abort_one, comm)) nccl.aborting--; /* it stays stuck */
    else pthread_detach(thread);
}

static void abort_lanes(nccl_group *g) {
    for (int i = 0; i < LANES; i++) {
        ncclComm_t comm = g->lanes[i].comm;
        g->lanes[i].comm = NULL;
        if (comm) nccl_abort(comm);
    }
}

void nccl_break(nccl_group *g, int code, const char *text) {
    char others[SHM_TEXT];
    if (g->code) return;
    g->code = code;
    snprintf(g->text, sizeof g->text, "%s", text);
    if (code != PG_ECANCEL && !nccl.broken) {
        nccl.broken = g;
        nccl.broken_at = pg_page_clock();
        nccl.noticed = 0;
    }
    if (g->control && g->control->region) {
        snprintf(others, sizeof others, "rank %d gave up: %.900s", nccl.rank, text);
        shm_notice_set(&g->control->region->broken, code, others);
        shm_wake(g->control);
    }
    for (int i = 0; i < LANES; i++) {
        nccl_op *op = g->lanes[i].first;
        g->lanes[i].first = g->lanes[i].last = NULL;
        for (nccl_op *next; op; op = next) {
            next = op->next;
            give_up(op, g);
        }
    }
    abort_lanes(g); /* last: from here on the streams go on, and readers must know */
}

int nccl_usable(nccl_group *g, const char *op) {
    if (!g->code && g->lanes[LANE_ALL].comm) return PG_OK;
    nccl.noticed = 1;
    if (g->code) return pg_fail(g->code, "%s (%s): %s", op, g->name, g->text);
    return pg_fail(PG_ECOMM, "%s (%s): this rank has left its world", op, g->name);
}

/* ---- looking ---- */

void nccl_sweep(nccl_lane *lane) {
    for (nccl_op *op; (op = lane->first);) {
        if (op->note && shm_done(op->note) != 0) {
            void *note = op->note;
            op->note = NULL;
            int code = shm_wait(note);
            if (code < 0) {
                char text[SHM_TEXT];
                snprintf(text, sizeof text, "%.999s", pg_errmsg());
                op->code = code; /* its numbers are wrong even if they came */
                nccl_break(op->group, code, text);
                return;
            }
        }
        if (op->note || cudaEventQuery(op->done) != cudaSuccess) return;
        lane->first = op->next;
        if (!lane->first) lane->last = NULL;
        op->finished = 1;
        if (op->waited) nccl_recycle(op);
    }
}

/* What all ranks of the group do, as far as this host can see. */
static void describe(char *text, size_t bytes, const nccl_group *g) {
    char state[800];
    for (int i = 0; i < g->size; i++) {
        size_t used = strlen(text);
        const pg_page *p = shm.control && g->control ? &shm.control->pages[g->members[i]]
                           : i == g->rank            ? pg_page_mine()
                                                     : NULL;
        if (!p) continue;
        pg_page_describe(state, sizeof state, p, g->members[i]);
        if (used + strlen(state) + 24 > bytes) {
            snprintf(text + used, bytes - used, "; and %d more", g->size - i);
            return;
        }
        snprintf(text + used, bytes - used, "; %s", state);
    }
}

/* 1 if the group broke. */
static int look_at_time(nccl_group *g, const nccl_lane *lane, int64_t now) {
    nccl_op *op = lane->first;
    char text[SHM_TEXT], call[128];
    if (!op) return 0;
    if (!op->since && cudaEventQuery(op->ready) == cudaSuccess) op->since = now;
    double waited = op->since ? (double)(now - op->since) * 1e-9 : 0;
    if (waited <= nccl.limit) return 0;
    snprintf(text, sizeof text, "%s: rank %d waited %.1f s, time limit %.6g s (PGRUN_TIMEOUT)",
             shm_call_text(call, sizeof call, &op->call), nccl.rank, waited, nccl.limit);
    describe(text, sizeof text, g);
    nccl_break(g, PG_ECOMM, text);
    return 1;
}

static int look_at_errors(nccl_group *g, nccl_lane *lane) {
    ncclResult_t r = ncclSuccess, asked;
    char text[SHM_TEXT];
    if (!lane->comm) return 0;
    asked = nccl.call.CommGetAsyncError(lane->comm, &r);
    if (asked != ncclSuccess) r = asked;
    if (r == ncclSuccess || r == ncclInProgress) return 0;
    nccl_error(lane->first ? shm_kind_names[lane->first->call.kind] : "ranks", g->name, r,
               lane->comm);
    snprintf(text, sizeof text, "%.600s", pg_errmsg());
    describe(text, sizeof text, g);
    nccl_break(g, PG_ECOMM, text);
    return 1;
}

/* What others say of this group or of the world.  1 if it broke. */
static int look_at_others(nccl_group *g, const char *failed) {
    char key[PG_STORE_KEY], text[SHM_TEXT];
    const shm_notice *n = NULL;
    int code;
    if (g->control && shm.control) n = shm_world_broken();
    if (!n && g->control && g->control->region) n = shm_notice_get(&g->control->region->broken);
    if (n) nccl_break(g, n->code, n->text);
    else if (failed) nccl_break(g, PG_ECOMM, failed);
    else if (nccl.store && watch.looks % FAR == 0) {
        snprintf(key, sizeof key, "cancel/%s/%d", g->key, g->round);
        if (pg_store_look(nccl.store, &code, key, text, sizeof text) == sizeof text)
            nccl_break(g, PG_ECANCEL, text);
    }
    return g->code != 0;
}

/* Nobody reads the message, so it goes where the launcher and the user look. */
static void end_hard(const char *where, const char *why) {
    char text[2 * SHM_TEXT];
    snprintf(text, sizeof text, "(%s): %s", where, why);
    pg_status_fail(text);
    fprintf(stderr, "pgrun: rank %d %s; it does not come back from the device and is ended\n",
            nccl.rank, text);
    _exit(1);
}

static void look(void) {
    char failed[SHM_TEXT] = "";
    int code, known = 0;
    int64_t now = pg_page_clock();
    if (nccl.store && watch.looks % FAR == 0) {
        known = pg_store_look(nccl.store, &code, PG_STORE_FAILED, failed, sizeof failed) > 0;
        failed[sizeof failed - 1] = 0;
        if (code < 0) known = snprintf(failed, sizeof failed, "%.900s", pg_errmsg()) > 0;
    }
    for (nccl_group *g = nccl.groups; g; g = g->next) {
        if (g->code || look_at_others(g, known ? failed : NULL)) continue;
        for (int i = 0; i < LANES && !g->code; i++) {
            nccl_sweep(&g->lanes[i]);
            if (g->code || look_at_time(g, &g->lanes[i], now)) break;
            look_at_errors(g, &g->lanes[i]);
        }
    }
    if (nccl.broken && !nccl.noticed && now - nccl.broken_at > GRACE)
        end_hard(nccl.broken->name, nccl.broken->text);
}

/* The main thread holds the lock while it is inside NCCL.  Where it does not come out of there
 * although a rank is dead, it never will. */
static void look_from_outside(int64_t *since) {
    const shm_notice *n = !nccl.store && shm.control ? shm_world_broken() : NULL;
    if (!n) *since = 0;
    else if (!*since) *since = pg_page_clock();
    else if (pg_page_clock() - *since > GRACE) end_hard("in NCCL", n->text);
}

static struct timespec after(int64_t ns) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    ns += t.tv_nsec;
    return (struct timespec){.tv_sec = t.tv_sec + ns / 1000000000, .tv_nsec = ns % 1000000000};
}

static void *run(void *unused) {
    int64_t stuck = 0;
    (void)cudaSetDevice(cuda.number);
    pthread_mutex_lock(&watch.lock);
    while (!watch.quit) {
        struct timespec next = after(LOOK_NS), patience = after(2 * LOOK_NS);
        pthread_cond_timedwait(&watch.wake, &watch.lock, &next);
        if (watch.quit) break;
        if (pthread_mutex_timedlock(&nccl.lock, &patience)) {
            look_from_outside(&stuck);
            continue;
        }
        watch.looks++;
        stuck = 0;
        look();
        pthread_mutex_unlock(&nccl.lock);
    }
    pthread_mutex_unlock(&watch.lock);
    return unused;
}

int nccl_watch_start(void) {
    if (watch.running) return PG_OK;
    watch.quit = 0;
    int why = pg_thread_start(&watch.thread, run, NULL);
    if (why) return pg_fail(PG_ECOMM, "ranks: no thread to watch over them: %s", strerror(why));
    watch.running = 1;
    return PG_OK;
}

void nccl_watch_stop(void) {
    if (!watch.running) return;
    pthread_mutex_lock(&watch.lock);
    watch.quit = 1;
    pthread_cond_signal(&watch.wake);
    pthread_mutex_unlock(&watch.lock);
    pthread_join(watch.thread, NULL);
    watch.running = 0;
}

/* ---- for the waits of the host ---- */

int nccl_tell_waiting(void) {
    const nccl_op *oldest = NULL;
    pg_page *page = pg_page_mine();
    pthread_mutex_lock(&nccl.lock);
    for (nccl_group *g = nccl.groups; g; g = g->next)
        for (int i = 0; i < LANES; i++) {
            const nccl_op *op = g->lanes[i].first;
            if (op && op->since && (!oldest || op->since < oldest->since)) oldest = op;
        }
    if (oldest) {
        pg_page_write(page->op, sizeof page->op, shm_kind_names[oldest->call.kind]);
        pg_page_write(page->group, sizeof page->group, oldest->group->name);
        page->since = oldest->since;
        page->state = PG_PAGE_WAITING;
    }
    pthread_mutex_unlock(&nccl.lock);
    return oldest != NULL;
}

void nccl_tell_running(void) { pg_page_mine()->state = PG_PAGE_RUNNING; }

int nccl_lost(const char *op) {
    if (!nccl.lost) return PG_OK; /* set by the watchdog before the streams went on */
    pthread_mutex_lock(&nccl.lock);
    int code = nccl.lost;
    if (code) pg_fail(code, "%s: %s", op, nccl.lost_text);
    nccl.lost = 0;
    nccl.noticed = 1;
    pthread_mutex_unlock(&nccl.lock);
    return code;
}
