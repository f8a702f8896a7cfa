/* test_tokens.c: token files read as one run, written, read ahead, and put in a shuffled order. */
#include "folder.h"

#include <fcntl.h>
#include <pthread.h>

static pg_tokens *opened(const char *pattern, int dtype, int64_t vocab) {
    pg_tokens *s;
    ok(pg_tokens_open(&s, pattern, dtype, vocab));
    return s;
}

static void ids_are(const pg_tokens *s, int64_t start, int64_t n, const int32_t *want) {
    int32_t got[16];
    ok(pg_tokens_read(s, start, n, got));
    for (int64_t i = 0; i < n; i++) assert_int_equal(got[i], want[i]);
}

static void written(const char *name, int64_t vocab, const int32_t *ids, int64_t n) {
    pg_tokens *s;
    ok(pg_tokens_create(&s, in_folder(name), vocab));
    ok(pg_tokens_append(s, ids, n / 2));
    ok(pg_tokens_append(s, ids + n / 2, n - n / 2));
    assert_int_equal(pg_tokens_count(s), n);
    ok(pg_tokens_finish(s));
    pg_tokens_close(s);
}

static void test_both_formats_of_llmc(void **state) {
    (void)state;
    const int32_t ids[] = {5, 50256, 0, 65535, 7};
    int32_t header[256];
    int64_t bytes;
    written("w.bin", 65536, ids, 5);
    const char *text = pg_fs_read(in_folder("w.bin"), &bytes);
    assert_int_equal(bytes, 1024 + 10);
    memcpy(header, text, 1024);
    assert_true(header[0] == 20240520 && header[1] == 1 && header[2] == 5 && header[3] == 0);
    assert_memory_equal(text + 1024, "\5\0\x50\xc4\0\0\xff\xff\7\0", 10);
    pg_tokens *s = opened(in_folder("w.bin"), PG_I32, 0); /* the header outweighs the dtype */
    ids_are(s, 0, 5, ids);
    pg_tokens_close(s);

    const int32_t large[] = {128255, 1};
    written("w.bin", 128256, large, 2);
    text = pg_fs_read(in_folder("w.bin"), &bytes);
    memcpy(header, text, 1024);
    assert_true(bytes == 1032 && header[0] == 20240801 && header[1] == 7 && header[2] == 2);
    s = opened(in_folder("w.bin"), -1, 128256);
    ids_are(s, 0, 2, large);
    pg_tokens_close(s);
}

static void test_writer_refuses(void **state) {
    (void)state;
    pg_tokens *s;
    refuses(PG_EINVAL, "vocabulary of 0", pg_tokens_create(&s, in_folder("x.bin"), 0));
    refuses(PG_EIO, "No such file", pg_tokens_create(&s, in_folder("none/x.bin"), 9));
    ok(pg_tokens_create(&s, in_folder("x.bin"), 9));
    refuses(PG_EINVAL, "id 9 at place 1; ids go from 0 to 8",
            pg_tokens_append(s, (int32_t[]){8, 9}, 2));
    refuses(PG_EINVAL, "id -1", pg_tokens_append(s, (int32_t[]){-1}, 1));
    assert_int_equal(pg_tokens_count(s), 0);
    refuses(PG_EINVAL, "has 0", pg_tokens_read(s, 0, 1, (int32_t[1]){0}));
    pg_tokens_close(s);
    assert_int_equal(files_with("x.bin"), 0);
    for (int n = 1; n <= 5; n++) { /* ids, header, fsync, rename, fsync of the folder */
        ok(pg_tokens_create(&s, in_folder("x.bin"), 9));
        ok(pg_tokens_append(s, (int32_t[]){1, 2}, 2));
        pg_fs_fail_after(n);
        refuses(PG_EIO, "No space left", pg_tokens_finish(s));
        pg_fs_fail_after(0);
        pg_tokens_close(s);
        assert_int_equal(files_with("x.bin"), n < 5 ? 0 : 1);
    }
}

static void test_headerless_and_many_files(void **state) {
    (void)state;
    put_file(in_folder("m_01.bin"), "\1\0\2\0\3\0", 6);
    put_file(in_folder("m_02.bin"), "\4\0", 2);
    put_file(in_folder("m_10.bin"), "\5\0\377\377", 4);
    written("m_03.bin", 10, (int32_t[]){8, 9}, 2);
    pg_tokens *s = opened(in_folder("m_*.bin"), -1, 0);
    const int32_t all[] = {1, 2, 3, 4, 8, 9, 5, 65535};
    assert_int_equal(pg_tokens_count(s), 8);
    for (int start = 0; start <= 8; start++)
        for (int n = 0; n <= 8 - start; n++) ids_are(s, start, n, all + start);
    int32_t dst[9];
    refuses(PG_EINVAL, "needs 9 from 0 on, has 8", pg_tokens_read(s, 0, 9, dst));
    refuses(PG_EINVAL, "has 8", pg_tokens_read(s, -1, 1, dst));
    refuses(PG_EINVAL, "has 8", pg_tokens_read(s, 1, INT64_MAX, dst));
    pg_tokens_close(s);

    char two[1100];
    snprintf(two, sizeof two, "%s\n%s\n", in_folder("m_10.bin"), in_folder("m_02.bin"));
    s = opened(two, -1, 0);
    ids_are(s, 0, 3, (int32_t[]){5, 65535, 4}); /* in the order named */
    pg_tokens_close(s);

    put_file(in_folder("b"), "\1\377\0\0\376\377\377\377", 8);
    s = opened(in_folder("b"), PG_U8, 0);
    ids_are(s, 0, 3, (int32_t[]){1, 255, 0});
    pg_tokens_close(s);
    s = opened(in_folder("b"), PG_I32, 0);
    ids_are(s, 0, 1, (int32_t[]){65281});
    refuses(PG_EINVAL, "token 1 (byte 4) has id -2", pg_tokens_read(s, 0, 2, dst));
    pg_tokens_close(s);
    s = opened(in_folder("m_*.bin"), -1, 9);
    refuses(PG_EINVAL, "m_03.bin: token 1 (byte 1026) has id 9; ids go from 0 to 8",
            pg_tokens_read(s, 4, 2, dst));
    ids_are(s, 0, 5, all);
    pg_tokens_close(s);
}

static void put_llmc(const char *path, int32_t magic, int32_t version, int32_t count, int bytes) {
    int32_t file[512] = {magic, version, count};
    put_file(path, file, bytes);
}

static void test_broken_files(void **state) {
    (void)state;
    pg_tokens *s = NULL;
    const char *path = in_folder("t.bin");
    put_file(path, "", 0);
    refuses(PG_EIO, "t.bin is empty (0 bytes)", pg_tokens_open(&s, path, -1, 0));
    put_file(path, "1234567", 7);
    refuses(PG_EIO, "t.bin has 7 bytes; uint16 tokens need an even count",
            pg_tokens_open(&s, path, -1, 0));
    refuses(PG_EIO, "t.bin has 7 bytes; 32-bit tokens need a multiple of 4",
            pg_tokens_open(&s, path, PG_I32, 0));
    ok(pg_tokens_open(&s, path, PG_U8, 0));
    pg_tokens_close(s);
    refuses(PG_EINVAL, "dtype f32", pg_tokens_open(&s, path, PG_F32, 0));
    put_llmc(path, 20240520, 1, 3, 4);
    refuses(PG_EIO, "header alone needs 1024", pg_tokens_open(&s, path, -1, 0));
    put_llmc(path, 20240520, 1, 3, 1029);
    refuses(PG_EIO, "has 1029 bytes; its header tells of 3 uint16 tokens, which need 1030",
            pg_tokens_open(&s, path, -1, 0));
    put_llmc(path, 20240520, 1, 3, 1032);
    refuses(PG_EIO, "need 1030", pg_tokens_open(&s, path, -1, 0));
    put_llmc(path, 20240520, 1, -1, 1030);
    refuses(PG_EIO, "4294967295", pg_tokens_open(&s, path, -1, 0));
    put_llmc(path, 20240520, 1, 0, 1024);
    refuses(PG_EIO, "no token", pg_tokens_open(&s, path, -1, 0));
    put_llmc(path, 20240520, 7, 1, 1026);
    refuses(PG_EIO, "version 7", pg_tokens_open(&s, path, -1, 0));
    put_llmc(path, 20240522, 1, 1, 1026);
    refuses(PG_EIO, "evaluation file", pg_tokens_open(&s, path, -1, 0));
    refuses(PG_EIO, "none*: no such file", pg_tokens_open(&s, in_folder("none*"), -1, 0));
    refuses(PG_EIO, "no regular file", pg_tokens_open(&s, folder, -1, 0));
    refuses(PG_EINVAL, "no file is named", pg_tokens_open(&s, "", -1, 0));
    assert_null(s);
}

/* Sparse files: 5 GiB of headerless uint16, and an llm.c file of more than 2^31 tokens. */
static void test_beyond_four_gib(void **state) {
    (void)state;
    const int64_t gib5 = 5LL << 30, count = (1LL << 31) + 5;
    const uint16_t last = 4242;
    int fd = open(in_folder("huge.bin"), O_CREAT | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, gib5) != 0) skip(); /* a file system without room for holes */
    assert_int_equal(pwrite(fd, &last, 2, gib5 - 2), 2);
    pg_tokens *s = opened(in_folder("huge.bin"), -1, 5000);
    assert_int_equal(pg_tokens_count(s), gib5 / 2);
    ids_are(s, gib5 / 2 - 2, 2, (int32_t[]){0, 4242});
    pg_tokens_close(s);
    int32_t header[3] = {20240520, 1, (int32_t)(uint32_t)count};
    assert_int_equal(ftruncate(fd, 1024 + 2 * count), 0);
    assert_int_equal(pwrite(fd, header, sizeof header, 0), sizeof header);
    assert_int_equal(pwrite(fd, &last, 2, 1024 + 2 * (count - 1)), 2);
    s = opened(in_folder("huge.bin"), -1, 4242);
    assert_int_equal(pg_tokens_count(s), count);
    refuses(PG_EINVAL, "token 2147483652 (byte 4294968328) has id 4242",
            pg_tokens_read(s, count - 1, 1, (int32_t[1]){0}));
    pg_tokens_close(s);
    close(fd);
    unlink(in_folder("huge.bin"));
}

/* ---- reading ahead ---- */
static void test_prefetch_keeps_order_and_errors(void **state) {
    (void)state;
    enum { N = 4000, ROWS = 3, SPAN = 50, DEPTH = 4 };
    int32_t ids[N], got[ROWS * SPAN];
    for (int i = 0; i < N; i++) ids[i] = i;
    written("p.bin", N, ids, N);
    pg_tokens *s = opened(in_folder("p.bin"), -1, N - 1); /* the last id is too large */
    pg_prefetch *p;
    ok(pg_prefetch_new(&p, s, ROWS, SPAN, DEPTH));
    refuses(PG_EINVAL, "nothing was asked", pg_prefetch_take(p, got));
    int asked = 0, taken = 0;
    while (taken < 200) {
        for (; asked < 200 && asked < taken + DEPTH; asked++)
            ok(pg_prefetch_ask(p, (int64_t[]){asked, 2 * asked, asked == 100 ? N - SPAN : 7}));
        if (asked < 200)
            refuses(PG_EINVAL, "4 batches are out", pg_prefetch_ask(p, (int64_t[ROWS]){0}));
        if (taken == 100) {
            refuses(PG_EINVAL, "token 3999", pg_prefetch_take(p, got));
        } else {
            ok(pg_prefetch_take(p, got));
            for (int i = 0; i < SPAN; i++)
                assert_true(got[i] == taken + i && got[SPAN + i] == 2 * taken + i &&
                            got[2 * SPAN + i] == 7 + i);
        }
        taken++;
    }
    refuses(PG_EINVAL, "0 rows", pg_prefetch_new(&(pg_prefetch *){0}, s, 0, 1, 1));
    refuses(PG_EINVAL, "2^31", pg_prefetch_new(&(pg_prefetch *){0}, s, 1LL << 20, 1LL << 20, 1));
    pg_tokens_close(s); /* the thread holds it still */
    ok(pg_prefetch_ask(p, (int64_t[ROWS]){0}));
    ok(pg_prefetch_take(p, got));
    ok(pg_prefetch_ask(p, (int64_t[ROWS]){0}));
    pg_prefetch_free(p); /* with a batch out */
}

/* The thread takes no signal, and an interrupt loses no batch. */
static void test_prefetch_and_interrupts(void **state) {
    (void)state;
    put_file(in_folder("i.bin"), "\1\0\2\0", 4);
    pg_tokens *s = opened(in_folder("i.bin"), -1, 0);
    pg_prefetch *p;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    ok(pg_prefetch_new(&p, s, 1, 2, 1));
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&after, SIGUSR1), sigismember(&before, SIGUSR1));
    int32_t got[2];
    pg_interrupt(1);
    ok(pg_prefetch_ask(p, (int64_t[]){0}));
    usleep(20000);
    refuses(PG_EINTR, "interrupted", pg_tokens_read(s, 0, 1, got));
    pg_interrupt(0);
    ok(pg_prefetch_take(p, got));
    assert_true(got[0] == 1 && got[1] == 2);
    pg_prefetch_free(p);
    pg_tokens_close(s);
}

/* ---- the order ---- */
static void test_permutation_is_one(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 1024, 4097, 100003};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        char *seen = calloc(1, (size_t)sizes[k]);
        for (int64_t i = 0; i < sizes[k]; i++) {
            int64_t to = pg_permute_index(i, sizes[k], 7 + k);
            assert_true(to >= 0 && to < sizes[k] && !seen[to]);
            seen[to] = 1;
        }
        free(seen);
    }
    const int64_t huge =
        1LL << 62; /* too many to mark: no two of a sample fall together, all inside */
    for (int64_t i = 0; i < 1000; i++) {
        int64_t to = pg_permute_index(huge - 1 - i, huge, 1);
        assert_true(to >= 0 && to < huge && to != pg_permute_index(i, huge, 1));
        to = pg_permute_index(i, huge / 2 + 3, 1);
        assert_true(to >= 0 && to < huge / 2 + 3);
    }
    assert_int_equal(pg_permute_index(5, 5, 1), PG_EINVAL);
    assert_int_equal(pg_permute_index(-1, 5, 1), PG_EINVAL);
    assert_int_equal(pg_permute_index(0, 0, 1), PG_EINVAL);
}

/* Each index meets each place about equally often over the keys, and neighbours part. */
static void test_permutation_is_mixed(void **state) {
    (void)state;
    enum { N = 8, KEYS = 8000 };
    int times[N][N] = {{0}}, follow = 0;
    for (uint64_t key = 0; key < KEYS; key++)
        for (int64_t i = 0; i < N; i++) {
            int64_t to = pg_permute_index(i, N, key);
            times[i][to]++;
            if (i) follow += to == pg_permute_index(i - 1, N, key) + 1;
        }
    double chi2 = 0, each = KEYS / (double)N;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) chi2 += (times[i][j] - each) * (times[i][j] - each) / each;
    assert_true(chi2 < 85); /* 49 degrees of freedom: p = 0.001 */
    assert_true(fabs(follow / (double)KEYS - 7.0 / 8) < 0.05); /* 7 pairs, 1 in 8 by chance */
    int same = 0; /* another epoch, another order; the same key, the same order */
    for (int64_t i = 0; i < 16; i++)
        same += pg_permute_index(i, 16, 1) == pg_permute_index(i, 16, 2);
    assert_true(same < 8);
    assert_int_equal(pg_permute_index(3, 1000, 42), pg_permute_index(3, 1000, 42));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_formats_of_llmc),
        cmocka_unit_test(test_writer_refuses),
        cmocka_unit_test(test_headerless_and_many_files),
        cmocka_unit_test(test_broken_files),
        cmocka_unit_test(test_beyond_four_gib),
        cmocka_unit_test(test_prefetch_keeps_order_and_errors),
        cmocka_unit_test(test_prefetch_and_interrupts),
        cmocka_unit_test(test_permutation_is_one),
        cmocka_unit_test(test_permutation_is_mixed),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
