/* test_host_buffer.c: pg_host on the CPU: moves, what is refused, and that ids stay known. */
#include "../check.h"

static void test_moves(void **state) {
    (void)state;
    pg_host *h;
    pg_tensor *t;
    int64_t dims[] = {4};
    float back[4];
    ok(pg_init("cpu", 0));
    ok(pg_host_new(&h, 32));
    float *data = pg_host_data(h);
    for (int i = 0; i < 8; i++) data[i] = (float)i;
    ok(pg_tensor_new(&t, PG_F32, 1, dims));
    ok(pg_host_upload(h, 16, t, 0, 16));
    ok(pg_host_join(h));
    ok(pg_tensor_read(t, 0, back, 16));
    for (int i = 0; i < 4; i++) assert_true(back[i] == (float)(4 + i));
    ok(pg_fill(t, 9));
    ok(pg_host_download(h, 4, t, 2, 8));
    ok(pg_host_wait(h));
    for (int i = 0; i < 8; i++) assert_true(data[i] == (i == 1 || i == 2 ? 9 : (float)i));
    pg_tensor_free(t);
    pg_host_free(h);
}

static void test_refusals(void **state) {
    (void)state;
    pg_host *h;
    pg_tensor *t;
    int64_t dims[] = {4};
    refuses(PG_EINVAL, "-1 bytes", pg_host_new(&h, -1));
    assert_null(h);
    ok(pg_host_new(&h, 8));
    ok(pg_tensor_new(&t, PG_F32, 1, dims));
    refuses(PG_ESHAPE, "upload: 12 bytes at 0 of a buffer of 8", pg_host_upload(h, 0, t, 0, 12));
    refuses(PG_ESHAPE, "upload: 8 bytes at 4 of a buffer of 8", pg_host_upload(h, 4, t, 0, 8));
    refuses(PG_ESHAPE, "download: 8 bytes at element 3", pg_host_download(h, 0, t, 3, 8));
    refuses(PG_ESHAPE, "download: 6 bytes at element 0", pg_host_download(h, 0, t, 0, 6));
    refuses(PG_EINVAL, "the tensor is missing", pg_host_upload(h, 0, NULL, 0, 4));
    refuses(PG_EINVAL, "the buffer is missing", pg_host_upload(NULL, 0, t, 0, 4));
    refuses(PG_EINVAL, "the buffer is missing", pg_host_wait(NULL));
    assert_null(pg_host_data(NULL));
    pg_host_free(NULL);
    pg_tensor_free(t);
    pg_host_free(h);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_moves, nothing_alive),
        cmocka_unit_test_teardown(test_refusals, nothing_alive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
