/* test_safetensors.c: golden bytes, round trips, casts, and saves that fail at every call.  Hostile
 * files are in test_safetensors_hostile.c. */
#include "folder.h"
#include "../../runtime/base/types.h"

#include <signal.h>
#include <sys/resource.h>

static pg_tensor *tensor(int dtype, int64_t count, const void *values) {
    pg_tensor *t;
    ok(pg_tensor_new(&t, dtype, 1, &count));
    if (values) ok(pg_tensor_write(t, 0, values, count * pg_dtype_size(dtype)));
    return t;
}

static pg_safetensors *created(const char *path) {
    pg_safetensors *f;
    ok(pg_safetensors_create(&f, path));
    return f;
}

static pg_safetensors *opened(const char *path) {
    pg_safetensors *f;
    ok(pg_safetensors_open(&f, path));
    return f;
}

/* Sources of both: the format's README and its own tests. */
static void test_golden_bytes(void **state) {
    (void)state;
    pg_safetensors *f = created(in_folder("empty"));
    ok(pg_safetensors_begin(f));
    ok(pg_safetensors_finish(f));
    pg_safetensors_close(f);
    file_is(in_folder("empty"), "\10\0\0\0\0\0\0\0{}      ", 16);

    const char want[] =
        "\100\0\0\0\0\0\0\0"
        "{\"attn.0\":{\"dtype\":\"F32\",\"shape\":[1,2,3],\"data_offsets\":[0,24]}}";
    const float values[6] = {0, 1, 2, 3, 4, 5};
    char whole[8 + 64 + 24];
    memcpy(whole, want, 72);
    memcpy(whole + 72, values, 24);
    f = created(in_folder("attn"));
    ok(pg_safetensors_declare(f, "attn.0", PG_F32, 3, (int64_t[]){1, 2, 3}));
    ok(pg_safetensors_begin(f));
    pg_tensor *t = tensor(PG_F32, 6, values);
    ok(pg_safetensors_write(f, "attn.0", 0, t));
    ok(pg_safetensors_finish(f));
    pg_safetensors_close(f);
    pg_tensor_free(t);
    file_is(in_folder("attn"), whole, sizeof whole);
}

static void test_order_padding_and_metadata(void **state) {
    (void)state;
    pg_safetensors *f = created(in_folder("order"));
    ok(pg_safetensors_set_meta(f, "format", "pt"));
    ok(pg_safetensors_set_meta(f, "author", "old"));
    ok(pg_safetensors_set_meta(f, "author", "\"\xc3\xa9\"\n"));
    ok(pg_safetensors_declare(f, "u", PG_U8, 1, (int64_t[]){3}));
    ok(pg_safetensors_declare(f, "b", PG_F32, 0, NULL));
    ok(pg_safetensors_declare(f, "a", PG_I32, 1, (int64_t[]){1}));
    ok(pg_safetensors_declare(f, "h", PG_BF16, 1, (int64_t[]){1}));
    ok(pg_safetensors_declare(f, "none", PG_F16, 2, (int64_t[]){0, 7}));
    ok(pg_safetensors_declare(f, "z", PG_I64, 1, (int64_t[]){1}));
    refuses(PG_EINVAL, "begin first", pg_safetensors_finish(f));
    ok(pg_safetensors_begin(f));
    refuses(PG_EINVAL, "already", pg_safetensors_declare(f, "x", PG_U8, 0, NULL));
    const int64_t big = 9007199254740993;
    pg_tensor *one = tensor(PG_F32, 1, (float[]){3}), *three = tensor(PG_U8, 3, "abc");
    pg_tensor *i64 = tensor(PG_I64, 1, &big);
    ok(pg_safetensors_write(f, "u", 0, three));
    ok(pg_safetensors_write(f, "a", 0, one));
    ok(pg_safetensors_write(f, "b", 0, one));
    ok(pg_safetensors_write(f, "h", 0, one));
    refuses(PG_EINVAL, "\"z\" got 0 of 1", pg_safetensors_finish(f));
    ok(pg_safetensors_write(f, "z", 0, i64));
    refuses(PG_EINVAL, "not declared", pg_safetensors_write(f, "y", 0, one));
    refuses(PG_ESHAPE, "3 elements from 1 on, of 3", pg_safetensors_write(f, "u", 1, three));
    ok(pg_safetensors_finish(f));
    refuses(PG_EINVAL, "not open for writing", pg_safetensors_finish(f));
    pg_safetensors_close(f);

    f = opened(in_folder("order"));
    const char *names[] = {"z", "a", "b", "h", "none", "u"}; /* by alignment, then name */
    assert_int_equal(pg_safetensors_count(f), 6);
    for (int i = 0; i < 6; i++) {
        assert_string_equal(pg_safetensors_name(f, i), names[i]);
        assert_int_equal(pg_safetensors_find(f, names[i]), i);
    }
    assert_int_equal(pg_safetensors_find(f, "q"), -1);
    assert_string_equal(pg_safetensors_meta(f, "author"), "\"\xc3\xa9\"\n");
    assert_string_equal(pg_safetensors_meta(f, "format"), "pt");
    assert_null(pg_safetensors_meta(f, "none"));
    int dtype, ndim;
    int64_t dims[8], value;
    ok(pg_safetensors_info(f, 4, &dtype, &ndim, dims));
    assert_true(dtype == PG_F16 && ndim == 2 && dims[0] == 0 && dims[1] == 7);
    refuses(PG_EINVAL, "entry 6 of 6", pg_safetensors_info(f, 6, &dtype, &ndim, dims));
    ok(pg_safetensors_read(f, 0, 0, i64));
    ok(pg_tensor_read(i64, 0, &value, 8));
    assert_int_equal(value, big);
    refuses(PG_ESHAPE, "of 1", pg_safetensors_read(f, 0, 0, three));
    pg_safetensors_close(f);
    pg_tensor_free(one);
    pg_tensor_free(three);
    pg_tensor_free(i64);
}

/* Long enough for several chunks on both ways, with a part written and read at an odd place. */
static void test_long_tensor_in_parts(void **state) {
    (void)state;
    enum { N = 300001, HALF = 140003 };
    float *values = malloc(N * sizeof *values), *back = malloc(N * sizeof *back);
    for (int i = 0; i < N; i++) values[i] = (float)(i % 251) - 100; /* exact in bf16 */
    pg_tensor *left = tensor(PG_F32, HALF, values),
              *right = tensor(PG_F32, N - HALF, values + HALF);
    pg_safetensors *f = created(in_folder("long"));
    ok(pg_safetensors_declare(f, "a", PG_U8, 1, (int64_t[]){1}));
    ok(pg_safetensors_declare(f, "w", PG_BF16, 1, (int64_t[]){N}));
    ok(pg_safetensors_begin(f));
    ok(pg_safetensors_write(f, "w", HALF, right));
    ok(pg_safetensors_write(f, "w", 0, left));
    pg_tensor *byte = tensor(PG_U8, 1, "x");
    ok(pg_safetensors_write(f, "a", 0, byte));
    ok(pg_safetensors_finish(f));
    pg_safetensors_close(f);

    f = opened(in_folder("long"));
    pg_tensor *all = tensor(PG_F32, N, NULL), *middle = tensor(PG_I32, 3, NULL);
    ok(pg_safetensors_read(f, pg_safetensors_find(f, "w"), 0, all));
    ok(pg_tensor_read(all, 0, back, N * sizeof *back));
    assert_memory_equal(back, values, N * sizeof *back);
    int32_t three[3];
    ok(pg_safetensors_read(f, pg_safetensors_find(f, "w"), HALF - 1, middle));
    ok(pg_tensor_read(middle, 0, three, sizeof three));
    for (int i = 0; i < 3; i++) assert_int_equal(three[i], (int)values[HALF - 1 + i]);
    assert_int_equal(truncate(in_folder("long"), 100), 0);
    refuses(PG_EIO, "shrank", pg_safetensors_read(f, 0, 0, middle));
    pg_safetensors_close(f);
    pg_tensor *made[] = {left, right, byte, all, middle};
    for (int i = 0; i < 5; i++) pg_tensor_free(made[i]);
    free(values);
    free(back);
}

/* One value through a file of dtype `to` and back as f64. */
static double through(int from, const void *value, int to) {
    pg_tensor *t = tensor(from, 1, value), *d = tensor(PG_F64, 1, NULL);
    pg_safetensors *f = created(in_folder("cast"));
    ok(pg_safetensors_declare(f, "x", to, 1, (int64_t[]){1}));
    ok(pg_safetensors_begin(f));
    ok(pg_safetensors_write(f, "x", 0, t));
    ok(pg_safetensors_finish(f));
    pg_safetensors_close(f);
    f = opened(in_folder("cast"));
    ok(pg_safetensors_read(f, 0, 0, d));
    pg_safetensors_close(f);
    double result;
    ok(pg_tensor_read(d, 0, &result, sizeof result));
    pg_tensor_free(t);
    pg_tensor_free(d);
    return result;
}

static void test_casts(void **state) {
    (void)state;
    const struct {
        double value;
        int to;
        double want;
    } cases[] = {
        {1.5, PG_F32, 1.5},
        {-2.75, PG_I32, -2},
        {300, PG_U8, 255},
        {-1, PG_U8, 0},
        {40000, PG_I16, 32767},
        {-40000.5, PG_I16, -32768},
        {-2.9, PG_I16, -2},
        {1e30, PG_I64, 0x1p63},
        {-1e30, PG_I32, -2147483648.0},
        {NAN, PG_I32, 0},
        {1 + 0x1p-8, PG_BF16, 1},
        {1 + 3 * 0x1p-8, PG_BF16, 1 + 0x1p-6},
        {65519, PG_F16, 65504},
        {65520, PG_F16, INFINITY},
        {1 + 0x1p-11, PG_F16, 1},
        {0x1p-24, PG_F16, 0x1p-24},
        {1e300, PG_F32, INFINITY},
        {0.1, PG_F64, 0.1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double got = through(PG_F64, &cases[i].value, cases[i].to);
        if (got != cases[i].want)
            fail_msg("%g as %s is %g, not %g", cases[i].value, pg_dtype_name(cases[i].to), got,
                     cases[i].want);
    }
    assert_true(through(PG_I64, &(int64_t){-7}, PG_I32) == -7);
    assert_true(through(PG_U8, &(uint8_t){200}, PG_I64) == 200);
    assert_true(through(PG_I16, &(int16_t){-32768}, PG_I16) == -32768);
    assert_true(through(PG_I16, &(int16_t){-7}, PG_F32) == -7);
    assert_true(through(PG_BF16, &(uint16_t){0x3fc0}, PG_F16) == 1.5);
}

static void test_what_cannot_be_written(void **state) {
    (void)state;
    pg_safetensors *f = created(in_folder("bad"));
    refuses(PG_EINVAL, "UTF-8", pg_safetensors_declare(f, "\xff", PG_F32, 0, NULL));
    refuses(PG_EINVAL, "keeps this name",
            pg_safetensors_declare(f, "__metadata__", PG_F32, 0, NULL));
    refuses(PG_EINVAL, "dtype 99", pg_safetensors_declare(f, "x", 99, 0, NULL));
    refuses(PG_ESHAPE, "9 dims", pg_safetensors_declare(f, "x", PG_F32, 9, (int64_t[9]){1}));
    refuses(PG_EINVAL, "below 0", pg_safetensors_declare(f, "x", PG_F32, 1, (int64_t[]){-1}));
    refuses(PG_EINVAL, "2^63",
            pg_safetensors_declare(f, "x", PG_F32, 2, (int64_t[]){1LL << 40, 1LL << 40}));
    refuses(PG_EINVAL, "UTF-8", pg_safetensors_set_meta(f, "k", "\xc3"));
    ok(pg_safetensors_declare(f, "x", PG_F32, 1, (int64_t[]){1}));
    ok(pg_safetensors_declare(f, "x", PG_F32, 1, (int64_t[]){1}));
    refuses(PG_EINVAL, "duplicate name \"x\"", pg_safetensors_begin(f));
    pg_safetensors_close(f);
    refuses(PG_EIO, "No such file", pg_safetensors_create(&f, in_folder("none/x")));
    refuses(PG_EINVAL, "NULL", pg_safetensors_create(NULL, "x"));
    refuses(PG_EINVAL, "not open", pg_safetensors_begin(NULL));
    assert_int_equal(files_with("bad"), 0); /* close removed what was written aside */
    f = created(in_folder("bad"));
    ok(pg_safetensors_declare(f, "x", PG_U8, 2, (int64_t[]){1LL << 30, 1LL << 32}));
    refuses(PG_EINVAL, "more than 2^62 bytes", pg_safetensors_begin(f));
    pg_safetensors_close(f);
    assert_int_equal(files_with("bad"), 0);
}

static int save(const char *path, const pg_tensor *t) {
    pg_safetensors *f;
    int rc = pg_safetensors_create(&f, path);
    if (rc < 0) return rc;
    rc = pg_safetensors_declare(f, "x", PG_F32, 1, (int64_t[]){4});
    if (rc >= 0) rc = pg_safetensors_begin(f);
    if (rc >= 0) rc = pg_safetensors_write(f, "x", 0, t);
    if (rc >= 0) rc = pg_safetensors_finish(f);
    pg_safetensors_close(f);
    return rc;
}

static float first_value(const char *path) {
    pg_safetensors *f = opened(path);
    pg_tensor *t = tensor(PG_F32, 4, NULL);
    float v;
    ok(pg_safetensors_read(f, 0, 0, t));
    ok(pg_tensor_read(t, 0, &v, sizeof v));
    pg_tensor_free(t);
    pg_safetensors_close(f);
    return v;
}

/* Header, data, fsync, rename, fsync of the folder: whichever fails, a whole file stands. */
static void test_each_failing_call_leaves_a_whole_file(void **state) {
    (void)state;
    pg_tensor *one = tensor(PG_F32, 4, (float[]){1, 1, 1, 1});
    pg_tensor *two = tensor(PG_F32, 4, (float[]){2, 2, 2, 2});
    for (int n = 1; n <= 6; n++) {
        ok(save(in_folder("c"), one));
        pg_fs_fail_after(n);
        int rc = save(in_folder("c"), two);
        pg_fs_fail_after(0);
        assert_int_equal(rc, n <= 5 ? PG_EIO : PG_OK);
        if (rc < 0) assert_non_null(strstr(pg_errmsg(), "No space left"));
        assert_true(first_value(in_folder("c")) == (n <= 4 ? 1 : 2));
        assert_int_equal(files_with(".tmp-"), 0);
    }
    struct rlimit before, now;
    signal(SIGXFSZ, SIG_IGN); /* as pgrun does */
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    now = before;
    now.rlim_cur = 72; /* the header and half the data fit */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &now), 0);
    int rc = save(in_folder("c"), one);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(rc, PG_EIO);
    assert_non_null(strstr(pg_errmsg(), "File too large"));
    assert_true(first_value(in_folder("c")) == 2);
    pg_tensor_free(one);
    pg_tensor_free(two);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_golden_bytes, nothing_alive),
        cmocka_unit_test_teardown(test_order_padding_and_metadata, nothing_alive),
        cmocka_unit_test_teardown(test_long_tensor_in_parts, nothing_alive),
        cmocka_unit_test_teardown(test_casts, nothing_alive),
        cmocka_unit_test_teardown(test_what_cannot_be_written, nothing_alive),
        cmocka_unit_test_teardown(test_each_failing_call_leaves_a_whole_file, nothing_alive),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
