/* test_events.c: event files read back by a second, table-driven crc32c and a protobuf reader of
 * their own, so that a mistake in events.c is not made twice. */
#include "folder.h"

/* ---- the reader ---- */
static uint32_t crc_of(const void *data, size_t n) {
    static uint32_t table[256];
    for (uint32_t i = 0; i < 256 && !table[255]; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0x82f63b78u ^ c >> 1 : c >> 1;
        table[i] = c;
    }
    uint32_t c = 0xffffffffu;
    for (size_t i = 0; i < n; i++) c = table[(c ^ ((const uint8_t *)data)[i]) & 255] ^ c >> 8;
    return c ^ 0xffffffffu;
}

static uint32_t masked(const void *data, size_t n) {
    uint32_t c = crc_of(data, n);
    return (c >> 15 | c << 17) + 0xa282ead8u;
}

typedef struct {
    const uint8_t *at;
    size_t n;
} span;

static uint64_t varint(span *s) {
    uint64_t v = 0;
    for (int shift = 0; s->n; shift += 7) {
        uint8_t b = *s->at;
        s->at++, s->n--;
        v |= (uint64_t)(b & 127) << shift;
        if (b < 128) return v;
    }
    fail_msg("a varint without its end");
    return 0;
}

/* The last field of that number: its number, or its bytes in *inner. */
static uint64_t field(span message, uint64_t number, span *inner) {
    uint64_t found = UINT64_MAX;
    while (message.n) {
        uint64_t key = varint(&message), value = 0;
        size_t n = 0;
        switch (key & 7) {
        case 0: value = varint(&message); break;
        case 1: n = 8; break;
        case 2: n = (size_t)varint(&message); break;
        case 5: n = 4; break;
        default: fail_msg("wire type %d", (int)(key & 7));
        }
        assert_true(n <= message.n);
        if ((key & 7) == 1 || (key & 7) == 5) memcpy(&value, message.at, n);
        if (key >> 3 == number) {
            found = value;
            if (inner) *inner = (span){message.at, n};
        }
        message.at += n, message.n -= n;
    }
    return found;
}

/* The next record of a file, its checksums compared; n = 0 at the end. */
static span record(span *file) {
    if (file->n == 0) return (span){NULL, 0};
    uint64_t n;
    uint32_t crc;
    assert_true(file->n > 16);
    memcpy(&n, file->at, 8);
    memcpy(&crc, file->at + 8, 4);
    assert_int_equal(crc, masked(file->at, 8));
    assert_true(n <= file->n - 16);
    span data = {file->at + 12, (size_t)n};
    memcpy(&crc, data.at + n, 4);
    assert_int_equal(crc, masked(data.at, data.n));
    file->at += 16 + n, file->n -= 16 + n;
    return data;
}

static void span_is(span s, const char *want) {
    assert_int_equal(s.n, strlen(want));
    assert_memory_equal(s.at, want, s.n);
}

static const char *only_file(void) {
    static char path[600];
    snprintf(path, sizeof path, "%s/%s", in_folder("run/tb"), pg_fs_list(in_folder("run/tb")));
    return path;
}

static span whole(void) {
    int64_t n;
    const char *text = pg_fs_read(only_file(), &n);
    if (!text) fail_msg("%s", pg_errmsg());
    return (span){(const uint8_t *)text, (size_t)n};
}

/* ---- the tests ---- */
static void test_checksum_vectors(void **state) {
    (void)state;
    assert_int_equal(crc_of("123456789", 9), 0xe3069283u);
    uint8_t zeros[32] = {0};
    assert_int_equal(crc_of(zeros, 32), 0x8a9136aau); /* RFC 3720 B.4 */
    uint64_t length = 24;
    assert_int_equal(masked(&length, 8), 0x224b7fa3u); /* in a file: a3 7f 4b 22 */
}

static void test_scalars_and_texts(void **state) {
    (void)state;
    pg_events *e;
    ok(pg_events_open(&e, in_folder("run/tb")));
    char want[300];
    snprintf(want, sizeof want, ".%s.%d.0", pg_fs_hostname(), (int)getpid());
    assert_true(strstr(only_file(), "/events.out.tfevents.") && strstr(only_file(), want));
    span file = whole();
    assert_memory_equal(file.at, "\30\0\0\0\0\0\0\0\xa3\x7f\x4b\x22", 12); /* version: 24 bytes */
    ok(pg_events_scalar(e, "loss", 7, 2.5));
    ok(pg_events_scalar(e, "loss/\xc3\xa9", 1LL << 40, NAN));
    assert_int_equal(whole().n, file.n); /* not before the flush */
    ok(pg_events_text(e, "sample", 9, "Once upon\na time"));
    ok(pg_events_flush(e));
    file = whole();
    span r = record(&file), v, inner;
    field(r, 3, &v);
    span_is(v, "brain.Event:2");
    r = record(&file);
    double wall;
    uint64_t bits = field(r, 1, NULL);
    memcpy(&wall, &bits, 8);
    assert_true(wall > 1.6e9 && wall < 1e11);
    assert_int_equal(field(r, 2, NULL), 7);
    field(r, 5, &v);
    field(v, 1, &v);
    field(v, 1, &inner);
    span_is(inner, "loss");
    float single;
    uint32_t low = (uint32_t)field(v, 2, NULL);
    memcpy(&single, &low, 4);
    assert_true(single == 2.5f);
    r = record(&file);
    assert_true(field(r, 2, NULL) == 1ULL << 40);
    r = record(&file);
    field(r, 5, &v);
    field(v, 1, &v);
    field(v, 8, &inner);
    assert_int_equal(field(inner, 1, NULL), 7);
    span text;
    field(inner, 8, &text);
    span_is(text, "Once upon\na time");
    field(v, 9, &inner);
    field(inner, 1, &inner);
    field(inner, 1, &inner);
    span_is(inner, "text");
    assert_int_equal(record(&file).n, 0);
    refuses(PG_EINVAL, "UTF-8", pg_events_scalar(e, "\xff", 1, 1));
    refuses(PG_EINVAL, "NULL", pg_events_text(e, "t", 1, NULL));
    refuses(PG_EINVAL, "NULL", pg_events_flush(NULL));
    pg_events_close(e);
    ok(pg_fs_remove(in_folder("run")));
}

static void test_failed_flush_is_made_good(void **state) {
    (void)state;
    pg_events *e;
    ok(pg_events_open(&e, in_folder("run/tb")));
    ok(pg_events_scalar(e, "a", 1, 1));
    pg_fs_fail_after(1);
    refuses(PG_EIO, "No space left", pg_events_flush(e));
    ok(pg_events_scalar(e, "a", 2, 2));
    ok(pg_events_flush(e));
    int refused = 0; /* a disk that stays full: the buffer keeps its size, the caller is told */
    for (int i = 0; i < 4000; i++) {
        pg_fs_fail_after(1);
        refused += pg_events_scalar(e, "a", 3 + i, 0) < 0;
    }
    pg_fs_fail_after(0);
    assert_true(refused > 1000);
    pg_events_close(e);
    span file = whole();
    int64_t records = 0;
    for (span r; (r = record(&file)).n; records++)
        if (records) assert_int_equal(field(r, 2, NULL), records);
    assert_int_equal(records, 1 + 2 + 4000 - refused);
    ok(pg_fs_remove(in_folder("run")));
}

static void test_two_files_in_one_second(void **state) {
    (void)state;
    pg_events *a, *b;
    ok(pg_events_open(&a, in_folder("run/tb")));
    ok(pg_events_open(&b, in_folder("run/tb")));
    pg_events_close(a);
    pg_events_close(b);
    const char *names = pg_fs_list(in_folder("run/tb"));
    assert_non_null(strchr(names, '\n'));
    put_file(in_folder("file"), "", 0);
    refuses(PG_EIO, "Not a directory", pg_events_open(&a, in_folder("file/tb")));
    pg_events_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checksum_vectors),
        cmocka_unit_test(test_scalars_and_texts),
        cmocka_unit_test(test_failed_flush_is_made_good),
        cmocka_unit_test(test_two_files_in_one_second),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
