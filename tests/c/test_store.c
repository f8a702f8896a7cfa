/* test_store.c: the key-value store between ranks: values, waiting, and who is turned away. */
#include "world.h"
#include "../../runtime/backend/store.h"

#define JOB  "a job"
#define LONG 20.0 /* seconds */

static int port_of(int n) { return 10000 + (int)(getpid() % 20000) + n; }

/* A rank in a child; its exit code is what the body returns. */
static pid_t child(int (*body)(int), int argument) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid) return pid;
    alarm(60);
    _exit(body(argument));
}

static int ended(pid_t pid) {
    int status;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int ring_member(int argument) {
    int rank = argument % 100, port = argument / 100, value = 0;
    char key[32];
    pg_store *s;
    must_ok(pg_store_open(&s, "127.0.0.1", port, JOB, rank, 4, LONG));
    for (int turn = 0; turn < 50; turn++) {
        int mine = 1000 * turn + rank, from = (rank + 1) % 4;
        snprintf(key, sizeof key, "%d/%d", turn, rank);
        must_ok(pg_store_set(s, key, &mine, sizeof mine));
        snprintf(key, sizeof key, "%d/%d", turn, from);
        must_ok(pg_store_get(s, key, &value, sizeof value, LONG));
        must(value == 1000 * turn + from);
    }
    snprintf(key, sizeof key, "end/%d", rank);
    must_ok(pg_store_set(s, key, "", 0));
    for (int r = 0; !rank && r < 4; r++) { /* the server leaves last */
        snprintf(key, sizeof key, "end/%d", r);
        must_ok(pg_store_get(s, key, &value, 0, LONG));
    }
    pg_store_close(s, 0);
    return 0;
}

static void test_ranks_exchange(void **state) {
    (void)state;
    pid_t pids[4];
    int base = port_of(0);
    for (int r = 0; r < 4; r++) pids[r] = child(ring_member, 100 * base + (r + 1) % 4);
    for (int r = 0; r < 4; r++) assert_int_equal(ended(pids[r]), 0);
}

static int stranger(int argument) {
    pg_store *s;
    must_refuse(PG_ECOMM, "another job",
                pg_store_open(&s, "localhost", argument, "other", 1, 2, LONG));
    must(!s);
    must_refuse(PG_ECOMM, "rank 1 counts 3 ranks, rank 0 counts 2",
                pg_store_open(&s, "localhost", argument, JOB, 1, 3, LONG));
    return 0;
}

static void test_strangers_are_refused(void **state) {
    (void)state;
    pg_store *s, *again;
    int port = port_of(1), code, value = 7;
    ok(pg_store_open(&s, "localhost", port, JOB, 0, 2, LONG));
    assert_int_equal(ended(child(stranger, port)), 0);
    refuses(PG_ECOMM, "cannot listen", pg_store_open(&again, "localhost", port, JOB, 0, 2, LONG));
    assert_int_equal(pg_store_look(s, &code, "none", &value, sizeof value), -1);
    assert_int_equal(code, PG_OK);
    refuses(PG_ECOMM, "waited 0.05 s for \"none\"", pg_store_get(s, "none", &value, 4, 0.05));
    ok(pg_store_set(s, "four", &value, 4));
    refuses(PG_ECOMM, "has 4 bytes, not 8", pg_store_get(s, "four", &(int64_t){0}, 8, LONG));
    char key[PG_STORE_KEY + 1];
    memset(key, 'k', PG_STORE_KEY);
    key[PG_STORE_KEY] = 0;
    refuses(PG_EINVAL, "store: key of 128", pg_store_set(s, key, "", 0));
    pg_store_close(s, 0);
}

static int orphan(int argument) {
    pg_store *s;
    int64_t value;
    must_ok(pg_store_open(&s, "127.0.0.1", argument, JOB, 1, 2, LONG));
    must_ok(pg_store_set(s, "here", "", 0));
    must_refuse(PG_ECOMM, "rank 0", pg_store_get(s, "never", &value, 8, LONG));
    pg_store_close(s, 0);
    return 0;
}

static void test_rank_0_goes(void **state) {
    (void)state;
    pg_store *s;
    int port = port_of(2), nothing;
    ok(pg_store_open(&s, "127.0.0.1", port, JOB, 0, 2, LONG));
    pid_t pid = child(orphan, port);
    ok(pg_store_get(s, "here", &nothing, 0, LONG));
    pg_store_close(s, 0);
    assert_int_equal(ended(pid), 0);
}

static void test_nobody_there(void **state) {
    (void)state;
    pg_store *s;
    refuses(PG_ECOMM, "MASTER_PORT", pg_store_open(&s, "127.0.0.1", port_of(3), JOB, 1, 2, 0.1));
    assert_null(s);
    refuses(PG_ECOMM, "MASTER_ADDR=", pg_store_open(&s, "no such host", 1, JOB, 1, 2, 0.1));
}

/* Over TCP: an address that is this host's, but not the loopback by name. */
static void test_tcp(void **state) {
    (void)state;
    pg_store *s;
    int port = port_of(4), nothing;
    ok(pg_store_open(&s, "0.0.0.0", port, JOB, 0, 2, LONG));
    fflush(NULL);
    pid_t pid = fork();
    if (!pid) {
        alarm(60);
        pg_store *mine;
        must_ok(pg_store_open(&mine, "0", port, JOB, 1, 2, LONG));
        must_ok(pg_store_set(mine, "here", "", 0));
        pg_store_close(mine, 0);
        _exit(0);
    }
    ok(pg_store_get(s, "here", &nothing, 0, LONG));
    assert_int_equal(ended(pid), 0);
    pg_store_close(s, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_exchange),
        cmocka_unit_test(test_strangers_are_refused),
        cmocka_unit_test(test_rank_0_goes),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_tcp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
