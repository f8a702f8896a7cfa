/* test_comm.c: pg.h's collectives on tensors: checks and messages, groups of one, works that hold
 * their tensors, shapes alone, the status page. */
#include "world.h"

static pg_tensor *tensor(int dtype, int64_t n) {
    pg_tensor *t;
    must_ok(pg_tensor_new(&t, dtype, 1, &n));
    return t;
}

static pg_tensor *filled(int64_t n, double value) {
    pg_tensor *t = tensor(PG_F32, n);
    must_ok(pg_fill(t, value));
    return t;
}

static float at(const pg_tensor *t, int64_t i) {
    float x;
    must_ok(pg_tensor_read(t, i, &x, 4));
    return x;
}

static void free_all(pg_tensor **list, int n) {
    for (int i = 0; i < n; i++) pg_tensor_free(list[i]);
}

static int64_t alive(void) {
    pg_mem m;
    pg_mem_stats(&m);
    return m.tensors;
}

/* Runs in forked ranks of their own, so that each has a fresh process state. */
static void run_ranks(int size, void (*body)(void)) {
    pid_t pids[WORLD_MOST];
    int fd = size > 1 ? pg_shm_create(size) : -1;
    fflush(NULL);
    for (int r = 0; r < size; r++) {
        if ((pids[r] = fork()) != 0) continue;
        alarm(60);
        signal(SIGFPE, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        rank_environment(r, size, fd);
        must_ok(pg_init("cpu", 0));
        must(pg_comm_world() && pg_comm_rank(pg_comm_world()) == r);
        must(pg_comm_size(pg_comm_world()) == size);
        body();
        must(alive() == 0);
        pg_shutdown();
        exit(0);
    }
    if (fd >= 0) close(fd);
    end_world(pids, size, -1);
}

static void alone(void) {
    pg_comm *c = pg_comm_world(), *sub;
    pg_tensor *x = filled(4, 3), *y = filled(4, 0);
    pg_work *w;
    must_ok(pg_allreduce(c, x, PG_OP_SUM, NULL));
    must_ok(pg_broadcast(c, x, 0, NULL));
    must_ok(pg_barrier(c));
    must(at(x, 3) == 3);
    must_ok(pg_allgather(c, y, x, NULL));
    must(at(y, 0) == 3);
    must_ok(pg_fill(x, 5));
    must_ok(pg_reducescatter(c, y, x, PG_OP_MAX, &w));
    must(pg_work_done(w) == 1);
    must_ok(pg_work_wait(w));
    must(at(y, 3) == 5);
    must_refuse(PG_EINVAL, "send (world): peer 0 is this rank itself", pg_send(c, x, 0, NULL));
    must_refuse(PG_EINVAL, "recv (world): peer 1; the group has ranks 0 to 0",
                pg_recv(c, x, 1, NULL));
    must_ok(pg_comm_split(&sub, c, (int32_t[]){0}, 1, "tp"));
    must(pg_comm_size(sub) == 1);
    must_ok(pg_allreduce(sub, x, PG_OP_SUM, NULL));
    must_ok(pg_comm_cancel(sub, "nothing waits"));
    must_ok(pg_comm_reform(sub));
    pg_comm_free(sub);
    pg_comm_free(c); /* the world stays */
    must_ok(pg_barrier(c));
    free_all((pg_tensor *[]){x, y}, 2);
}

static void a_world_of_one(void **state) {
    (void)state;
    run_ranks(1, alone);
}

static void on_two(void) {
    pg_comm *c = pg_comm_world();
    int me = pg_comm_rank(c);
    pg_tensor *x = filled(6, me + 1), *y = filled(12, 0), *z = filled(3, 0);
    must_ok(pg_allreduce(c, x, PG_OP_SUM, NULL));
    must(at(x, 5) == 3);
    must_ok(pg_fill(x, me));
    must_ok(pg_allgather(c, y, x, NULL));
    must(at(y, 5) == 0 && at(y, 6) == 1);
    must_ok(pg_reducescatter(c, z, x, PG_OP_MAX, NULL));
    must(at(z, 2) == 1);
    must_ok(pg_broadcast(c, y, 1, NULL));
    must_ok(me ? pg_send(c, y, 0, NULL) : pg_recv(c, y, 1, NULL));
    must(at(y, 6) == 1);
    free_all((pg_tensor *[]){x, y, z}, 3);
}

static void collectives_of_tensors(void **state) {
    (void)state;
    run_ranks(2, on_two);
}

/* Every mistake is refused before the peers hear of it. */
static void mistakes(void) {
    pg_comm *c = pg_comm_world(), *g;
    pg_tensor *x = filled(6, 1), *y = filled(11, 0), *h = tensor(PG_BF16, 12),
              *b = tensor(PG_U8, 4), *l = tensor(PG_I16, 4);
    must_refuse(PG_EINVAL, "allreduce: the group is missing", pg_allreduce(NULL, x, 0, NULL));
    must_refuse(PG_EINVAL, "allreduce: a tensor is missing", pg_allreduce(c, NULL, 0, NULL));
    must_refuse(PG_EINVAL, "allreduce: reduce op 3", pg_allreduce(c, x, 3, NULL));
    must_refuse(PG_EINVAL, "allreduce: u8", pg_allreduce(c, b, PG_OP_SUM, NULL));
    must_refuse(PG_EINVAL, "allreduce: i16 is not summed", pg_allreduce(c, l, PG_OP_SUM, NULL));
    must_refuse(PG_ESHAPE, "allgather (world): [11] f32 for 2 ranks and [6] f32 for one",
                pg_allgather(c, y, x, NULL));
    must_refuse(PG_ESHAPE, "dtypes must be equal", pg_allgather(c, h, x, NULL));
    must_refuse(PG_ESHAPE, "reducescatter (world)", pg_reducescatter(c, x, y, PG_OP_SUM, NULL));
    must_refuse(PG_EINVAL, "broadcast (world): root 2; the group has ranks 0 to 1",
                pg_broadcast(c, x, 2, NULL));
    must_refuse(PG_EINVAL, "send (world): peer -1", pg_send(c, x, -1, NULL));
    must_refuse(PG_EINVAL, "itself", pg_recv(c, x, pg_comm_rank(c), NULL));
    must_refuse(PG_EINVAL, "work", pg_work_wait(NULL));
    must_refuse(PG_EINVAL, "work", pg_work_done(NULL));
    must_refuse(PG_EINVAL, "rank 2; group world has ranks 0 to 1",
                pg_comm_split(&g, c, (int32_t[]){0, 2}, 2, "dp"));
    must_refuse(PG_EINVAL, "listed twice", pg_comm_split(&g, c, (int32_t[]){1, 1}, 2, "dp"));
    must_refuse(PG_EINVAL, "3 ranks out of group world",
                pg_comm_split(&g, c, (int32_t[]){0, 1, 0}, 3, "dp"));
    must_refuse(PG_EINVAL, "is not in its list",
                pg_comm_split(&g, c, (int32_t[]){1 - pg_comm_rank(c)}, 1, "dp"));
    must_ok(pg_storage_drop(x, "block 3"));
    must_refuse(PG_EINVAL, "block 3", pg_allreduce(c, x, PG_OP_SUM, NULL));
    pg_interrupt(1);
    must_refuse(PG_EINTR, "interrupted", pg_barrier(c));
    pg_interrupt(0);
    must_ok(pg_barrier(c));
    free_all((pg_tensor *[]){x, y, h, b, l}, 5);
}

static void mistakes_are_refused(void **state) {
    (void)state;
    run_ranks(2, mistakes);
}

/* A tensor freed while its collective runs lives until the wait. */
static void freed_early(void) {
    enum { N = 1 << 20 };
    pg_comm *c = pg_comm_world(), *g;
    pg_work *works[4];
    must_ok(pg_comm_split(&g, c, (int32_t[]){0, 1}, 2, "dp"));
    pg_tensor *keep = filled(N, pg_comm_rank(c) + 1);
    for (int i = 0; i < 4; i++) {
        pg_tensor *x = filled(N, 1);
        must_ok(pg_allreduce(i % 2 ? g : c, x, PG_OP_SUM, &works[i]));
        pg_tensor_free(x);
    }
    must(alive() == 5);
    must_ok(pg_allreduce(g, keep, PG_OP_SUM, NULL)); /* overtakes nothing of its own group */
    must(at(keep, N - 1) == 3);
    must(pg_work_done(works[3]) == 1);
    for (int i = 0; i < 4; i++) must_ok(pg_work_wait(works[i]));
    must(alive() == 1);
    pg_tensor_free(keep);
    pg_comm_free(g);
}

static void works_hold_tensors(void **state) {
    (void)state;
    run_ranks(2, freed_early);
}

/* Nor is its storage dropped before somebody has waited, or nobody will and it is through. */
static void dropped_early(void) {
    pg_comm *c = pg_comm_world();
    pg_tensor *x = filled(1 << 20, 1), *half;
    int64_t n = 1 << 19;
    pg_work *w;
    must_ok(pg_tensor_view(&half, x, 0, 1, &n));
    for (int waits = 1; waits >= 0; waits--) {
        must_ok(pg_allreduce(c, half, PG_OP_SUM, &w));
        must_refuse(PG_EINVAL, "drop: a collective works on block 3, and nobody has waited for it",
                    pg_storage_drop(x, "block 3"));
        if (waits) must_ok(pg_work_wait(w));
        else pg_work_drop(w);
        must_ok(pg_barrier(c)); /* overtakes nothing of its own group */
        must_ok(pg_storage_drop(x, "block 3"));
        must_ok(pg_storage_fill(x));
        must_ok(pg_fill(x, 1));
    }
    pg_tensor_free(half), pg_tensor_free(x);
}

static void works_hold_storages(void **state) {
    (void)state;
    run_ranks(2, dropped_early);
}

/* On shapes alone the checks stand and nothing is sent. */
static void shapes(void) {
    pg_comm *c = pg_comm_world();
    pg_work *w;
    must(pg_shape_only(1) == 0);
    pg_tensor *x = tensor(PG_F32, 6), *y = tensor(PG_F32, 12);
    if (pg_comm_rank(c) == 0) {
        must_ok(pg_allreduce(c, x, PG_OP_SUM, &w));
        must_ok(pg_work_wait(w));
        must_ok(pg_allgather(c, y, x, NULL));
        must_refuse(PG_ESHAPE, "counts 2 to 1", pg_allgather(c, x, y, NULL));
        must_ok(pg_recv(c, x, 1, NULL));
    }
    pg_shape_only(0);
    must_ok(pg_barrier(c));
    free_all((pg_tensor *[]){x, y}, 2);
}

static void shapes_alone(void **state) {
    (void)state;
    run_ranks(2, shapes);
}

/* Handles may outlive the world. */
static void late_frees(void) {
    pg_comm *c = pg_comm_world(), *g;
    pg_work *w;
    must_ok(pg_comm_split(&g, c, (int32_t[]){0, 1}, 2, "dp"));
    pg_tensor *x = filled(3, 1);
    must_ok(pg_recv(g, x, 1 - pg_comm_rank(c), &w));
    must_ok(pg_barrier(c));
    pg_tensor_free(x);
    pg_shutdown();
    must_refuse(PG_ECOMM, "left its world", pg_work_wait(w));
    pg_comm_free(g);
    _exit(0); /* the count of handles stands still after a shutdown */
}

static void frees_after_shutdown(void **state) {
    (void)state;
    run_ranks(2, late_frees);
}

static void pages(void) {
    pg_comm *c = pg_comm_world();
    int fd;
    pg_status_step(12 + pg_comm_rank(c));
    pg_status_where("models/x.lua:14");
    pg_status_fail(pg_comm_rank(c) ? "x.lua:3: it broke" : NULL);
    must_ok(pg_barrier(c));
    const pg_page *p = pg_page_of(pg_page_map(&fd), 1);
    must(p->step == 13 && !strcmp(p->where, "models/x.lua:14"));
    must(!strcmp(p->failure, "x.lua:3: it broke") &&
         !pg_page_mine()->failure[0] == !pg_comm_rank(c));
    must_ok(pg_barrier(c));
}

static void status_pages(void **state) {
    (void)state;
    run_ranks(2, pages);
}

/* A call that gave up breaks its group until it is reformed. */
static void split_and_time_limit(void) {
    pg_comm *c = pg_comm_world();
    pg_tensor *x = filled(2, 1);
    unsetenv("PGRUN_TIMEOUT");
    must(pg_comm_timeout(0.2) == 600);
    if (pg_comm_rank(c) == 0) {
        must_refuse(PG_ECOMM, "time limit 0.2 s", pg_recv(c, x, 1, NULL));
        must_refuse(PG_ECOMM, "gave up", pg_barrier(c));
    }
    must(pg_comm_timeout(30) == 0.2);
    must_ok(pg_comm_reform(c));
    must_ok(pg_allreduce(c, x, PG_OP_SUM, NULL));
    must(at(x, 0) == 2);
    pg_tensor_free(x);
}

static void time_limit_and_reform(void **state) {
    (void)state;
    run_ranks(2, split_and_time_limit);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_world_of_one),        cmocka_unit_test(collectives_of_tensors),
        cmocka_unit_test(mistakes_are_refused),  cmocka_unit_test(works_hold_tensors),
        cmocka_unit_test(shapes_alone),          cmocka_unit_test(frees_after_shutdown),
        cmocka_unit_test(works_hold_storages),   cmocka_unit_test(status_pages),
        cmocka_unit_test(time_limit_and_reform),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
