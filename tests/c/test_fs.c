/* test_fs.c: folders and whole files; above all that a failed or killed write loses nothing. */
#include "folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

static void test_folders(void **state) {
    (void)state;
    int64_t size;
    double mtime;
    int is_dir;
    ok(pg_fs_mkdir(in_folder("a/b//c/")));
    ok(pg_fs_mkdir(in_folder("a/b/c")));
    ok(pg_fs_stat(in_folder("a/b/c"), &size, &mtime, &is_dir));
    assert_int_equal(is_dir, 1);
    ok(pg_fs_write(in_folder("a/b/two"), "12345", 5));
    ok(pg_fs_write(in_folder("a/b/One"), "", 0));
    assert_string_equal(pg_fs_list(in_folder("a/b")), "One\nc\ntwo");
    assert_string_equal(pg_fs_list(in_folder("a/b/c")), "");
    ok(pg_fs_stat(in_folder("a/b/two"), &size, &mtime, &is_dir));
    assert_int_equal(size, 5);
    assert_int_equal(is_dir, 0);
    assert_true(mtime > 1e9);
    refuses(PG_EIO, "Not a directory", pg_fs_mkdir(in_folder("a/b/two")));
    refuses(PG_EIO, "Not a directory", pg_fs_mkdir(in_folder("a/b/two/x")));
    refuses(PG_EIO, "No such file", pg_fs_stat(in_folder("none"), &size, &mtime, &is_dir));
    refuses(PG_EINVAL, "empty", pg_fs_mkdir(""));
    refuses(PG_EINVAL, "empty", pg_fs_stat(NULL, NULL, NULL, NULL));
    assert_null(pg_fs_list(in_folder("none")));
    assert_non_null(strstr(pg_errmsg(), "No such file"));
    assert_null(pg_fs_list(NULL));
    ok(pg_fs_sync(in_folder("a")));
    ok(pg_fs_remove(in_folder("a")));
}

static void test_glob_sorts_by_bytes(void **state) {
    (void)state;
    const char *names[] = {"x_10.bin", "x_2.bin", "X_1.bin", "x_1.txt"};
    for (int i = 0; i < 4; i++) put_file(in_folder(names[i]), "1", 1);
    char want[1200];
    snprintf(want, sizeof want, "%s\n%s\n%s", in_folder("X_1.bin"), in_folder("x_10.bin"),
             in_folder("x_2.bin"));
    assert_string_equal(pg_fs_glob(in_folder("*.bin")), want);
    assert_string_equal(pg_fs_glob(in_folder("*.none")), "");
    put_file(in_folder("line\nbreak.nl"), "1", 1);
    assert_null(pg_fs_glob(in_folder("*.nl")));
    assert_non_null(strstr(pg_errmsg(), "line break"));
    ok(pg_fs_remove(in_folder("line\nbreak.nl")));
}

static void test_remove_spares_what_a_link_points_to(void **state) {
    (void)state;
    ok(pg_fs_mkdir(in_folder("kept")));
    put_file(in_folder("kept/file"), "1", 1);
    ok(pg_fs_mkdir(in_folder("gone/deep")));
    assert_int_equal(symlink(in_folder("kept"), in_folder("gone/deep/link")), 0);
    ok(pg_fs_remove(in_folder("gone/")));
    ok(pg_fs_remove(in_folder("gone")));
    file_is(in_folder("kept/file"), "1", 1);
    refuses(PG_EIO, "No such file", pg_fs_stat(in_folder("gone"), NULL, NULL, NULL));
    refuses(PG_EINVAL, "refused", pg_fs_remove("/"));
    refuses(PG_EINVAL, "refused", pg_fs_remove(in_folder("kept/..")));
}

static void test_read_and_rename(void **state) {
    (void)state;
    const char bytes[] = {'a', 0, '\n', (char)0xff};
    int64_t n;
    ok(pg_fs_write(in_folder("r"), bytes, 4));
    ok(pg_fs_rename(in_folder("r"), in_folder("s")));
    file_is(in_folder("s"), bytes, 4);
    const char *status = pg_fs_read("/proc/self/status", &n); /* its size reads 0 */
    assert_true(status && n > 100 && strstr(status, "Pid:"));
    assert_null(pg_fs_read(folder, &n));
    assert_non_null(strstr(pg_errmsg(), "is a folder"));
    assert_null(pg_fs_read(in_folder("none"), &n));
    refuses(PG_EIO, "No such file", pg_fs_rename(in_folder("none"), in_folder("t")));
    refuses(PG_EIO, "No such file", pg_fs_write(in_folder("none/x"), "1", 1));
    refuses(PG_EINVAL, "names no file", pg_fs_write(in_folder("x/"), "1", 1));
    refuses(PG_EINVAL, "write", pg_fs_write(in_folder("x"), NULL, 1));
    assert_true(strlen(pg_fs_hostname()) > 0);
}

/* Known hashes, a content of several pieces, and each byte counts. */
static void test_hash(void **state) {
    (void)state;
    enum { BYTES = (9 << 20) + 13 };
    uint64_t got;
    put_file(in_folder("h"), "", 0);
    ok(pg_fs_hash(in_folder("h"), &got));
    assert_true(got == 0xef46db3751d8e999); /* of nothing: xxHash's specification, 0.1.1 */
    unsigned char *bytes = malloc(BYTES);
    for (int i = 0; i < BYTES; i++) bytes[i] = (unsigned char)(i * 2654435761u >> 24);
    put_file(in_folder("h"), bytes, BYTES);
    ok(pg_fs_hash(in_folder("h"), &got));
    uint64_t whole = pg_hash(bytes, BYTES, 0);
    assert_true(got == whole);
    static const int places[] = {0, 4 << 20, BYTES / 2, BYTES - 1};
    for (int i = 0; i < 4; i++) {
        bytes[places[i]] ^= 1;
        put_file(in_folder("h"), bytes, BYTES);
        ok(pg_fs_hash(in_folder("h"), &got));
        assert_true(got != whole);
        bytes[places[i]] ^= 1;
    }
    free(bytes);
    refuses(PG_EIO, "No such file", pg_fs_hash(in_folder("none"), &got));
    refuses(PG_EIO, "Is a directory", pg_fs_hash(folder, &got));
    refuses(PG_EINVAL, "empty", pg_fs_hash("", &got));
    pg_interrupt(1);
    refuses(PG_EINTR, "interrupted", pg_fs_hash(in_folder("h"), &got));
    pg_interrupt(0);
    ok(pg_fs_remove(in_folder("h")));
}

/* Write, fsync, rename, fsync of the folder: up to the rename the old content stands. */
static void test_each_failing_call_keeps_the_old_file(void **state) {
    (void)state;
    for (int n = 1; n <= 5; n++) {
        ok(pg_fs_write(in_folder("f"), "old", 3));
        pg_fs_fail_after(n);
        int rc = pg_fs_write(in_folder("f"), "newer", 5);
        pg_fs_fail_after(0);
        assert_int_equal(rc, n <= 4 ? PG_EIO : PG_OK);
        if (rc < 0) assert_non_null(strstr(pg_errmsg(), "No space left"));
        if (rc < 0) assert_non_null(strstr(pg_errmsg(), n < 4 ? in_folder("f") : folder));
        if (n <= 3) file_is(in_folder("f"), "old", 3);
        else file_is(in_folder("f"), "newer", 5);
        assert_int_equal(files_with(".tmp-"), 0);
    }
}

static void test_file_size_limit_is_an_error(void **state) {
    (void)state;
    static char big[100000];
    ok(pg_fs_write(in_folder("limit"), "old", 3));
    struct rlimit before, now;
    signal(SIGXFSZ, SIG_IGN); /* as pgrun does */
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    now = before;
    now.rlim_cur = 65536;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &now), 0);
    int rc = pg_fs_write(in_folder("limit"), big, sizeof big);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(rc, PG_EIO);
    assert_non_null(strstr(pg_errmsg(), "File too large"));
    file_is(in_folder("limit"), "old", 3);
    assert_int_equal(files_with(".tmp-"), 0);
}

static void leave_half_a_file(void) {
    pg_safetensors *f;
    if (pg_safetensors_create(&f, in_folder("k")) < 0 || pg_safetensors_begin(f) < 0) _exit(9);
}

static void test_leftovers_of_the_dead_go(void **state) {
    (void)state;
    ok(pg_fs_write(in_folder("k"), "old", 3));
    in_killed_child(leave_half_a_file);
    assert_int_equal(files_with(".k.tmp-"), 1);
    file_is(in_folder("k"), "old", 3);
    put_file(in_folder(".k.tmp-1"), "pid 1 lives, but holds no lock", 10);
    put_file(in_folder(".k.tmp-1x"), "not ours", 8);
    put_file(in_folder(".kk.tmp-1"), "of another file", 8);
    ok(pg_fs_write(in_folder("k"), "new", 3));
    assert_int_equal(files_with(".k.tmp-"), 1);
    assert_int_equal(files_with(".k.tmp-1x"), 1);
    assert_int_equal(files_with(".kk.tmp-1"), 1);
    file_is(in_folder("k"), "new", 3);
}

/* Two handles on one target: the second is told so, the first goes on unharmed. */
static void test_a_living_writer_is_left_alone(void **state) {
    (void)state;
    pg_safetensors *f;
    ok(pg_safetensors_create(&f, in_folder("busy")));
    refuses(PG_EIO, "being written already", pg_fs_write(in_folder("busy"), "x", 1));
    assert_int_equal(files_with(".busy.tmp-"), 1);
    ok(pg_safetensors_begin(f));
    ok(pg_safetensors_finish(f));
    pg_safetensors_close(f);
    file_is(in_folder("busy"), "\10\0\0\0\0\0\0\0{}      ", 16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_glob_sorts_by_bytes),
        cmocka_unit_test(test_remove_spares_what_a_link_points_to),
        cmocka_unit_test(test_read_and_rename),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_each_failing_call_keeps_the_old_file),
        cmocka_unit_test(test_file_size_limit_is_an_error),
        cmocka_unit_test(test_leftovers_of_the_dead_go),
        cmocka_unit_test(test_a_living_writer_is_left_alone),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
