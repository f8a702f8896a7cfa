/* test_safetensors_hostile.c: files made by hand to be wrong, each refused with its own reason, in
 * little memory and time; oddities that are legal; bit flips.  The duplicate and the huge length
 * are from safetensors issue 401. */
#include "folder.h"

#include <sys/resource.h>
#include <time.h>

/* A file of a header and `data` zero bytes behind it. */
static void put_header(const char *path, const char *header, int64_t bytes, int64_t data) {
    char *whole = calloc(1, (size_t)(8 + bytes + data));
    for (int i = 0; i < 8; i++) whole[i] = (char)(bytes >> (8 * i));
    memcpy(whole + 8, header, (size_t)bytes);
    put_file(path, whole, 8 + bytes + data);
    free(whole);
}

#define X(offsets) "\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" offsets "]}"
#define ENTRY(dtype, shape, offsets)                                                               \
    "{\"x\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static const struct {
    const char *header;
    int data;
    const char *reason;
} bad[] = {
    {"", 0, "does not begin with {"},
    {" {}", 0, "does not begin with {"},
    {"[]", 0, "does not begin with {"},
    {"{", 0, "quoted name expected"},
    {"{x:1}", 0, "quoted name expected"},
    {"{\"x", 0, "name without its end"},
    {"{\"x\\\"}", 0, "name without its end"},
    {"{\"x\"}", 0, ": expected"},
    {"{\"x\":", 0, "value without its end"},
    {"{\"x\":}", 0, "its entry"},
    {"{\"x\":{\"dtype\":\"U8\"", 0, "value without its end"},
    {"{\"x\":[}]}", 0, "its entry"},
    {"{" X("0,4") ",}", 4, "quoted name expected"},
    {"{" X("0,4") " \"y\":1}", 4, ", or } expected"},
    {"{" X("0,4") "} x", 4, "text after the closing }"},
    {"{" X("0,4") "}}", 4, "text after the closing }"},
    {"{\"x\":1}", 0, "no object"},
    {"{\"x\":{}}", 0, "bad dtype (missing)"},
    {ENTRY("\"F31\"", "[4]", "[0,4]"), 4, "bad dtype F31"},
    {ENTRY("7", "[4]", "[0,4]"), 4, "bad dtype"},
    {ENTRY("\"U8\"", "4", "[0,4]"), 4, "shape is missing or no list"},
    {ENTRY("\"U8\"", "[-4]", "[0,4]"), 4, "shape holds something other than whole numbers"},
    {ENTRY("\"U8\"", "[4.0]", "[0,4]"), 4, "shape holds something other than whole numbers"},
    {ENTRY("\"U8\"", "[1,1,1,1,1,1,1,1,4]", "[0,4]"), 4, "at most 8"},
    {ENTRY("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "beyond 2^63"},
    {ENTRY("\"F64\"", "[2305843009213693952]", "[0,0]"), 0, "more than 2^63 bytes"},
    {ENTRY("\"U8\"", "[9223372036854775808]", "[0,4]"), 4, "too big integer"},
    {ENTRY("\"U8\"", "[4]", "[0]"), 4, "data_offsets has 1 numbers"},
    {ENTRY("\"U8\"", "[4]", "[0,2,4]"), 4, "at most 2"},
    {ENTRY("\"U8\"", "[4]", "[-4,0]"), 4, "data_offsets holds something other"},
    {ENTRY("\"U8\"", "[4]", "[4,0]"), 4, "run backwards"},
    {ENTRY("\"U8\"", "[4]", "[0,3]"), 4, "wrong byte count: data_offsets hold 3"},
    {ENTRY("\"F32\"", "[4]", "[0,4]"), 4, "wrong byte count"},
    {ENTRY("\"U8\"", "[4]", "[0,4]"), 3, "beyond the end"},
    {ENTRY("\"U8\"", "[4]", "[9223372036854775800,9223372036854775804]"), 4, "beyond the end"},
    {ENTRY("\"U8\"", "[4]", "[0,4]"), 5, "trailing bytes: 1"},
    {"{}", 1, "trailing bytes: 1"},
    {ENTRY("\"U8\"", "[4]", "[1,5]"), 5, "hole: bytes 0 to 1"},
    {"{" X("0,4") ",\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[5,9]}}", 9,
     "hole: bytes 4 to 5"},
    {"{" X("0,4") ",\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}", 7, "overlap"},
    {"{" X("0,4") ",\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "overlap"},
    {"{" X("0,4") ",\"y\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]}}", 4, "overlap"},
    {"{" X("0,4") "," X("4,8") "}", 8, "duplicate name \"x\""},
    {"{" X("0,4") "," X("0,4") "}", 4, "duplicate name \"x\""},
    {"{" X("0,4") ",\"\\u0078\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 8,
     "duplicate name \"x\""},
    {"{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
     "duplicate object key"},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"more\":1}}", 4,
     "unknown key"},
    {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
     "unable to decode byte 0xff"},
    {"{\"\xc0\xaf\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
     "unable to decode byte 0xc0"},
    {"{\"a\\u0000\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "\\u0000"},
    {"{\"__metadata__\":1}", 0, "{ expected"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "\"a\" is no string"},
    {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "duplicate name \"a\""},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate name \"__metadata__\""},
};

static void test_bad_headers(void **state) {
    (void)state;
    pg_safetensors *f = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_header(in_folder("bad"), bad[i].header, (int64_t)strlen(bad[i].header), bad[i].data);
        int rc = pg_safetensors_open(&f, in_folder("bad"));
        if (rc != PG_EIO || f || !strstr(pg_errmsg(), bad[i].reason) ||
            !strstr(pg_errmsg(), "bad: "))
            fail_msg("case %zu: %s gave %d: %s", i, bad[i].header, rc, rc < 0 ? pg_errmsg() : "-");
    }
}

static void test_bad_lengths(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        int n;
        const char *reason;
    } files[] = {
        {"", 0, "0 bytes"},
        {"\2\0\0\0\0\0\0", 7, "7 bytes"},
        {"\2\0\0\0\0\0\0\0", 8, "runs past the end"},
        {"\3\0\0\0\0\0\0\0{}", 10, "runs past the end"},
        {"\0\0\0\0\0\0\0\200{}", 10, "header length 9223372036854775808 is above"},
        {"\377\377\377\377\377\377\377\377{}", 10, "header length 18446744073709551615 is above"},
        {"\0\341\365\5\0\0\0\0{}", 10, "runs past the end"}, /* 100,000,000: the last legal one */
        {"\1\341\365\5\0\0\0\0{}", 10, "is above"},
    };
    pg_safetensors *f;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        put_file(in_folder("bad"), files[i].bytes, files[i].n);
        refuses(PG_EIO, files[i].reason, pg_safetensors_open(&f, in_folder("bad")));
    }
    refuses(PG_EIO, "No such file", pg_safetensors_open(&f, in_folder("none")));
    refuses(PG_EIO, "no regular file", pg_safetensors_open(&f, folder));
    refuses(PG_EINVAL, "NULL", pg_safetensors_open(&f, NULL));
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    refuses(PG_EIO, "no regular file",
            pg_safetensors_open(&f, in_folder("fifo"))); /* and no hang */
}

static void test_legal_oddities(void **state) {
    (void)state;
    static const struct {
        const char *header;
        int data, count;
    } good[] = {
        {"{}", 0, 0},
        {"{}                \n\t\r", 0, 0},
        {"{ }", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {ENTRY("\"F32\"", "[]", "[0,4]"), 4, 1},
        {ENTRY("\"F32\"", "[0]", "[0,0]"), 0, 1},
        {ENTRY("\"F32\"", "[4294967296,4294967296,0]", "[0,0]"), 0,
         -1}, /* HF's check overflows too */
        {ENTRY("\"F8_E4M3\"", "[3]", "[0,3]"), 3, 1},
        {"{ \"x\" : { \"data_offsets\" : [ 0 , 4 ] , \"shape\":[4],\"dtype\":\"U8\"} , "
         "\"\": {\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[4,8]}}",
         8, 2},
        {"{\"b\\\"}{\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]},"
         "\"\\u00e9\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         2, 2},
        {"{" X("0,4") ",\"e\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
                      "\"f\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}}",
         4, 3},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        pg_safetensors *f;
        put_header(in_folder("odd"), good[i].header, (int64_t)strlen(good[i].header), good[i].data);
        int rc = pg_safetensors_open(&f, in_folder("odd"));
        if (good[i].count < 0 ? rc != PG_EIO : rc < 0)
            fail_msg("case %zu: %d %s", i, rc, pg_errmsg());
        if (rc < 0) continue;
        assert_int_equal(pg_safetensors_count(f), good[i].count);
        pg_safetensors_close(f);
    }
    pg_safetensors *f;
    put_header(in_folder("odd"), good[7].header, (int64_t)strlen(good[7].header), 3);
    ok(pg_safetensors_open(&f, in_folder("odd")));
    int dtype, ndim;
    int64_t dims[8], three = 3;
    ok(pg_safetensors_info(f, 0, &dtype, &ndim, dims));
    assert_true(dtype == -1 && ndim == 1 && dims[0] == 3);
    pg_tensor *t;
    ok(pg_tensor_new(&t, PG_U8, 1, &three));
    refuses(PG_EINVAL, "F8_E4M3 has no tensor type here", pg_safetensors_read(f, 0, 0, t));
    pg_tensor_free(t);
    pg_safetensors_close(f);
}

/* Every bit of a good file's first 400 bytes turned over: opens or is refused, never worse (the
 * sanitizers look on); and what opens can be read. */
static void test_bit_flips(void **state) {
    (void)state;
    const char header[] =
        "{\"__metadata__\":{\"a\":\"b\"}," X("0,4") ",\"y\":{\"dtype\":\"F32\","
                                                    "\"shape\":[2,2],\"data_offsets\":[4,20]}}";
    int64_t n = sizeof header - 1, sixteen = 16;
    char whole[8 + sizeof header + 20] = {(char)n};
    memcpy(whole + 8, header, (size_t)n);
    pg_tensor *t;
    ok(pg_tensor_new(&t, PG_F32, 1, &sixteen));
    int opened = 0, refused = 0;
    for (int64_t bit = 0; bit < 8 * (8 + n); bit++) {
        whole[bit / 8] ^= (char)(1 << bit % 8);
        put_file(in_folder("flip"), whole, 8 + n + 20);
        whole[bit / 8] ^= (char)(1 << bit % 8);
        pg_safetensors *f;
        if (pg_safetensors_open(&f, in_folder("flip")) < 0) {
            assert_null(f);
            assert_non_null(strstr(pg_errmsg(), "flip: "));
            refused++;
            continue;
        }
        opened++;
        for (int64_t i = 0; i < pg_safetensors_count(f); i++) pg_safetensors_read(f, i, 0, t);
        pg_safetensors_close(f);
    }
    assert_true(refused > 800 && opened > 20); /* a flip inside a name is legal */
    pg_tensor_free(t);
}

/* start, whole units, blanks, end. */
static char *repeat(const char *start, const char *unit, const char *end, size_t bytes) {
    size_t at = strlen(start), n = strlen(unit), last = bytes - strlen(end);
    char *text = malloc(bytes);
    memcpy(text, start, at);
    for (; at + n <= last; at += n) memcpy(text + at, unit, n);
    memset(text + at, ' ', last - at);
    memcpy(text + last, end, bytes - last);
    return text;
}

/* The memory that opening took at its peak, in MB, by the growth of a child's high-water mark less
 * the file itself, which is mapped; and not beyond 1 s. */
static void opens_in_little(const char *path, int64_t file_bytes, const char *reason) {
    pid_t pid = fork();
    if (pid == 0) {
        struct rusage before, after;
        struct timespec from, to;
        pg_safetensors *f;
        getrusage(RUSAGE_SELF, &before);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
        int rc = pg_safetensors_open(&f, path);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
        getrusage(RUSAGE_SELF, &after);
        double mb = (double)(after.ru_maxrss - before.ru_maxrss) / 1024 - (double)file_bytes / 1e6;
        double s = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
        if (rc == PG_EIO && strstr(pg_errmsg(), reason) && mb < 50 && s < 1) _exit(0);
        fprintf(stderr, "%d %s, %.0f MB, %.2f s\n", rc, pg_errmsg(), mb, s);
        _exit(1);
    }
    int status;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    assert_int_equal(status, 0);
}

static void test_large_hostile_headers(void **state) {
    (void)state;
#ifdef PG_SANITIZED
    skip(); /* its own memory would be measured */
#endif
    static const struct {
        const char *start, *unit, *end, *reason;
    } large[] = {
        {"{\"x\":", "[", "", "value without its end"},
        {"{\"x\":[", "[],", "[]]}", "at most 65536 are read"},
        {"{\"x\":{\"dtype\":[", "0,", "0]}}", "at most 65536 are read"},
        {"{\"", "x", "\":1}", "at most 65536 are read"},
        {"{\"__metadata__\":{\"a\":\"", "x", "\"}}", "at most 4194304 are read"},
        {"{\"__metadata__\":{\"a\":\"\"", ",\"a\":\"\"", "}}", "more than 131072 metadata"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
         ",\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", "}",
         "more than 131072 tensors"},
    };
    enum { BYTES = 8000000 };
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        char *text = repeat(large[i].start, large[i].unit, large[i].end, BYTES);
        put_header(in_folder("large"), text, BYTES, 0);
        free(text);
        opens_in_little(in_folder("large"), BYTES, large[i].reason);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_bad_headers, nothing_alive),
        cmocka_unit_test_teardown(test_bad_lengths, nothing_alive),
        cmocka_unit_test_teardown(test_legal_oddities, nothing_alive),
        cmocka_unit_test_teardown(test_bit_flips, nothing_alive),
        cmocka_unit_test_teardown(test_large_hostile_headers, nothing_alive),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
