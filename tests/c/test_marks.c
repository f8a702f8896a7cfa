/* test_marks.c: pg_marks on the CPU: in order, of pg_time's clock, and what is refused.  On a GPU:
 * test_cuda_memory.c. */
#include "../check.h"
#include "../../runtime/base/capture.h"

static void test_moments(void **state) {
    (void)state;
    pg_marks *m;
    double before, after, at[4];
    ok(pg_init("cpu", 0));
    ok(pg_marks_new(&m, 4));
    before = pg_time();
    ok(pg_marks_set(m, 2));
    ok(pg_marks_set(m, 0));
    ok(pg_marks_set(m, 3));
    after = pg_time();
    ok(pg_marks_read(m, at));
    assert_true(before <= at[2] && at[2] <= at[0] && at[0] <= at[3] && at[3] <= after);
    assert_true(isnan(at[1]));
    ok(pg_marks_set(m, 2)); /* the later moment counts */
    ok(pg_marks_read(m, at));
    assert_true(at[2] >= after);
    pg_marks_free(m);
    pg_marks_free(NULL);
}

static void test_refusals(void **state) {
    (void)state;
    pg_marks *m;
    double at[2];
    refuses(PG_EINVAL, "out is NULL", pg_marks_new(NULL, 1));
    refuses(PG_EINVAL, "marks: 0 of them; 1 to ", pg_marks_new(&m, 0));
    assert_null(m);
    refuses(PG_EINVAL, "marks: -3 of them", pg_marks_new(&m, -3));
    ok(pg_marks_new(&m, 2));
    refuses(PG_EINVAL, "number 2; they are counted 0 to 1", pg_marks_set(m, 2));
    refuses(PG_EINVAL, "number -1", pg_marks_set(m, -1));
    refuses(PG_EINVAL, "they are missing", pg_marks_set(NULL, 0));
    refuses(PG_EINVAL, "they are missing", pg_marks_read(NULL, at));
    refuses(PG_EINVAL, "seconds are missing", pg_marks_read(m, NULL));
    pg_capture_begin();
    refuses(PG_EGRAPH, "marks: a graph is being recorded, and it has no moment",
            pg_marks_set(m, 0));
    refuses(PG_EGRAPH, "read them afterwards", pg_marks_read(m, at));
    pg_capture_end();
    ok(pg_marks_set(m, 0));
    pg_marks_free(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_moments, nothing_alive),
        cmocka_unit_test_teardown(test_refusals, nothing_alive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
