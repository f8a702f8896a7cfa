/* Embedding and its gradient: value, repeated ids, one order of summing, tables that are a part of
 * the vocabulary's, and ids that are not there. */
#include <omp.h>
#include "numbers.h"

static void check_embedding(int dtype, int dtype_ids, int64_t n, int64_t v, int64_t d) {
    pg_tensor *table = noisy(dtype, SHAPE(v, d)), *y = poisoned(dtype, SHAPE(2, n, d));
    pg_tensor *ids = some_ids(dtype_ids, v, SHAPE(2, n)), *dtable = poisoned(dtype, SHAPE(v, d));
    double *a = numbers(table), *id = numbers(ids), *want = doubles(2 * n * d),
           *sums = doubles(v * d);
    for (int64_t i = 0; i < 2 * n * d; i++) want[i] = a[(int64_t)id[i / d] * d + i % d];
    ok(pg_embedding(y, table, ids, 0, 0));
    near_to(y, want, 0);
    for (int64_t i = 0; i < 2 * n * d; i++) sums[(int64_t)id[i / d] * d + i % d] += want[i];
    ok(pg_embedding_grad(dtable, y, ids, 0, 0, 0));
    near_to(dtable, sums, tolerance(dtype));
    set_all(dtable, 0.5);
    for (int64_t i = 0; i < v * d; i++) sums[i] += 0.5;
    ok(pg_embedding_grad(dtable, y, ids, 0, 0, 1));
    near_to(dtable, sums, tolerance(dtype));
    numbers_end(NULL);
}

static void value_and_gradient(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        int dtype = kind & 1 ? PG_F64 : PG_F32, ids = kind & 2 ? PG_I64 : PG_I32;
        check_embedding(dtype, ids, 5, 3, 7);
        check_embedding(dtype, ids, 150, 40, 201);
        check_embedding(dtype, ids, 0, 4, 5);
    }
}

/* A table of v rows, those of ids from `first` on; ids of all the vocabulary. */
static void check_part(int dtype, int dtype_ids, int64_t v, int64_t first, int64_t vocab) {
    int64_t n = 90, d = 70;
    pg_tensor *table = noisy(dtype, SHAPE(v, d)), *y = poisoned(dtype, SHAPE(n, d));
    pg_tensor *ids = some_ids(dtype_ids, vocab, SHAPE(n)), *dy = noisy(dtype, SHAPE(n, d));
    pg_tensor *dtable = poisoned(dtype, SHAPE(v, d));
    double *a = numbers(table), *g = numbers(dy), *id = numbers(ids), *want = doubles(n * d),
           *sums = doubles(v * d);
    for (int64_t i = 0; i < n * d; i++) {
        int64_t row = (int64_t)id[i / d] - first, here = row >= 0 && row < v;
        want[i] = here ? a[row * d + i % d] : 0;
        if (here) sums[row * d + i % d] += g[i];
    }
    ok(pg_embedding(y, table, ids, first, vocab));
    near_to(y, want, 0);
    ok(pg_embedding_grad(dtable, dy, ids, first, vocab, 0));
    near_to(dtable, sums, tolerance(dtype));
    set_all(dtable, 0.5);
    for (int64_t i = 0; i < v * d; i++) sums[i] += 0.5;
    ok(pg_embedding_grad(dtable, dy, ids, first, vocab, 1));
    near_to(dtable, sums, tolerance(dtype));
    numbers_end(NULL);
}

static void a_part_of_the_vocabulary(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        int dtype = kind & 1 ? PG_F64 : PG_F32, ids = kind & 2 ? PG_I64 : PG_I32;
        check_part(dtype, ids, 5, 4, 13);
        check_part(dtype, ids, 5, 0, 13);
        check_part(dtype, ids, 5, 10, 13); /* two rows of padding */
        check_part(dtype, ids, 16, 0, 13);
        check_part(dtype, ids, 5, 13, 13); /* padding alone */
    }
}

/* A row that is not asked for may hold anything, and the other parts' ids give a plain 0. */
static void other_rows_are_not_read(void **state) {
    (void)state;
    pg_tensor *table = poisoned(PG_F32, SHAPE(2, 3)), *y = poisoned(PG_F32, SHAPE(2, 3));
    pg_tensor *ids = some_ids(PG_I32, 4, SHAPE(2));
    set(ids, 0, 1), set(ids, 1, 4);
    ok(pg_embedding(y, table, ids, 2, 5));
    assert_memory_equal(pg_tensor_data(y), ((float[6]){0}), 6 * sizeof(float));
}

static void same_bits_for_any_number_of_threads(void **state) {
    (void)state;
    pg_tensor *ids = some_ids(PG_I32, 9, SHAPE(500)), *dy = noisy(PG_F32, SHAPE(500, 200));
    pg_tensor *d[2] = {poisoned(PG_F32, SHAPE(9, 200)), poisoned(PG_F32, SHAPE(9, 200))};
    int threads = omp_get_max_threads();
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i ? 5 : 1);
        ok(pg_embedding_grad(d[i], dy, ids, 0, 0, 0));
    }
    omp_set_num_threads(threads);
    assert_memory_equal(pg_tensor_data(d[0]), pg_tensor_data(d[1]), 9 * 200 * sizeof(float));
}

static void wrong_ids_are_told(void **state) {
    (void)state;
    pg_tensor *table = noisy(PG_F32, SHAPE(259, 4)), *y = noisy(PG_F32, SHAPE(4, 8, 4));
    pg_tensor *ids = some_ids(PG_I32, 259, SHAPE(4, 8)), *few = some_ids(PG_I32, 259, SHAPE(3, 8));
    pg_tensor *wide = some_ids(PG_I64, 259, SHAPE(4, 8));
    set(ids, 2 * 8 + 7, 300);
    refuses(PG_EINVAL, "embedding: id 300 at row 2, column 7 is outside the vocabulary [0,259)",
            pg_embedding(y, table, ids, 0, 0));
    set(ids, 2 * 8 + 7, 258);
    set(ids, 5, -1);
    refuses(PG_EINVAL, "embedding_grad: id -1 at row 0, column 5",
            pg_embedding_grad(table, y, ids, 0, 0, 0));
    set(wide, 31, 1e10);
    refuses(PG_EINVAL, "id 10000000000 at row 3, column 7", pg_embedding(y, table, wide, 0, 0));
    set(ids, 5, 0), set(ids, 9, 258);
    ok(pg_embedding(y, table, ids, 0, 0)); /* and nothing is broken afterwards */
    refuses(PG_ESHAPE, "a row for each id", pg_embedding(y, table, few, 0, 0));
    refuses(PG_ESHAPE, "must be i32 or i64", pg_embedding(y, table, y, 0, 0));
    refuses(PG_EINVAL, "embedding: id 258 at row", pg_embedding(y, table, ids, 100, 258));
    refuses(PG_EINVAL, "embedding_grad: id 258 at row",
            pg_embedding_grad(table, y, ids, 0, 258, 0));
    refuses(PG_EINVAL, "embedding: first is -1, vocab is 259", pg_embedding(y, table, ids, -1, 0));
    refuses(PG_EINVAL, "embedding_grad: first is 301, vocab is 300",
            pg_embedding_grad(table, y, ids, 301, 300, 0));
    refuses(PG_EINVAL, "first is 0, vocab is -1", pg_embedding(y, table, ids, 0, -1));
    refuses(PG_EINVAL, "share memory",
            pg_embedding(table, table, some_ids(PG_I32, 259, SHAPE(259)), 0, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(value_and_gradient, numbers_end),
        cmocka_unit_test_teardown(a_part_of_the_vocabulary, numbers_end),
        cmocka_unit_test_teardown(other_rows_are_not_read, numbers_end),
        cmocka_unit_test_teardown(same_bits_for_any_number_of_threads, numbers_end),
        cmocka_unit_test_teardown(wrong_ids_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
