/* Embedding and its gradient: value, repeated ids, one order of summing, and ids that are not there. */
#include <omp.h>
#include "numbers.h"

static void check_embedding(int dtype, int dtype_ids, int64_t n, int64_t v, int64_t d) {
    pg_tensor *table = noisy(dtype, SHAPE(v, d)), *y = poisoned(dtype, SHAPE(2, n, d));
    pg_tensor *ids = some_ids(dtype_ids, v, SHAPE(2, n)), *dtable = poisoned(dtype, SHAPE(v, d));
    double *a = numbers(table), *id = numbers(ids), *want = doubles(2 * n * d),
           *sums = doubles(v * d);
    for (int64_t i = 0; i < 2 * n * d; i++) want[i] = a[(int64_t)id[i / d] * d + i % d];
    ok(pg_embedding(y, table, ids));
    near_to(y, want, 0);
    for (int64_t i = 0; i < 2 * n * d; i++) sums[(int64_t)id[i / d] * d + i % d] += want[i];
    ok(pg_embedding_grad(dtable, y, ids, 0));
    near_to(dtable, sums, tolerance(dtype));
    set_all(dtable, 0.5);
    for (int64_t i = 0; i < v * d; i++) sums[i] += 0.5;
    ok(pg_embedding_grad(dtable, y, ids, 1));
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

static void same_bits_for_any_number_of_threads(void **state) {
    (void)state;
    pg_tensor *ids = some_ids(PG_I32, 9, SHAPE(500)), *dy = noisy(PG_F32, SHAPE(500, 200));
    pg_tensor *d[2] = {poisoned(PG_F32, SHAPE(9, 200)), poisoned(PG_F32, SHAPE(9, 200))};
    int threads = omp_get_max_threads();
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i ? 5 : 1);
        ok(pg_embedding_grad(d[i], dy, ids, 0));
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
            pg_embedding(y, table, ids));
    set(ids, 2 * 8 + 7, 258);
    set(ids, 5, -1);
    refuses(PG_EINVAL, "embedding_grad: id -1 at row 0, column 5",
            pg_embedding_grad(table, y, ids, 0));
    set(wide, 31, 1e10);
    refuses(PG_EINVAL, "id 10000000000 at row 3, column 7", pg_embedding(y, table, wide));
    set(ids, 5, 0);
    ok(pg_embedding(y, table, ids)); /* and nothing is broken afterwards */
    refuses(PG_ESHAPE, "a row for each id", pg_embedding(y, table, few));
    refuses(PG_ESHAPE, "must be i32 or i64", pg_embedding(y, table, y));
    refuses(PG_EINVAL, "share memory",
            pg_embedding(table, table, some_ids(PG_I32, 259, SHAPE(259))));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(value_and_gradient, numbers_end),
        cmocka_unit_test_teardown(same_bits_for_any_number_of_threads, numbers_end),
        cmocka_unit_test_teardown(wrong_ids_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
