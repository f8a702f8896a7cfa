/* test_safetensors_share.c: blocks of columns, and one file written by several processes. */
#include "folder.h"
#include "../../runtime/base/types.h"

enum { ROWS = 523, WIDE = 701, COLS = 290, START = 37, N = ROWS * COLS }; /* several chunks */

static pg_tensor *tensor(int dtype, int64_t count, const void *values) {
    pg_tensor *t;
    ok(pg_tensor_new(&t, dtype, 1, &count));
    if (values) ok(pg_tensor_write(t, 0, values, count * pg_dtype_size(dtype)));
    return t;
}

static pg_safetensors *begun(const char *path, int dtype) {
    pg_safetensors *f;
    ok(pg_safetensors_create(&f, path));
    ok(pg_safetensors_declare(f, "a", PG_U8, 1, (int64_t[]){1}));
    ok(pg_safetensors_declare(f, "w", dtype, 2, (int64_t[]){ROWS, WIDE}));
    ok(pg_safetensors_begin(f));
    return f;
}

static float value_of(int64_t i) { return (float)(i % 241) - 99; } /* exact in bf16 */

/* Numbers [from, to) of the block of COLS columns from START on. */
static void write_part(pg_safetensors *f, int64_t from, int64_t to) {
    float *values = malloc((size_t)(to - from + 1) * sizeof *values);
    for (int64_t k = from; k < to; k++)
        values[k - from] = value_of(START + k / COLS * WIDE + k % COLS);
    pg_tensor *t = tensor(PG_F32, to - from, values);
    ok(pg_safetensors_write_block(f, "w", START, COLS, WIDE, from, t));
    pg_tensor_free(t);
    free(values);
}

static void columns_are(const pg_safetensors *f, int dtype, int64_t from, int64_t to) {
    pg_tensor *t = tensor(dtype, to - from, NULL), *wide = tensor(PG_F32, to - from, NULL);
    float *got = malloc((size_t)(to - from + 1) * sizeof *got);
    ok(pg_safetensors_read_block(f, pg_safetensors_find(f, "w"), START, COLS, WIDE, from, t));
    ok(pg_copy(wide, t));
    ok(pg_tensor_read(wide, 0, got, (to - from) * 4));
    for (int64_t k = from; k < to; k++)
        if (got[k - from] != value_of(START + k / COLS * WIDE + k % COLS))
            fail_msg("number %d of the block is %g", (int)k, (double)got[k - from]);
    free(got);
    pg_tensor_free(t);
    pg_tensor_free(wide);
}

/* Cuts at odd places, in the file's dtype and through a cast, both ways. */
static void test_columns_in_parts(void **state) {
    (void)state;
    static const int dtypes[] = {PG_F32, PG_BF16};
    for (int i = 0; i < 2; i++) {
        pg_safetensors *f = begun(in_folder("columns"), dtypes[i]);
        const char *place = pg_safetensors_share(f);
        assert_non_null(place);
        write_part(f, 140001, N);
        write_part(f, 0, 0);
        write_part(f, 0, 77);
        write_part(f, 77, 140001);
        ok(pg_safetensors_finish(f));
        pg_safetensors_close(f);
        ok(pg_safetensors_open(&f, in_folder("columns")));
        columns_are(f, dtypes[i], 0, N);
        columns_are(f, PG_F32, 78, 140002);
        columns_are(f, PG_F64, 289, 291);
        pg_tensor *row = tensor(PG_F32, WIDE, NULL); /* what nobody wrote stayed 0 */
        float got[WIDE];
        ok(pg_safetensors_read(f, pg_safetensors_find(f, "w"), 0, row));
        ok(pg_tensor_read(row, 0, got, sizeof got));
        assert_true(got[START - 1] == 0 && got[START] == value_of(START) && got[START + COLS] == 0);
        pg_tensor_free(row);
        pg_safetensors_close(f);
    }
}

static void test_blocks_that_do_not_fit(void **state) {
    (void)state;
    pg_safetensors *f = begun(in_folder("fit"), PG_F32);
    pg_tensor *t = tensor(PG_F32, COLS + 1, NULL);
    const int64_t last = (int64_t)ROWS * WIDE - WIDE;
    refuses(PG_ESHAPE, "291 elements from 366000 on, of 366623",
            pg_safetensors_write_block(f, "w", 366000, COLS, WIDE, 0, t));
    ok(pg_safetensors_write_block(f, "w", last - WIDE, COLS, WIDE, 0, t));
    refuses(PG_ESHAPE, "of 366623", pg_safetensors_write_block(f, "w", 0, COLS, WIDE, N - COLS, t));
    refuses(PG_EINVAL, "290 columns of 289", pg_safetensors_write_block(f, "w", 0, 290, 289, 0, t));
    refuses(PG_EINVAL, "number -1", pg_safetensors_write_block(f, "w", 0, 0, 0, -1, t));
    refuses(PG_ESHAPE, "of 366623",
            pg_safetensors_write_block(f, "w", 1, 1, INT64_MAX, INT64_MAX - COLS, t));
    refuses(PG_ESHAPE, "of 366623", pg_safetensors_write_block(f, "w", 0, 0, 0, INT64_MAX, t));
    pg_safetensors_close(f);
    pg_tensor_free(t);
}

/* A child writes the lower half; dies = 1: it is killed before it has synced. */
static int in_child(const char *place, int dies) {
    pid_t pid = fork();
    if (pid == 0) {
        pg_safetensors *f;
        if (pg_safetensors_join(&f, place) < 0) _exit(1);
        write_part(f, N / 2 + 1, N);
        if (dies) raise(SIGKILL);
        int rc = pg_safetensors_sync(f);
        int refused = pg_safetensors_finish(f) == PG_EINVAL; /* its creator's work */
        pg_safetensors_close(f);
        _exit(rc == PG_OK && refused ? 0 : 2);
    }
    int status;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    return status;
}

static void test_two_processes(void **state) {
    (void)state;
    for (int dies = 0; dies < 2; dies++) {
        pg_safetensors *f = begun(in_folder("both"), PG_F32);
        char place[600];
        snprintf(place, sizeof place, "%s", pg_safetensors_share(f));
        int status = in_child(place, dies);
        assert_true(dies ? WIFSIGNALED(status) : status == 0);
        assert_int_equal(files_with(".tmp-"), 1); /* who joined took nothing away */
        write_part(f, 0, N / 2 + 1);
        if (!dies) ok(pg_safetensors_finish(f));
        pg_safetensors_close(f);
        assert_int_equal(files_with(".tmp-"), 0);
        ok(pg_safetensors_open(&f, in_folder("both"))); /* the whole one stands */
        columns_are(f, PG_F32, 0, N);
        pg_safetensors_close(f);
    }
}

static void test_what_cannot_be_joined(void **state) {
    (void)state;
    pg_safetensors *f, *other;
    ok(pg_safetensors_create(&f, in_folder("early")));
    assert_null(pg_safetensors_share(f));
    assert_non_null(strstr(pg_errmsg(), "call begin first"));
    pg_safetensors_close(f);
    refuses(PG_EIO, "No such file", pg_safetensors_join(&f, in_folder("none")));
    put_file(in_folder("torn"), "\7\0\0", 3);
    refuses(PG_EIO, "3 bytes", pg_safetensors_join(&f, in_folder("torn")));
    refuses(PG_EINVAL, "not open", pg_safetensors_sync(NULL));
    f = begun(in_folder("fails"), PG_F32);
    ok(pg_safetensors_join(&other, pg_safetensors_share(f)));
    pg_tensor *t = tensor(PG_F32, 3 * COLS, NULL);
    for (int n = 1; n <= 4; n++) { /* three rows, then the fsync */
        pg_fs_fail_after(n);
        int rc = pg_safetensors_write_block(other, "w", START, COLS, WIDE, 0, t);
        if (rc >= 0) rc = pg_safetensors_sync(other);
        pg_fs_fail_after(0);
        refuses(PG_EIO, "No space left", rc);
    }
    pg_tensor_free(t);
    pg_safetensors_close(f); /* given up: the name is gone while the other still writes */
    ok(pg_safetensors_sync(other));
    pg_safetensors_close(other);
    assert_int_equal(files_with("fails"), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_columns_in_parts, nothing_alive),
        cmocka_unit_test_teardown(test_blocks_that_do_not_fit, nothing_alive),
        cmocka_unit_test_teardown(test_two_processes, nothing_alive),
        cmocka_unit_test_teardown(test_what_cannot_be_joined, nothing_alive),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
