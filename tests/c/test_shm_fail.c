/* test_shm_fail.c: what goes wrong between ranks: calls that differ, time,
 * death, cancel, interrupts. */
#include "world.h"

static int call_barrier(world *w, void *group) {
    void *t;
    int code = w->ops->barrier(group, &t);
    return code < 0 ? code : w->ops->wait(t);
}

static int call_sum(world *w, void *group, float *x, int64_t n) {
    void *t;
    int code = w->ops->allreduce(group, x, n, PG_F32, PG_OP_SUM, &t);
    return code < 0 ? code : w->ops->wait(t);
}

/* Seconds until a failure is known: measured 0.1 and 0.4, the rest is for busy machines. */
#define SOON 3.0

static double seconds(void) { return (double)pg_page_clock() * 1e-9; }

/* Outputs are untouched, all ranks hear both sides, and the group still works. */
static void differing_calls(world *w) {
    float x[101], out[202];
    void *t;
    for (int i = 0; i < 101; i++) x[i] = 5;
    must_refuse(PG_ECOMM,
                "group world: rank 0 calls allreduce f32 x 100, rank 1 calls allreduce f32 x 101",
                call_sum(w, w->group, x, w->rank == 1 ? 101 : 100));
    for (int i = 0; i < 101; i++) must(x[i] == 5);
    must_ok(w->ops->allreduce(w->group, x, 2, w->rank ? PG_I32 : PG_F32, PG_OP_SUM, &t));
    must_refuse(PG_ECOMM, "f32 x 2, rank 1 calls allreduce i32 x 2", w->ops->wait(t));
    must_ok(w->ops->allreduce(w->group, x, 2, PG_F32, w->rank == 2 ? PG_OP_MAX : PG_OP_SUM, &t));
    must_refuse(PG_ECOMM, "rank 2 calls allreduce (max) f32 x 2", w->ops->wait(t));
    must_ok(w->ops->broadcast(w->group, x, 1, PG_F32, w->rank == 1, &t));
    must_refuse(PG_ECOMM, "from root 0, rank 1 calls broadcast f32 x 1 from root 1",
                w->ops->wait(t));
    if (w->rank == 2) must_ok(w->ops->allgather(w->group, out, x, 50, PG_F32, &t));
    else must_ok(w->ops->barrier(w->group, &t));
    must_refuse(PG_ECOMM, "calls barrier, rank 2 calls allgather f32 x 50", w->ops->wait(t));
    must_ok(call_sum(w, w->group, x, 3));
    must(x[0] == 15 && x[2] == 15 && x[3] == 5);
}

static void calls_are_compared(void **state) {
    (void)state;
    run_world(3, differing_calls);
}

/* send and recv: the receiver finds out, the sender's next call is told. */
static void differing_pairs(world *w) {
    double x[4] = {0};
    void *t;
    const char *both = "rank 0 calls send f32 x 4 to rank 1, which calls recv f32 x 3";
    if (w->rank == 0) {
        must_ok(w->ops->send(w->group, x, 4, PG_F32, 1, &t));
        must_end(w, t);
        must_refuse(PG_ECOMM, both, call_barrier(w, w->group));
    } else {
        must_ok(w->ops->recv(w->group, x, 3, PG_F32, 0, &t));
        must_refuse(PG_ECOMM, both, w->ops->wait(t));
    }
    must_ok(w->ops->reform(w->group));
    must_ok(call_barrier(w, w->group));
}

static void pairs_are_compared(void **state) {
    (void)state;
    run_world(2, differing_pairs);
}

static void differing_lists(world *w) {
    int32_t list[] = {0, 1, 2};
    void *g;
    must_refuse(PG_ECOMM, "rank 0 splits off dp {0,1,2}, rank 1 splits off dp {0,1}",
                w->ops->split(&g, w->group, list, w->rank == 1 ? 2 : 3, "dp"));
    must_ok(w->ops->split(&g, w->group, list, 3, "dp"));
    must_ok(call_barrier(w, g));
    w->ops->free(g);
}

static void lists_are_compared(void **state) {
    (void)state;
    run_world(3, differing_lists);
}

/* Rank 1 never comes: the message names op, group, limit, the rank, and where all stand. */
static void late(world *w) {
    float x = 0;
    pg_page *page = pg_page_mine();
    w->ops->timeout(0.3);
    page->step = 7;
    pg_page_write(page->where, sizeof page->where, w->rank == 1 ? "y.lua:3" : "models/x.lua:14");
    if (w->rank == 1) {
        sleep(4);
        must_refuse(PG_ECOMM, "gave up", call_sum(w, w->group, &x, 1));
        return;
    }
    double start = seconds();
    int code = call_sum(w, w->group, &x, 1);
    must(code == PG_ECOMM && seconds() - start < SOON);
    const char *text = pg_errmsg();
    if (strstr(text, "gave up")) return; /* the other one's time was over first */
    must(strstr(text, "allreduce f32 x 1 (world): rank ") &&
         strstr(text, "for rank 1, time limit 0.3 s"));
    must(strstr(text, "rank 0 waits in allreduce (world) at models/x.lua:14 since"));
    must(strstr(text, "rank 1 is at step 7, not waiting, last at y.lua:3"));
}

static void time_limit(void **state) {
    (void)state;
    run_world(3, late);
}

/* Rank 2 is killed while the others wait for it in different groups. */
static void killed(world *w) {
    int32_t list[] = {0, 1};
    float x[1 << 18] = {0};
    void *pair = NULL;
    pg_page *page = pg_page_mine();
    page->step = 7;
    if (w->rank < 2) must_ok(w->ops->split(&pair, w->group, list, 2, "pair"));
    must_ok(call_barrier(w, w->group));
    if (w->rank == 2) {
        for (int i = 0; i < 3; i++) call_sum(w, w->group, x, 1 << 18);
        kill(getpid(), SIGKILL);
    }
    double start = seconds();
    for (int i = 0; i < 3; i++) must_ok(call_sum(w, w->group, x, 1 << 18));
    char want[64];
    snprintf(want, sizeof want, "rank 2 (pid %d) died at step 7",
             (int)pg_page_of(pg_page_map(&(int){0}), 2)->pid);
    must_refuse(PG_ECOMM, want, call_sum(w, w->group, x, 1 << 18));
    must(seconds() - start < SOON);
    if (pair) must_refuse(PG_ECOMM, want, call_barrier(w, pair));
}

static void kill_in_a_collective(void **state) {
    (void)state;
    pid_t pids[3];
    int fd = pg_shm_create(3);
    start_world(pids, 3, fd, killed);
    close(fd);
    end_world(pids, 3, 2);
}

/* The launcher saw it die: its words come at once, to those that wait and those that come later. */
static void marked(world *w) {
    double start = seconds();
    if (w->rank == 0) usleep(200000);
    must_refuse(PG_ECOMM, "barrier (world): rank 2 died by SIGKILL at step 7",
                call_barrier(w, w->group));
    must(seconds() - start < SOON);
}

static void launcher_marks_the_dead(void **state) {
    (void)state;
    pid_t pids[3];
    void *map;
    int fd = pg_shm_create(3);
    ok(pg_shm_map(&map, fd));
    fflush(NULL);
    for (int r = 0; r < 2; r++)
        if ((pids[r] = fork()) == 0) be_rank(r, 3, fd, marked);
    while (pg_page_of(map, 1)->state != PG_PAGE_WAITING) usleep(1000);
    char text[256];
    pg_page_describe(text, sizeof text, pg_page_of(map, 1), 1);
    assert_non_null(strstr(text, "rank 1 waits in barrier (world) since 0 s"));
    pg_page_describe(text, sizeof text, pg_page_of(map, 2), 2);
    assert_string_equal(text, "rank 2 has not joined");
    assert_null(pg_page_of(map, 3));
    pg_shm_mark_dead(map, 2, "rank 2 died by SIGKILL at step 7");
    end_world(pids, 2, -1);
    pg_page_describe(text, sizeof text, pg_page_of(map, 1), 1);
    assert_string_equal(text, "rank 1 has left (at its start)");
    pg_shm_unmap(map);
    close(fd);
}

/* A rank that ends well, or with a message, is told apart from one that died. */
static void leaves(world *w) {
    if (w->rank == 1) {
        pg_page_write(pg_page_mine()->failure, 1024, "x.lua:3: no such file");
        return;
    }
    must_refuse(PG_ECOMM, "rank 1 failed: x.lua:3: no such file while rank 0 waits",
                call_barrier(w, w->group));
}

static void a_rank_leaves(void **state) {
    (void)state;
    run_world(2, leaves);
}

/* One rank's cancel ends what waits on all, and what comes later, until all reform. */
static void cancels(world *w) {
    enum { N = 100000 };
    static float x[N];
    void *t[3], *p;
    for (int round = 0; round < 3; round++) {
        if (w->rank == 2) {
            usleep(50000);
            must_ok(w->ops->cancel(w->group, "recipe changed"));
        } else {
            for (int i = 0; i < 3; i++) {
                must_ok(w->ops->allreduce(w->group, x, N, PG_F32, PG_OP_SUM, &t[i]));
                w->ops->detach(t[i]);
            }
            must_ok(w->ops->recv(w->group, x, 1, PG_F32, 2, &p));
            for (int i = 0; i < 3; i++)
                must_refuse(PG_ECANCEL, "cancelled by rank 2: recipe changed", w->ops->wait(t[i]));
            must_refuse(PG_ECANCEL, "recv (world): cancelled by rank 2", w->ops->wait(p));
        }
        must_refuse(PG_ECANCEL, "recipe changed", call_barrier(w, w->group));
        must_ok(w->ops->reform(w->group));
        for (int i = 0; i < N; i++) x[i] = 1;
        must_ok(call_sum(w, w->group, x, N));
        must(x[0] == 3 && x[N - 1] == 3);
        if (w->rank == 2) must_ok(w->ops->send(w->group, x, 2, PG_F32, 0, &p));
        if (w->rank == 0) must_ok(w->ops->recv(w->group, x, 2, PG_F32, 2, &p));
        if (w->rank != 1) must_end(w, p);
    }
}

static void cancel_and_reform(void **state) {
    (void)state;
    run_world(3, cancels);
}

/* A message that nobody fetched is gone after a reform. */
static void forgets(world *w) {
    float x = 1;
    void *t;
    if (w->rank == 0) {
        must_ok(w->ops->send(w->group, &x, 1, PG_F32, 1, &t));
        must_end(w, t);
    }
    must_ok(w->ops->reform(w->group));
    x = 2;
    if (w->rank == 0) must_ok(w->ops->send(w->group, &x, 1, PG_F32, 1, &t));
    else must_ok(w->ops->recv(w->group, &x, 1, PG_F32, 0, &t));
    must_end(w, t);
    must(x == 2);
}

static void reform_forgets(void **state) {
    (void)state;
    run_world(2, forgets);
}

static void on_alarm(int signal_number) {
    (void)signal_number;
    pg_interrupt(1);
}

/* An interrupt ends the wait at once, and the group for the others. */
static void interrupted(world *w) {
    float x = 0;
    if (w->rank == 0) {
        signal(SIGUSR1, on_alarm);
        pid_t me = getpid();
        if (fork() == 0) {
            usleep(100000);
            kill(me, SIGUSR1);
            _exit(0);
        }
        must_refuse(PG_EINTR, "allreduce (world): interrupted", call_sum(w, w->group, &x, 1));
        pg_interrupt(0);
        wait(NULL);
    } else if (w->rank == 1) {
        must_refuse(PG_ECANCEL, "rank 0 was interrupted in allreduce",
                    call_sum(w, w->group, &x, 1));
    }
    must_ok(w->ops->reform(w->group));
    must_ok(call_sum(w, w->group, &x, 1));
}

static void interrupt(void **state) {
    (void)state;
    run_world(3, interrupted);
}

/* After leaving, calls and waits say so, and free is harmless. */
static void leaves_early(world *w) {
    float x = 0;
    void *t, *g;
    int32_t list[] = {0, 1};
    must_ok(w->ops->split(&g, w->group, list, 2, "pair"));
    must_ok(w->ops->recv(g, &x, 1, PG_F32, 1 - w->rank, &t));
    w->ops->detach(t);
    must_ok(call_barrier(w, w->group));
    w->ops->shutdown();
    must_refuse(PG_ECOMM, "this rank has left its world", w->ops->wait(t));
    must_refuse(PG_ECOMM, "this rank has left its world", call_barrier(w, g));
    must_refuse(PG_ECOMM, "this rank has left its world", w->ops->reform(g));
    w->ops->free(g);
    must_refuse(PG_ECOMM, "has left its world", w->ops->world(&g, &w->rank, &w->size));
}

static void after_shutdown(void **state) {
    (void)state;
    run_world(2, leaves_early);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_compared),   cmocka_unit_test(pairs_are_compared),
        cmocka_unit_test(lists_are_compared),   cmocka_unit_test(time_limit),
        cmocka_unit_test(kill_in_a_collective), cmocka_unit_test(launcher_marks_the_dead),
        cmocka_unit_test(a_rank_leaves),        cmocka_unit_test(cancel_and_reform),
        cmocka_unit_test(reform_forgets),       cmocka_unit_test(interrupt),
        cmocka_unit_test(after_shutdown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
