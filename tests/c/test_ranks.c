/* test_ranks.c: ranks as the launchers' variables tell them, and joining where no launcher of ours
 * passed a block on. */
#include "world.h"
#include "../../runtime/backend/ranks.h"
#include <dirent.h>

static const char *const known[] = {"RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "TORCHELASTIC_RUN_ID",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                                    "PMIX_NAMESPACE",
                                    "PMI_RANK",
                                    "PMI_SIZE",
                                    "MPI_LOCALRANKID",
                                    "MPI_LOCALNRANKS",
                                    "SLURM_PROCID",
                                    "SLURM_NTASKS",
                                    "SLURM_LOCALID",
                                    "SLURM_NODEID",
                                    "SLURM_NNODES",
                                    "SLURM_STEP_NODELIST",
                                    "SLURM_JOB_ID",
                                    "SLURM_STEP_ID",
                                    "SLURM_STEP_TASKS_PER_NODE",
                                    "SLURM_TASKS_PER_NODE",
                                    "PG_SHM_FD",
                                    "PGRUN_TIMEOUT"};

static int clean(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) unsetenv(known[i]);
    return 0;
}

/* "A=1 B=2" into the environment. */
static void set_all(const char *text) {
    char copy[512], *next = copy;
    clean(NULL);
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word; (word = strsep(&next, " "));) {
        char *value = strchr(word, '=');
        *value = 0;
        setenv(word, value + 1, 1);
    }
}

static void reads(const char *environment, const char *source, int rank, int size, int local_rank,
                  int local_size) {
    pg_ranks r;
    if (*environment) set_all(environment);
    ok(pg_ranks_read(&r));
    assert_string_equal(r.source, source);
    assert_int_equal(r.rank, rank);
    assert_int_equal(r.size, size);
    assert_int_equal(r.local_rank, local_rank);
    assert_int_equal(r.local_size, local_size);
}

static void four_launchers(void **state) {
    (void)state;
    reads("", "", 0, 1, 0, 1);
    reads("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", "torchrun", 5, 8, 1, 4);
    reads("RANK=5 WORLD_SIZE=8", "torchrun", 5, 8, 5, 8);
    reads("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 "
          "OMPI_COMM_WORLD_LOCAL_SIZE=3",
          "OpenMPI", 2, 3, 2, 3);
    reads("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1", "MPICH", 1, 2, 0, 1);
    reads("SLURM_PROCID=0 SLURM_NTASKS=1", "", 0, 1, 0, 1); /* an interactive allocation */
    reads("SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=3 SLURM_NODEID=0 SLURM_NNODES=1", "Slurm", 3,
          4, 3, 4);
    reads("SLURM_PROCID=18 SLURM_NTASKS=20 SLURM_LOCALID=2 SLURM_NODEID=2 SLURM_NNODES=3 "
          "SLURM_STEP_TASKS_PER_NODE=8(x2),4",
          "Slurm", 18, 20, 2, 4);
    /* the first family that is there counts */
    reads("RANK=0 WORLD_SIZE=2 SLURM_PROCID=7 SLURM_NTASKS=8", "torchrun", 0, 2, 0, 2);
}

static void where_rank_0_is(void **state) {
    (void)state;
    pg_ranks r;
    set_all("RANK=0 WORLD_SIZE=2");
    ok(pg_ranks_read(&r));
    assert_string_equal(r.host, "127.0.0.1");
    assert_int_equal(r.port, 29500);
    set_all("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=gnode[10,20,25-27] "
            "SLURM_JOB_ID=123456 SLURM_STEP_ID=2");
    ok(pg_ranks_read(&r));
    assert_string_equal(r.host, "gnode10");
    assert_int_equal(r.port, 23456);
    assert_string_equal(r.job, "123456.2");
    setenv("MASTER_ADDR", "10.0.0.1", 1);
    setenv("MASTER_PORT", "1234", 1);
    ok(pg_ranks_read(&r));
    assert_string_equal(r.host, "10.0.0.1");
    assert_int_equal(r.port, 1234);
}

static void wrong_values(void **state) {
    (void)state;
    pg_ranks r;
    set_all("RANK=0");
    refuses(PG_EINVAL, "RANK is set, WORLD_SIZE is not", pg_ranks_read(&r));
    set_all("WORLD_SIZE=4");
    refuses(PG_EINVAL, "WORLD_SIZE is set, RANK is not", pg_ranks_read(&r));
    set_all("RANK=4 WORLD_SIZE=4");
    refuses(PG_EINVAL, "RANK=4; it is an integer from 0 to 3", pg_ranks_read(&r));
    set_all("RANK=x WORLD_SIZE=4");
    refuses(PG_EINVAL, "RANK=x; it is an integer", pg_ranks_read(&r));
    set_all("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3");
    refuses(PG_EINVAL, "LOCAL_WORLD_SIZE=3", pg_ranks_read(&r));
    set_all("RANK=0 WORLD_SIZE=2 MASTER_PORT=70000");
    refuses(PG_EINVAL, "MASTER_PORT=70000; it is an integer from 1 to 65535", pg_ranks_read(&r));
    set_all("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_TASKS_PER_NODE=4");
    refuses(PG_EINVAL, "does not tell the tasks of this node", pg_ranks_read(&r));
}

/* Whoever started them: what a rank takes of its host's memory is its share. */
static void memory_is_shared_out(void **state) {
    (void)state;
    pid_t child;
    set_all("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=4");
    fflush(NULL);
    if ((child = fork()) == 0) {
        pg_mem m;
        must_ok(pg_init("cpu", 0));
        pg_mem_stats(&m);
        must((double)m.limit < 0.3 * (double)pg_backend_device()->memory->available());
        _exit(0);
    }
    end_world(&child, 1, -1);
    set_all("RANK=0 WORLD_SIZE=two");
    assert_int_equal(pg_ranks_here(), 1);
}

/* What the cpu backend makes of the environment. */
static void worlds_refused(void **state) {
    (void)state;
    void *impl;
    int rank, size;
    set_all("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2");
    refuses(PG_EINVAL, "2 of 4 ranks are on this host (torchrun)",
            pg_collectives_shm.world(&impl, &rank, &size));
    set_all("RANK=0 WORLD_SIZE=2 PGRUN_TIMEOUT=soon");
    refuses(PG_EINVAL, "PGRUN_TIMEOUT=soon", pg_collectives_shm.world(&impl, &rank, &size));
    set_all("RANK=0 WORLD_SIZE=2 PG_SHM_FD=987");
    refuses(PG_ECOMM, "file descriptor 987", pg_collectives_shm.world(&impl, &rank, &size));
    set_all("RANK=1 WORLD_SIZE=2 MASTER_PORT=29871 PGRUN_TIMEOUT=0.2");
    refuses(PG_ECOMM, "rank 0 did not come", pg_collectives_shm.world(&impl, &rank, &size));
    set_all("RANK=0 WORLD_SIZE=3 MASTER_PORT=29871 PGRUN_TIMEOUT=0.2");
    refuses(PG_ECOMM, "only 1 of 3 ranks joined within 0.2 s; missing: 1, 2",
            pg_collectives_shm.world(&impl, &rank, &size));
    set_all("RANK=0 WORLD_SIZE=1");
    ok(pg_collectives_shm.world(&impl, &rank, &size));
    assert_null(impl);
}

static int files_in_shm(void) {
    int n = 0;
    DIR *d = opendir("/dev/shm");
    for (struct dirent *e; d && (e = readdir(d));) n += strstr(e->d_name, "pg") != NULL;
    if (d) closedir(d);
    return n;
}

static void sums(world *w) {
    int64_t x = w->rank;
    void *t;
    must_ok(w->ops->allreduce(w->group, &x, 1, PG_I64, PG_OP_SUM, &t));
    must_end(w, t);
    must(x == w->size * (w->size - 1) / 2);
    must(files_in_shm() == 0);
}

static void ranks_find_each_other(void **state) {
    (void)state;
    pid_t pids[4];
    set_all("MASTER_PORT=29872 PGRUN_TIMEOUT=20");
    start_world(pids, 4, -1, sums);
    end_world(pids, 4, -1);
    start_world(pids, 4, -1, sums); /* the same name is free again at once */
    end_world(pids, 4, -1);
    assert_int_equal(files_in_shm(), 0);
}

/* A rank 0 that died in waiting leaves nothing to be joined by mistake. */
static void nothing_stale_is_joined(void **state) {
    (void)state;
    pid_t pids[3];
    set_all("MASTER_PORT=29873 PGRUN_TIMEOUT=20");
    fflush(NULL);
    pid_t old = fork();
    if (old == 0) be_rank(0, 3, -1, sums);
    usleep(100000);
    kill(old, SIGKILL);
    waitpid(old, NULL, 0);
    start_world(pids, 3, -1, sums);
    end_world(pids, 3, -1);
}

/* Two ranks 1: the second is told, and rank 0 names who is missing. */
static void a_rank_comes_twice(void **state) {
    (void)state;
    pid_t pids[3];
    static const int ranks[3] = {0, 1, 1};
    set_all("MASTER_PORT=29874 PGRUN_TIMEOUT=1.5");
    fflush(NULL);
    for (int i = 0; i < 3; i++) {
        if ((pids[i] = fork()) != 0) continue;
        void *impl;
        int rank, size;
        rank_environment(ranks[i], 3, -1);
        if (i == 2) usleep(300000);
        if (i == 0)
            must_refuse(PG_ECOMM, "2 of 3 ranks joined within 1.5 s; missing: 2",
                        pg_collectives_shm.world(&impl, &rank, &size));
        if (i == 1) must_ok(pg_collectives_shm.world(&impl, &rank, &size));
        if (i == 2)
            must_refuse(PG_ECOMM, "refused by rank 0: rank 1 is out of range or there twice",
                        pg_collectives_shm.world(&impl, &rank, &size));
        exit(0);
    }
    end_world(pids, 3, -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(four_launchers, clean),
        cmocka_unit_test_setup(where_rank_0_is, clean),
        cmocka_unit_test_setup(wrong_values, clean),
        cmocka_unit_test_setup(memory_is_shared_out, clean),
        cmocka_unit_test_setup(worlds_refused, clean),
        cmocka_unit_test_setup(ranks_find_each_other, clean),
        cmocka_unit_test_setup(nothing_stale_is_joined, clean),
        cmocka_unit_test_setup(a_rank_comes_twice, clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
