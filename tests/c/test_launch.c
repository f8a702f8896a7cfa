/* test_launch.c: the command line, and the story told of the first death.  What real processes do
 * is in tests/journey/. */
#include "check.h"
#include "../../runtime/backend/page.h"
#include "../../runtime/host/host.h"
#include "../../runtime/host/launch.h"

#include <signal.h>
#include <unistd.h>

/* ---- options ---- */

/* Read one command line, given as words; what it says on stderr goes to said[]. */
static char said[1024];
static int read_words(host_options *o, char **words) {
    int argc = 0, kept = dup(STDERR_FILENO);
    FILE *file = tmpfile();
    assert_non_null(file);
    while (words[argc]) argc++;
    fflush(stderr);
    dup2(fileno(file), STDERR_FILENO);
    int rc = host_options_read(o, argc, words);
    fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(kept);
    rewind(file);
    said[fread(said, 1, sizeof said - 1, file)] = 0;
    fclose(file);
    return rc;
}
#define READ(o, ...) read_words((o), (char *[]){"pgrun", __VA_ARGS__, NULL})
#define REFUSED(part, ...)                                                                         \
    do {                                                                                           \
        host_options refused;                                                                      \
        assert_int_equal(READ(&refused, __VA_ARGS__), HOST_USAGE);                                 \
        if (!strstr(said, (part))) fail_msg("said \"%s\", without \"%s\"", said, (part));          \
    } while (0)

static void test_options(void **state) {
    (void)state;
    host_options o;
    assert_int_equal(READ(&o, "-n", "4", "--device=cpu", "--memory", "1.5G", "x.lua", "--steps=3"),
                     0);
    assert_int_equal(o.ranks, 4);
    assert_string_equal(o.device, "cpu");
    assert_int_equal(o.memory, 3ll << 29);
    assert_string_equal(o.script, "x.lua");
    assert_int_equal(o.nargs, 1);
    assert_string_equal(o.args[0], "--steps=3");
    assert_int_equal(READ(&o, "-n4", "-e", "a()", "-e", "b()"), 0);
    assert_true(o.ranks == 4 && o.codes == 2 && !o.script);
    assert_string_equal(o.code[1], "b()");
    assert_int_equal(READ(&o, "x.lua", "-n", "9", "--nonsense"),
                     0); /* these belong to the script */
    assert_true(o.ranks == 0 && o.nargs == 3);
    assert_int_equal(READ(&o, "--master", "fe80::1:29500", "x.lua"), 0);
    assert_string_equal(o.master_host, "fe80::1");
    assert_int_equal(o.master_port, 29500);
    assert_int_equal(READ(&o, "-n", "auto", "x.lua"), 0);
    assert_true(o.ranks >= 1);
}

static void test_refused(void **state) {
    (void)state;
    REFUSED("-n 0", "-n", "0", "x.lua");
    REFUSED("-n x", "-n", "x", "x.lua");
    REFUSED("-n -3", "-n", "-3", "x.lua");
    REFUSED("-n 4x", "-n4x", "x.lua");
    REFUSED("-n needs a value", "-n");
    REFUSED("did you mean --device", "--dvice", "cpu", "x.lua");
    REFUSED("did you mean --no-jit", "--nojit", "x.lua");
    REFUSED("a device is", "--device", "gpu", "x.lua");
    REFUSED("such as 4G", "--memory", "-1", "x.lua");
    REFUSED("such as 4G", "--memory", "4Q", "x.lua");
    REFUSED("leave out -i", "--nnodes", "2", "--master", "a:1", "--device", "cuda", "-i", "x.lua");
    REFUSED("share memory", "--nnodes", "2", "--master", "a:1", "--device", "cpu", "x.lua");
    REFUSED("--master", "--nnodes", "2", "--device", "cuda", "x.lua");
    REFUSED("HOST:PORT", "--master", "here", "x.lua");
    REFUSED("HOST:PORT", "--master", ":29500", "x.lua");
    REFUSED("HOST:PORT", "--master", "here:70000", "x.lua");
    char far[300] = "";
    memset(far, 'a', 256);
    strcat(far, ":1");
    REFUSED("HOST:PORT", "--master", far, "x.lua");
    REFUSED("below --nnodes", "--node-rank", "1", "x.lua");
}

static void test_for_rank(void **state) {
    (void)state;
    char *words[] = {"pgrun", "-n", "4", "--no-jit", "-e", "-n", "x.lua", "-n", "7", NULL};
    const char *want[] = {"pgrun", "--no-jit", "-e", "-n", "x.lua", "-n", "7"};
    char **kept = host_options_for_rank(9, words);
    assert_non_null(kept);
    for (int i = 0; i < 7; i++) assert_string_equal(kept[i], want[i]);
    assert_null(kept[7]);
    free(kept);
}

/* ---- the report ---- */

static host_world w;

static int make_world(void **state) {
    (void)state;
    w = (host_world){.size = 3, .first = -1};
    w.children = calloc(3, sizeof *w.children);
    w.fd = pg_shm_create(3);
    if (!w.children || w.fd < 0 || pg_shm_map(&w.pages, w.fd) < 0) return -1;
    for (int i = 0; i < 3; i++) w.children[i].rank = i;
    return 0;
}

static int drop_world(void **state) {
    (void)state;
    pg_shm_unmap(w.pages);
    close(w.fd);
    free(w.story);
    free(w.children);
    return 0;
}

static void page_fails(int rank, int64_t at, const char *why) {
    pg_page *p = pg_page_of(w.pages, rank);
    p->failed_at = at;
    pg_page_write(p->failure, sizeof p->failure, why);
}

static void child_ends(int rank, int status) {
    w.children[rank].ended = 1;
    w.children[rank].status = status;
}

static void test_killed(void **state) {
    char text[1400];
    (void)state;
    pg_page *waits = pg_page_of(w.pages, 0);
    pg_page_of(w.pages, 2)->step = 17;
    waits->state = PG_PAGE_WAITING;
    pg_page_write(waits->op, sizeof waits->op, "allreduce");
    pg_page_write(waits->group, sizeof waits->group, "dp");
    pg_page_write(waits->where, sizeof waits->where, "x.lua:14");
    child_ends(1, 0);
    child_ends(2, SIGKILL);
    w.first = report_first(&w, (int[]){2}, 1);
    assert_int_equal(w.first, 2);
    report_write(&w);
    assert_non_null(w.story);
    report_head(text, sizeof text, &w);
    assert_string_equal(text, "pgrun: rank 2 was killed by SIGKILL at step 17\n");
    assert_non_null(strstr(w.story, "rank 0 waits in allreduce (dp) at x.lua:14"));
    assert_non_null(strstr(w.story, "rank 1 had ended well"));
}

static void test_first_is_by_time(void **state) {
    (void)state;
    char text[1200];
    page_fails(0, 200, "rank 1 has left");
    page_fails(1, 100, "x.lua:3: boom");
    child_ends(0, 1 << 8);
    assert_int_equal(report_first(&w, (int[]){0}, 1), 1); /* not ended yet, but it was the first */
    child_ends(1, 1 << 8);
    assert_int_equal(report_first(&w, (int[]){0, 1}, 2), 1);
    report_death(text, sizeof text, &w, 1);
    assert_non_null(strstr(text, "rank 1 failed before the first step: x.lua:3: boom"));
    child_ends(2, SIGSEGV);
    assert_int_equal(report_first(&w, (int[]){0, 1, 2}, 3), 2);
    child_ends(2, 3 << 8);
    report_death(text, sizeof text, &w, 2);
    assert_non_null(strstr(text, "rank 2 ended with exit code 3"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_for_rank),
        cmocka_unit_test_setup_teardown(test_killed, make_world, drop_world),
        cmocka_unit_test_setup_teardown(test_first_is_by_time, make_world, drop_world),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
