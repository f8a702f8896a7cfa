/* shm_progress.c: the engine: one loop that moves every operation of the process, and the waiting.
 *
 * Whoever waits drives: a synchronous call needs no other thread.  Operations that were detached
 * are driven by the progress thread, which steps aside while a caller drives.  A pass makes at most
 * one step of each lane, so that a blocked or a long operation holds up no other.  One lock guards
 * it all; it is free while a driver yields or sleeps. */
#define _GNU_SOURCE /* syscall */
#include "../base/system.h"
#include "shm.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define YIELDS 50          /* before sleeping; more gains nothing with more ranks than cores */
#define SLICE  100000000ll /* ns: how long to sleep before looking round for death and time */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work; /* the progress thread waits here while it has nothing to drive */
    pthread_t thread;
    int started, quit;
    int callers, detached; /* drivers in shm_wait; detached operations not yet done */
    unsigned passes;
    int64_t looked; /* ns: when all operations were last watched */
} engine = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

void shm_lock(void) { pthread_mutex_lock(&engine.lock); }
void shm_unlock(void) { pthread_mutex_unlock(&engine.lock); }

shm_op *shm_op_new(shm_group *g, shm_lane *lane, shm_call call) {
    shm_op *op = calloc(1, sizeof *op);
    if (!op) {
        pg_fail(PG_ENOMEM, "%s: out of memory for its handle", shm_kind_names[call.kind]);
        return NULL;
    }
    op->group = g;
    op->lane = lane;
    op->call = call;
    return op;
}

static void activate(shm_lane *lane) {
    lane->next = &shm.active;
    lane->before = shm.active.before;
    lane->before->next = lane;
    shm.active.before = lane;
}

static void deactivate(shm_lane *lane) {
    lane->before->next = lane->next;
    lane->next->before = lane->before;
    lane->next = lane->before = NULL;
}

static void begin(shm_op *op) {
    op->state = SHM_RUNNING;
    op->since = pg_page_clock();
}

/* End the first operation of a lane. */
static void finish(shm_op *op, int code) {
    shm_lane *lane = op->lane;
    op->code = code < 0 ? code : PG_OK;
    op->state = SHM_DONE;
    engine.detached -= op->detached;
    lane->first = op->next;
    if (lane->first) {
        begin(lane->first);
    } else {
        lane->last = NULL;
        deactivate(lane);
    }
}

/* One step of the lane's first operation: 1 if something changed. */
static int move(shm_lane *lane) {
    shm_op *op = lane->first;
    int code = shm_broken(op);
    if (code == 0) code = op->advance(op);
    if (code == SHM_BLOCKED) return 0;
    if (code == SHM_MOVED) op->since = pg_page_clock();
    else finish(op, code);
    return 1;
}

static void look_round(void) {
    int64_t now = pg_page_clock();
    if (now - engine.looked < SLICE) return;
    engine.looked = now;
    for (shm_lane *lane = shm.active.next, *next; lane != &shm.active; lane = next) {
        next = lane->next;
        int code = shm_watch(lane->first);
        if (code < 0) finish(lane->first, code);
    }
}

static int pass(void) {
    int moved = 0;
    for (shm_lane *lane = shm.active.next, *next; lane != &shm.active; lane = next) {
        next = lane->next;
        moved += move(lane);
    }
    if ((++engine.passes & 1023) == 0) look_round();
    return moved;
}

/* Locked; the lock is free while asleep.  The order asleep, pass, sleep loses no bell: a peer that
 * posts after our pass sees us asleep and rings, and then the futex does not wait. */
static void nap(void) {
    pg_page *page = &shm.control->pages[shm.rank];
    uint32_t bell = atomic_load(&page->bell);
    atomic_fetch_add(&page->asleep, 1);
    if (!pass()) {
        struct timespec slice = {.tv_nsec = SLICE};
        shm_unlock();
        syscall(SYS_futex, &page->bell, FUTEX_WAIT, bell, &slice, NULL, 0);
        shm_lock();
        if (shm.control) look_round();
    }
    atomic_fetch_sub(&page->asleep, 1);
}

static void yield(void) {
    shm_unlock();
    sched_yield();
    shm_lock();
}

static void *progress(void *unused) {
    (void)unused;
    int idle = 0;
    shm_lock();
    while (!engine.quit) {
        if (engine.callers || !engine.detached) {
            pthread_cond_wait(&engine.work, &engine.lock);
            idle = 0;
        } else if (pass()) {
            idle = 0;
            shm_unlock(); /* let a caller in between two passes */
            shm_lock();
        } else if (idle++ < YIELDS) {
            yield();
        } else {
            nap();
        }
    }
    shm_unlock();
    return NULL;
}

/* Without the thread (the system refuses one) operations still move in every wait and done. */
static void start_thread(void) {
    if (engine.started) return;
    engine.quit = 0;
    engine.started = pg_thread_start(&engine.thread, progress, NULL) == 0;
}

void shm_start(shm_op *op, void **ticket) {
    shm_lane *lane = op->lane;
    shm_lock();
    if (!shm.control) {
        op->state = SHM_DONE;
        shm_fail(op, PG_ECOMM, "%s (%s): this rank has left its world",
                 shm_kind_names[op->call.kind], op->group->name);
    } else if (lane->first) {
        lane->last->next = op;
        lane->last = op;
    } else {
        lane->first = lane->last = op;
        activate(lane);
        begin(op);
        while (op->state == SHM_RUNNING && move(lane)) {}
    }
    shm_unlock();
    *ticket = op;
}

void shm_detach(void *ticket) {
    shm_op *op = ticket;
    shm_lock();
    if (op && op->state != SHM_DONE && !op->detached) {
        op->detached = 1;
        engine.detached++;
        start_thread();
        if (!engine.callers) pthread_cond_signal(&engine.work);
    }
    shm_unlock();
}

static int code_of(const shm_op *op) {
    if (op->code == PG_OK) return PG_OK;
    return pg_fail(op->code, "%s", op->text ? op->text : shm_kind_names[op->call.kind]);
}

int shm_done(void *ticket) {
    shm_op *op = ticket;
    if (!op) return pg_fail(PG_EINVAL, "work: no operation");
    shm_lock();
    if (op->state != SHM_DONE) pass();
    int done = op->state == SHM_DONE;
    shm_unlock();
    if (!done) return 0;
    int code = code_of(op);
    return code < 0 ? code : 1;
}

/* The page says what we wait in only once we really wait: it costs more than a small operation. */
static void show(const shm_op *op) {
    pg_page *page = &shm.control->pages[shm.rank];
    pg_page_write(page->op, sizeof page->op, shm_kind_names[op->call.kind]);
    pg_page_write(page->group, sizeof page->group, op->group->name);
    page->since = pg_page_clock();
    page->state = PG_PAGE_WAITING;
}

void shm_abandon(shm_group *g, int code, const char *text) {
    for (int i = 0; g->lanes && i < 1 + 2 * g->size; i++)
        for (shm_lane *lane = &g->lanes[i]; lane->first;) {
            shm_op *op = lane->first;
            shm_fail(op, code, "%s (%s): %s", shm_kind_names[op->call.kind], g->name, text);
            finish(op, code);
        }
}

/* The caller leaves in the midst, so its group is out of step on all its ranks. */
static void interrupted(shm_op *op) {
    shm_group *g = op->group;
    char text[128];
    snprintf(text, sizeof text, "rank %d was interrupted in %s", shm.rank,
             shm_kind_names[op->call.kind]);
    if (g->region && op->call.kind != SHM_REFORM) {
        shm_notice_set(&g->region->broken, PG_ECANCEL, text);
        shm_wake(g);
    }
    shm_abandon(g, PG_ECANCEL, text);
    shm_fail(op, PG_EINTR, "%s (%s): interrupted", shm_kind_names[op->call.kind], g->name);
}

int shm_wait(void *ticket) {
    shm_op *op = ticket;
    if (!op) return pg_fail(PG_EINVAL, "work: no operation");
    int idle = 0, shown = 0;
    shm_lock();
    engine.callers++;
    while (op->state != SHM_DONE) {
        if (pass()) {
            idle = 0;
        } else if (pg_interrupted()) {
            interrupted(op);
        } else if (idle++ < YIELDS) {
            yield();
        } else {
            if (!shown++) show(op);
            nap();
        }
    }
    if (shown && shm.control) shm.control->pages[shm.rank].state = PG_PAGE_RUNNING;
    if (--engine.callers == 0 && engine.detached) pthread_cond_signal(&engine.work);
    shm_unlock();
    int code = code_of(op);
    free(op->text);
    free(op);
    return code;
}

void shm_stop(void) {
    shm_lock();
    for (shm_group *g = shm.groups; g; g = g->next)
        shm_abandon(g, PG_ECOMM, "this rank has left its world");
    engine.quit = 1;
    pthread_cond_signal(&engine.work);
    if (shm.control) pg_page_ring(&shm.control->pages[shm.rank]);
    int started = engine.started;
    shm_unlock();
    if (started) pthread_join(engine.thread, NULL);
    engine.started = 0;
}
