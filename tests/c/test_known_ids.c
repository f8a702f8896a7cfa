/* What is known of the ids in a storage: noted by the calls that write ids, forgotten by all
 * others, and never the reason for a wrong answer of the check.  See runtime/core/ops_ids.c. */
#include "../runtime/core/tensor.h"
#include "numbers.h"

#define IGNORE (-100)

static pg_tensor *written(int n, const int32_t *ids) {
    pg_tensor *t = born(PG_I32, SHAPE(n));
    ok(pg_tensor_write(t, 0, ids, n * (int64_t)sizeof *ids));
    return t;
}
#define WRITTEN(...)                                                                               \
    written((int)(sizeof((int32_t[]){__VA_ARGS__}) / 4), (const int32_t[]){__VA_ARGS__})

static void knows(const pg_tensor *t, int64_t high, int64_t negative) {
    assert_int_equal(t->storage->ids.known, 1);
    assert_int_equal(t->storage->ids.high, high);
    assert_int_equal(t->storage->ids.negative, negative);
}

static void knows_nothing(const pg_tensor *t) { assert_int_equal(t->storage->ids.known, 0); }

static void a_whole_write_is_noted(void **state) {
    (void)state;
    int64_t wide[] = {5, (int64_t)1 << 40, -1, 7};
    pg_tensor *t = born(PG_I64, SHAPE(2, 2)), *f = born(PG_F32, SHAPE(2)),
              *none = born(PG_I32, SHAPE(0));
    knows_nothing(t);
    ok(pg_tensor_write(t, 0, wide, sizeof wide));
    knows(t, (int64_t)1 << 40, -1);
    knows(WRITTEN(3, 9, 0), 9, 0);
    knows(WRITTEN(IGNORE, 9, IGNORE), 9, IGNORE);
    knows_nothing(WRITTEN(IGNORE, 9, -1));
    ok(pg_tensor_write(f, 0, (float[]){1, 2}, 8));
    knows_nothing(f);
    ok(pg_tensor_write(none, 0, wide, 0));
    knows_nothing(none);
}

static void a_part_widens_what_is_known(void **state) {
    (void)state;
    pg_tensor *t = born(PG_I32, SHAPE(4)), *tail = NULL, *known = WRITTEN(1, 2, 3, 4);
    ok(pg_tensor_write(t, 2, (int32_t[]){1, 2}, 8));
    knows_nothing(t); /* the first two may hold anything */
    ok(pg_tensor_write(known, 1, (int32_t[]){50, IGNORE}, 8));
    knows(known, 50, IGNORE);
    ok(pg_tensor_write(known, 1, (int32_t[]){7}, 4));
    knows(known, 50, IGNORE);
    ok(pg_tensor_view(&tail, known, 2, SHAPE(2)));
    ok(pg_tensor_write(tail, 0, (int32_t[]){60, 1}, 8)); /* whole of a view, not of the storage */
    knows(known, 60, IGNORE);
    ok(pg_tensor_write(tail, 1, (int32_t[]){-3}, 4)); /* a second value below 0 */
    knows_nothing(known);
    ok(pg_tensor_write(known, 0, (int32_t[]){1, 2, 3, 4}, 16));
    knows(known, 4, 0);
    pg_tensor_free(tail);
}

static void other_writes_are_unknown(void **state) {
    (void)state;
    pg_tensor *t = WRITTEN(1, 2, 3), *u = WRITTEN(1, 2, 3);
    ok(pg_fill(t, 1e6));
    knows_nothing(t);
    ok(pg_copy(u, noisy(PG_F32, SHAPE(3)))); /* a cast */
    knows_nothing(u);
    pg_tensor *x = WRITTEN(1, 2, 3), *y = WRITTEN(8);
    ok(pg_place(x, y, 0, 1, 0));
    knows_nothing(x);
    pg_tensor *d = WRITTEN(1, 2, 3);
    ok(pg_storage_drop(d, "ids"));
    ok(pg_storage_fill(d));
    knows_nothing(d);
    pg_tensor *e = WRITTEN(1, 2, 3);
    assert_non_null(pg_tensor_data(e)); /* its address may be written to at any later time */
    ok(pg_tensor_write(e, 0, (int32_t[]){1, 2, 3}, 12));
    knows_nothing(e);
}

static void a_copy_knows_what_its_source_does(void **state) {
    (void)state;
    pg_tensor *t = WRITTEN(1, 2, 3), *u = WRITTEN(7, -100, 9), *part;
    ok(pg_copy(t, u));
    knows(t, 9, -100);
    knows(u, 9, -100);
    ok(pg_fill(u, 2));
    ok(pg_copy(t, u));
    knows_nothing(t);
    pg_tensor *whole = WRITTEN(1, 2, 30, 4);
    ok(pg_tensor_view(&part, whole, 0, 1, (int64_t[]){3}));
    ok(pg_copy(part, WRITTEN(5, 6, 7))); /* the others are as they were */
    knows(whole, 30, 0);
    pg_tensor_free(part);
}

static void reading_forgets_nothing(void **state) {
    (void)state;
    pg_tensor *ids = WRITTEN(4, 0, 2), *table = noisy(PG_F32, SHAPE(5, 3));
    pg_tensor *y = poisoned(PG_F32, SHAPE(3, 3)), *out = poisoned(PG_F32, SHAPE(2));
    pg_tensor *lse = poisoned(PG_F32, SHAPE(3)), *logits = noisy(PG_F32, SHAPE(3, 5));
    int32_t back[3];
    ok(pg_tensor_read(ids, 0, back, sizeof back));
    ok(pg_embedding(y, table, ids, 0, 0));
    ok(pg_embedding_grad(table, y, ids, 0, 0, 0));
    ok(pg_cross_entropy(out, NULL, lse, logits, ids, IGNORE, NULL));
    pg_tensor *dloss = noisy(PG_F32, SHAPE(1));
    ok(pg_cross_entropy_grad(logits, dloss, logits, ids, lse, out, IGNORE, NULL, 0));
    knows(ids, 4, 0);
}

static void ids_of_argmax_and_sample(void **state) {
    (void)state;
    pg_tensor *x = noisy(PG_F32, SHAPE(3, 17)), *ids = born(PG_I32, SHAPE(3)), *part = NULL;
    ok(pg_argmax(ids, x));
    knows(ids, 16, 0);
    ok(pg_fill(ids, 0));
    ok(pg_sample(ids, x, 1, 0, 1, 1, 2, 0));
    knows(ids, 16, 0);
    pg_tensor *longer = born(PG_I32, SHAPE(4));
    ok(pg_tensor_view(&part, longer, 1, SHAPE(3)));
    ok(pg_argmax(part, x));
    knows_nothing(longer);
    ok(pg_tensor_write(longer, 0, (int32_t[]){90, 1, 1, 1}, 16));
    ok(pg_argmax(part, x));
    knows(longer, 90, 0);
    pg_tensor_free(part);
}

static void the_check_is_as_strict_as_before(void **state) {
    (void)state;
    pg_tensor *table = noisy(PG_F32, SHAPE(10, 2)), *y = poisoned(PG_F32, SHAPE(3, 2));
    refuses(PG_EINVAL, "id 10 at row 0, column 1", pg_embedding(y, table, WRITTEN(9, 10, 0), 0, 0));
    ok(pg_embedding(y, table, WRITTEN(9, 10, 0), 5, 11));
    refuses(PG_EINVAL, "id 11 at row 0, column 1",
            pg_embedding(y, table, WRITTEN(9, 11, 0), 5, 11));
    refuses(PG_EINVAL, "id -1 at row 0, column 2", pg_embedding(y, table, WRITTEN(9, 1, -1), 0, 0));
    refuses(PG_EINVAL, "id -100 at row 0, column 0",
            pg_embedding(y, table, WRITTEN(IGNORE, 1, 1), 0, 0));
    pg_tensor *logits = noisy(PG_F32, SHAPE(3, 10)), *lse = poisoned(PG_F32, SHAPE(3));
    pg_tensor *out = poisoned(PG_F32, SHAPE(2));
    ok(pg_cross_entropy(out, NULL, lse, logits, WRITTEN(IGNORE, 9, IGNORE), IGNORE, NULL));
    ok(pg_cross_entropy(out, NULL, lse, logits, WRITTEN(77, 9, 3), 77, NULL));
    refuses(PG_EINVAL, "target -100 at row 0, column 2",
            pg_cross_entropy(out, NULL, lse, logits, WRITTEN(-1, 9, IGNORE), -1, NULL));
    refuses(PG_EINVAL, "target -1 at row 0, column 0",
            pg_cross_entropy(out, NULL, lse, logits, WRITTEN(-1, 9, IGNORE), IGNORE, NULL));
    pg_tensor *late = WRITTEN(1, 2, 3); /* a range too wide is no reason to refuse */
    ok(pg_tensor_write(late, 1, (int32_t[]){500}, 4));
    ok(pg_tensor_write(late, 1, (int32_t[]){5}, 4));
    knows(late, 500, 0);
    ok(pg_embedding(y, table, late, 0, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_whole_write_is_noted, numbers_end),
        cmocka_unit_test_teardown(a_part_widens_what_is_known, numbers_end),
        cmocka_unit_test_teardown(other_writes_are_unknown, numbers_end),
        cmocka_unit_test_teardown(a_copy_knows_what_its_source_does, numbers_end),
        cmocka_unit_test_teardown(reading_forgets_nothing, numbers_end),
        cmocka_unit_test_teardown(ids_of_argmax_and_sample, numbers_end),
        cmocka_unit_test_teardown(the_check_is_as_strict_as_before, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
