/* test_nccl.c: the part of the NCCL collectives that is ours: lanes, comparing calls, time limits,
 * deaths, cancelling, the end.  NCCL and CUDA are fakes on host memory (fake_nccl.h), so this runs
 * anywhere where their headers are; tests/ranks with DEVICE=cuda do the same on GPUs. */
#include "world.h"

#ifdef PG_WITH_CUDA
#include "fake_nccl.h"

static struct CUstream_st compute;
static void (*body)(world *);
static int apart;   /* each rank is on a host of its own: they meet in the store */
static int one_gpu; /* which is refused, and again where somebody tries once more */

#define OPS   pg_collectives_nccl
#define LARGE 40000 /* i32: calls are compared while they run */

static void join(world *w) {
    cuda.stream = &compute;
    w->ops = &OPS;
    setenv("PG_SHARE_GPU", "1", 1);
    cuda.shared = !one_gpu;
    if (one_gpu) {
        must_refuse(PG_EDEVICE, "would both use one GPU", OPS.world(&w->group, &w->rank, &w->size));
        must_refuse(PG_ECOMM, "could not join its ranks before",
                    OPS.world(&w->group, &w->rank, &w->size));
        _exit(0);
    }
    must_ok(OPS.world(&w->group, &w->rank, &w->size));
    void *t;
    must_ok(OPS.barrier(w->group, &t)); /* before that a rank can miss its world */
}

static void run_ranks(int size, int killed, void (*what)(world *)) {
    pid_t pids[WORLD_MOST];
    int fd = pg_shm_create(size), port = 10000 + (int)(getpid() % 20000);
    fake_open();
    body = what;
    fflush(NULL);
    for (int r = 0; r < size; r++)
        if (!(pids[r] = fork())) {
            world w;
            alarm(60);
            for (int s = 1; s < 32; s++)
                if (s == SIGFPE || s == SIGSEGV || s == SIGBUS || s == SIGILL) signal(s, SIG_DFL);
            rank_environment(r, size, apart ? -1 : fd);
            if (apart) {
                set_number("LOCAL_RANK", 0);
                set_number("LOCAL_WORLD_SIZE", 1);
                set_number("MASTER_PORT", port);
            }
            join(&w);
            body(&w);
            OPS.shutdown();
            _exit(0);
        }
    end_world(pids, size, killed);
    close(fd);
}

/* Wait as the core does, then read as a tensor's reader does. */
static int settle(void *ticket) {
    PG_TRY(OPS.wait(ticket));
    PG_TRY(cuda_wait_stream(cuda.stream, "read"));
    return nccl_lost("read");
}

/* The watchdog breaks the group without a call of ours. */
static void wait_until_broken(world *w) {
    for (int code = 0; !code; fake_nap()) {
        pthread_mutex_lock(&nccl.lock);
        code = ((nccl_group *)w->group)->code;
        pthread_mutex_unlock(&nccl.lock);
    }
}

/* ---- every operation ---- */

static void all_ops(world *w) {
    void *t;
    int32_t x[4] = {w->rank, 1, 2, 3}, parts[16], part[4];
    must_ok(OPS.allreduce(w->group, x, 4, PG_I32, PG_OP_SUM, &t));
    must_ok(settle(t));
    must(x[0] == w->size * (w->size - 1) / 2 && x[3] == 3 * w->size);
    x[0] = w->rank;
    must_ok(OPS.allreduce(w->group, x, 1, PG_I32, PG_OP_MAX, &t));
    must_ok(settle(t));
    must(x[0] == w->size - 1);
    for (int i = 0; i < 4; i++) part[i] = 10 * w->rank + i;
    must_ok(OPS.allgather(w->group, parts, part, 4, PG_I32, &t));
    must_ok(settle(t));
    for (int i = 0; i < 4 * w->size; i++) must(parts[i] == 10 * (i / 4) + i % 4);
    must_ok(OPS.reducescatter(w->group, part, parts, 4, PG_I32, PG_OP_SUM, &t));
    must_ok(settle(t));
    for (int i = 0; i < 4; i++) must(part[i] == w->size * (10 * w->rank + i));
    x[0] = w->rank + 5;
    must_ok(OPS.broadcast(w->group, x, 1, PG_I32, 2, &t));
    must_ok(settle(t));
    must(x[0] == 7);
    must_ok(OPS.barrier(w->group, &t));
    must_ok(OPS.wait(t));
}

/* All send first and receive afterwards, both ways round: the lanes do not wait for each other. */
static void crossing(world *w) {
    int32_t right = (w->rank + 1) % w->size, left = (w->rank + w->size - 1) % w->size;
    static int32_t out[LARGE], in[2][LARGE];
    void *t[4];
    for (int i = 0; i < LARGE; i++) out[i] = w->rank;
    must_ok(OPS.send(w->group, out, LARGE, PG_I32, right, &t[0]));
    must_ok(OPS.send(w->group, out, 7, PG_I32, left, &t[1]));
    must_ok(OPS.recv(w->group, in[0], LARGE, PG_I32, left, &t[2]));
    must_ok(OPS.recv(w->group, in[1], 7, PG_I32, right, &t[3]));
    for (int i = 0; i < 4; i++) must_ok(settle(t[i]));
    must(in[0][LARGE - 1] == left && in[1][6] == right);
}

static void groups(world *w) {
    int32_t mine[2] = {w->rank % 2, w->rank % 2 + 2}, x;
    for (int turn = 0; turn < 3; turn++) {
        void *g, *t;
        must_ok(OPS.split(&g, w->group, mine, 2, "dp"));
        x = w->rank;
        must_ok(OPS.allreduce(g, &x, 1, PG_I32, PG_OP_SUM, &t));
        must_ok(settle(t));
        must(x == 2 * (w->rank % 2) + 2);
        OPS.free(g);
    }
}

static void left_behind(world *w) {
    static int32_t data[LARGE];
    void *t;
    must_ok(OPS.send(w->group, data, 10, PG_I32, (w->rank + 1) % w->size, &t));
    must_ok(OPS.recv(w->group, data, LARGE, PG_I32, (w->rank + 2) % w->size, &t));
    must(OPS.done(t) == 0);
    int64_t start = pg_page_clock();
    OPS.shutdown();
    must(pg_page_clock() - start < 2000000000ll);
}

/* What the device does later comes after a sum that nobody waits for; a message that is
 * dropped holds up nothing. */
static void dropped(world *w) {
    static int32_t x[LARGE], y[7];
    void *sum, *message;
    for (int i = 0; i < LARGE; i++) x[i] = 1;
    must_ok(OPS.allreduce(w->group, x, LARGE, PG_I32, PG_OP_SUM, &sum));
    OPS.drop(sum);
    must_ok(cuda_wait_stream(cuda.stream, "read"));
    must(x[LARGE - 1] == w->size);
    must_ok(OPS.wait(sum));
    must_ok(OPS.send(w->group, y, 7, PG_I32, (w->rank + 1) % w->size, &message));
    OPS.drop(message);
    must_ok(cuda_wait_stream(cuda.stream, "read"));
    must(OPS.done(message) == 0);
}

/* ---- the end ---- */

static pid_t tests;
static void crash(void) {
    if (getpid() != tests) raise(SIGSEGV);
}

/* One rank's communicators do not come to their end: all ranks leave, and no exit handler of a
 * library's runs beside the thread that is in there still. */
static void held_up(world *w) {
    fake_stuck = w->rank == 1;
    OPS.shutdown();
    exit(0);
}

/* ---- calls that differ ---- */

static void small_mismatch(world *w) {
    int32_t x[2] = {7, 7};
    void *t;
    must_refuse(PG_ECOMM, "rank 0 calls allreduce i32 x 1, rank 1 calls allreduce i32 x 2",
                OPS.allreduce(w->group, x, w->rank == 1 ? 2 : 1, PG_I32, PG_OP_SUM, &t));
    must(x[0] == 7 && x[1] == 7);
}

static void large_mismatch(world *w) {
    static int32_t x[LARGE + 1];
    void *t;
    must_ok(OPS.allreduce(w->group, x, LARGE + (w->rank == 1), PG_I32, PG_OP_SUM, &t));
    int64_t start = pg_page_clock();
    int code = OPS.wait(t);
    for (; code == PG_OK && pg_page_clock() - start < 5000000000ll; fake_nap())
        code = nccl_lost("read");
    must(code == PG_ECOMM);
    must(strstr(pg_errmsg(), "i32 x 40000") && strstr(pg_errmsg(), "i32 x 40001"));
    must_refuse(PG_ECOMM, "allreduce (world)",
                OPS.allreduce(w->group, x, 1, PG_I32, PG_OP_SUM, &t));
}

static void message_mismatch(world *w) {
    static int32_t x[16];
    void *t;
    if (w->rank == 0) must_ok(OPS.send(w->group, x, 16, PG_I32, 1, &t));
    else must_ok(OPS.recv(w->group, x, 8, PG_I32, 0, &t));
    int code = 0;
    for (int64_t start = pg_page_clock(); !code && pg_page_clock() - start < 5000000000ll;
         fake_nap())
        code = OPS.done(t) < 0 ? PG_ECOMM : 0;
    if (w->rank == 1) must(code == PG_ECOMM && strstr(pg_errmsg(), "both sides"));
}

/* ---- waiting in vain ---- */

static void time_limit(world *w) {
    static int32_t x[LARGE];
    void *t;
    OPS.timeout(0.5);
    pg_status_step(w->rank);
    if (w->rank == 1) {
        wait_until_broken(w);
        return;
    }
    must_ok(OPS.allreduce(w->group, x, LARGE, PG_I32, PG_OP_SUM, &t));
    must_refuse(PG_ECOMM, "rank 0 waited", settle(t));
    must(strstr(pg_errmsg(), "allreduce") && strstr(pg_errmsg(), "world") &&
         strstr(pg_errmsg(), "PGRUN_TIMEOUT"));
}

static void death(world *w) {
    static int32_t x[LARGE];
    void *t;
    if (w->rank == 1) raise(SIGKILL);
    must_ok(OPS.allreduce(w->group, x, LARGE, PG_I32, PG_OP_SUM, &t));
    must_refuse(PG_ECOMM, "rank 1", settle(t));
    must(strstr(pg_errmsg(), "died"));
}

static void remote_error(world *w) {
    static int32_t x[LARGE];
    void *t;
    if (w->rank == 0) {
        must_ok(OPS.allreduce(w->group, x, LARGE, PG_I32, PG_OP_SUM, &t));
        atomic_store(&fake->failures, ((nccl_group *)w->group)->lanes[0].comm->room + 1);
        must_refuse(PG_ECOMM, "remote error", settle(t));
    } else {
        wait_until_broken(w);
        must_refuse(PG_ECOMM, "remote error", OPS.allreduce(w->group, x, 1, PG_I32, PG_OP_SUM, &t));
    }
}

static void cancel(world *w) {
    static int32_t x[LARGE];
    void *t;
    if (w->rank == 0) {
        usleep(300000); /* the others wait by then */
        must_ok(OPS.cancel(w->group, "enough"));
    } else {
        must_ok(OPS.allreduce(w->group, x, LARGE, PG_I32, PG_OP_SUM, &t));
        must_refuse(PG_ECANCEL, "cancelled by rank 0: enough", settle(t));
    }
    must_refuse(PG_ECANCEL, "enough", OPS.allreduce(w->group, x, 1, PG_I32, PG_OP_SUM, &t));
    must_ok(OPS.reform(w->group));
    all_ops(w);
    crossing(w);
}

static void interrupt(world *w) {
    int32_t x = 1;
    void *t;
    if (w->rank == 0) {
        usleep(300000); /* rank 1 is past the barrier */
        pg_interrupt(1);
        must_refuse(PG_EINTR, "interrupted", OPS.allreduce(w->group, &x, 1, PG_I32, PG_OP_SUM, &t));
        pg_interrupt(0);
    } else {
        usleep(800000); /* rank 0 waits alone by then */
        must_refuse(PG_ECANCEL, "rank 0 was interrupted",
                    OPS.allreduce(w->group, &x, 1, PG_I32, PG_OP_SUM, &t));
    }
}

static void test_all_ops(void **state) { (void)state, run_ranks(4, -1, all_ops); }
static void test_crossing(void **state) { (void)state, run_ranks(4, -1, crossing); }
static void test_groups(void **state) { (void)state, run_ranks(4, -1, groups); }
static void test_left_behind(void **state) { (void)state, run_ranks(4, -1, left_behind); }
static void test_dropped(void **state) { (void)state, run_ranks(3, -1, dropped); }
static void test_held_up(void **state) {
    (void)state;
    tests = getpid();
    atexit(crash);
    run_ranks(3, -1, held_up);
}
static void test_small_mismatch(void **state) { (void)state, run_ranks(3, -1, small_mismatch); }
static void test_large_mismatch(void **state) { (void)state, run_ranks(2, -1, large_mismatch); }
static void test_message_mismatch(void **state) { (void)state, run_ranks(2, -1, message_mismatch); }
static void test_time_limit(void **state) { (void)state, run_ranks(2, -1, time_limit); }
static void test_death(void **state) { (void)state, run_ranks(3, 1, death); }
static void test_remote_error(void **state) { (void)state, run_ranks(2, -1, remote_error); }
static void test_cancel(void **state) { (void)state, run_ranks(4, -1, cancel); }
static void store_cases(world *w) {
    all_ops(w);
    crossing(w);
    groups(w);
    cancel(w);
    if (w->rank == 0) pg_status_fail("rank 0's own trouble");
    else {
        wait_until_broken(w);
        must_refuse(PG_ECOMM, "rank 0's own trouble",
                    nccl_split(&(void *){0}, w->group, NULL, 0, ""));
    }
}

static void test_hosts_apart(void **state) {
    (void)state;
    apart = 1;
    run_ranks(4, -1, store_cases);
    setenv("PG_COMM_CHECK", "1", 1);
    run_ranks(3, -1, small_mismatch);
    unsetenv("PG_COMM_CHECK");
    apart = 0;
}

static void test_one_gpu(void **state) {
    (void)state;
    one_gpu = 1;
    run_ranks(2, -1, NULL);
    one_gpu = 0;
}

static void test_interrupt(void **state) { (void)state, run_ranks(2, -1, interrupt); }

int main(void) {
    const struct CMUnitTest all[] = {
        cmocka_unit_test(test_all_ops),
        cmocka_unit_test(test_crossing),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_left_behind),
        cmocka_unit_test(test_dropped),
        cmocka_unit_test(test_held_up),
        cmocka_unit_test(test_small_mismatch),
        cmocka_unit_test(test_large_mismatch),
        cmocka_unit_test(test_message_mismatch),
        cmocka_unit_test(test_time_limit),
        cmocka_unit_test(test_death),
        cmocka_unit_test(test_remote_error),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_one_gpu),
        cmocka_unit_test(test_interrupt),
        cmocka_unit_test(test_hosts_apart),
    };
    return cmocka_run_group_tests(all, NULL, NULL);
}
#else
static void test_nothing(void **state) {
    (void)state;
    print_message("skipped: built without CUDA's headers\n");
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
