/* test_cuda_memory.c: the CUDA backend's memory through pg.h: reads, writes, pinned buffers, the
 * limit; marks.  Needs a GPU.  And graphs: tests/lua/test_graph.lua has the rest of them. */
#include "../check.h"
#include "../../runtime/backend/backend.h"

static int there; /* a GPU answers */

static int open_gpu(void **state) {
    (void)state;
    there = pg_init("cuda", 0) == PG_OK;
    if (!there) print_message("skipped: %s\n", pg_errmsg());
    return 0;
}

static pg_tensor *new_f32(int64_t n) {
    pg_tensor *t;
    ok(pg_tensor_new(&t, PG_F32, 1, &n));
    return t;
}

/* Sizes about the pieces that transfers are cut into, at odd places. */
static void test_read_write(void **state) {
    (void)state;
    if (!there) skip();
    int64_t sizes[] = {1, 3, 65535, 65536, 65537, 3000001, 20000000};
    for (int s = 0; s < 7; s++) {
        int64_t n = sizes[s], first = s % 3, bytes = (n - first > 0 ? n - first : 0) * 4;
        float *out = malloc((size_t)n * 4), *in = calloc((size_t)n, 4);
        pg_tensor *t = new_f32(n);
        for (int64_t i = 0; i < n; i++) out[i] = (float)(i * 7 % 1000003) + (float)s;
        ok(pg_fill(t, -1));
        ok(pg_tensor_write(t, n > first ? first : 0, out, bytes));
        memset(out + bytes / 4, 0, (size_t)(n * 4 - bytes));
        ok(pg_tensor_read(t, n > first ? first : 0, in, bytes));
        assert_memory_equal(in, out, (size_t)bytes);
        pg_tensor_free(t);
        free(out);
        free(in);
    }
}

/* More small writes than there are pieces; each must be in place when it is read. */
static void test_many_small_writes(void **state) {
    (void)state;
    if (!there) skip();
    pg_tensor *t = new_f32(1000);
    float got[1000];
    for (int i = 0; i < 1000; i++) {
        float x = (float)i;
        ok(pg_tensor_write(t, i, &x, 4));
    }
    ok(pg_tensor_read(t, 0, got, sizeof got));
    for (int i = 0; i < 1000; i++) assert_true(got[i] == (float)i);
    pg_tensor_free(t);
}

static void test_pinned(void **state) {
    (void)state;
    if (!there) skip();
    int64_t n = 4 << 20;
    pg_host *h;
    pg_tensor *t = new_f32(n), *u = new_f32(n);
    ok(pg_host_new(&h, 8 * n));
    float *data = pg_host_data(h);
    for (int64_t i = 0; i < n; i++) data[i] = (float)(i % 1000);
    ok(pg_fill(u, 1));
    for (int turn = 0; turn < 5; turn++) {
        ok(pg_host_upload(h, 0, t, 0, 4 * n));
        ok(pg_host_join(h));
        ok(pg_binary(u, u, t, PG_ADD, 0));
        ok(pg_host_download(h, 4 * n, u, 0, 4 * n));
        ok(pg_host_wait(h));
        for (int64_t i = 0; i < n; i++)
            assert_true(data[n + i] == 1 + (float)(turn + 1) * (float)(i % 1000));
    }
    pg_host_free(h);
    pg_tensor_free(t);
    pg_tensor_free(u);
}

static void test_limits(void **state) {
    (void)state;
    if (!there) skip();
    pg_mem m;
    pg_tensor *t = NULL;
    int64_t n = (int64_t)1 << 45;
    pg_mem_stats(&m);
    assert_true(m.limit > (1LL << 30));
    refuses(PG_ENOMEM, "memory", pg_tensor_new(&t, PG_F32, 1, &n));
    assert_null(t);
    pg_mem_trim();
    ok(pg_sync());
    assert_null(pg_tensor_data(t = new_f32(4))); /* the host cannot look into it */
    pg_tensor_free(t);
}

static void test_copy_and_view(void **state) {
    (void)state;
    if (!there) skip();
    pg_tensor *t = new_f32(100), *u = new_f32(50), *v;
    int64_t fifty = 50;
    float x[100], y[50];
    for (int i = 0; i < 100; i++) x[i] = (float)i;
    ok(pg_tensor_write(t, 0, x, sizeof x));
    ok(pg_tensor_view(&v, t, 37, 1, &fifty));
    ok(pg_copy(u, v));
    ok(pg_tensor_read(u, 0, y, sizeof y));
    assert_memory_equal(x + 37, y, sizeof y);
    pg_tensor_free(v);
    pg_tensor_free(t);
    pg_tensor_free(u);
}

/* Marks see what lies between them on the device, though the host was through
 * with it long before. */
static void test_marks(void **state) {
    (void)state;
    if (!there) skip();
    int64_t n = 64 << 20;
    pg_tensor *t = new_f32(n);
    pg_marks *m;
    double at[4], all = pg_time();
    ok(pg_marks_new(&m, 4));
    ok(pg_marks_set(m, 0));
    ok(pg_marks_set(m, 1));
    for (int i = 0; i < 50; i++) ok(pg_fill(t, i)); /* 256 MiB each: 50 us at 5 TB/s */
    ok(pg_marks_set(m, 2));
    ok(pg_marks_read(m, at));
    all = pg_time() - all;
    assert_true(at[0] == 0 && at[1] >= 0 && at[1] < at[2] && at[2] <= all && isnan(at[3]));
    assert_true(at[2] - at[1] > 50 * 20e-6);
    pg_marks_free(m);
    pg_tensor_free(t);
}

static float first_of(pg_tensor *t) {
    float x = 0;
    ok(pg_tensor_read(t, 0, &x, sizeof x));
    return x;
}

/* What is recorded is not done, and is done as often as it is launched.  Its blocks are of a size
 * that the pool has never had, so the device is asked for memory meanwhile. */
static void test_graph(void **state) {
    (void)state;
    if (!there) skip();
    int64_t n = 12345677;
    pg_tensor *sum = new_f32(n), *x = new_f32(n), *made = NULL;
    pg_graph *g = NULL;
    pg_mem before, during;
    ok(pg_fill(sum, 0));
    ok(pg_fill(x, 3));
    pg_mem_trim();
    pg_mem_stats(&before);
    ok(pg_graph_begin());
    made = new_f32(n + 1000000);
    pg_tensor *part;
    ok(pg_tensor_view(&part, made, 7, 1, &n));
    ok(pg_copy(part, x));
    ok(pg_axpby(sum, part, 2, 1));
    ok(pg_graph_end(&g));
    assert_non_null(g);
    assert_true(pg_graph_bytes(g) >= 4 * (n + 1000000));
    assert_true(first_of(sum) == 0);
    for (int i = 1; i <= 3; i++) {
        ok(pg_fill(x, i));
        ok(pg_graph_launch(g));
        assert_true(first_of(sum) == (float)(i * (i + 1)));
    }
    pg_tensor_free(x); /* the graph holds it */
    pg_tensor *other = new_f32(n);
    ok(pg_fill(other, -1));
    ok(pg_graph_launch(g));
    assert_true(first_of(sum) == 18);
    assert_true(first_of(other) == -1);
    pg_tensor_free(part);
    pg_tensor_free(made);
    pg_graph_free(g);
    pg_tensor_free(other);
    pg_tensor_free(sum);
    pg_mem_stats(&during);
    assert_true(during.in_use < before.in_use);
    pg_mem_trim();
    ok(pg_sync());
}

/* The stream computes as before, whatever ended a recording. */
static void test_graph_given_up(void **state) {
    (void)state;
    if (!there) skip();
    pg_tensor *t = new_f32(100);
    pg_graph *g = NULL;
    float x = 0;
    for (int i = 0; i < 3; i++) {
        ok(pg_fill(t, i));
        ok(pg_graph_begin());
        ok(pg_fill(t, 77));
        if (i == 0)
            refuses(PG_EGRAPH, "read: a graph is being recorded", pg_tensor_read(t, 0, &x, 4));
        if (i == 1)
            refuses(PG_EGRAPH, "write: a graph is being recorded", pg_tensor_write(t, 0, &x, 4));
        if (i == 2) ok(pg_graph_end(NULL));
        else refuses(PG_EGRAPH, "a graph is being recorded", pg_graph_end(&g));
        assert_null(g);
        assert_true(first_of(t) == (float)i);
    }
    refuses(PG_EINVAL, "none is being recorded", pg_graph_end(&g));
    pg_tensor_free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_read_write, nothing_alive),
        cmocka_unit_test_teardown(test_many_small_writes, nothing_alive),
        cmocka_unit_test_teardown(test_pinned, nothing_alive),
        cmocka_unit_test_teardown(test_limits, nothing_alive),
        cmocka_unit_test_teardown(test_copy_and_view, nothing_alive),
        cmocka_unit_test_teardown(test_marks, nothing_alive),
        cmocka_unit_test_teardown(test_graph, nothing_alive),
        cmocka_unit_test_teardown(test_graph_given_up, nothing_alive),
    };
    return cmocka_run_group_tests(tests, open_gpu, NULL);
}
