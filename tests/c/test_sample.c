/* Argmax and sampling: the largest, frequencies, cuts, and the same draw by the same counter. */
#include "numbers.h"

static void argmax_takes_the_first_of_equals(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        pg_tensor *x = noisy(kind & 1 ? PG_F64 : PG_F32, SHAPE(3, 50));
        pg_tensor *ids = born(kind & 2 ? PG_I64 : PG_I32, SHAPE(3));
        set(x, 17, 2), set(x, 31, 2), set(x, 99, 7);
        for (int64_t i = 100; i < 150; i++) set(x, i, NAN);
        ok(pg_argmax(ids, x));
        double *got = numbers(ids);
        assert_true(got[0] == 17 && got[1] == 49 && got[2] == 0);
    }
}

#define DRAWS 20000

/* How often each id is drawn from one row repeated DRAWS times. */
static double *frequencies(const double *logits, int64_t v, double temperature, int64_t top_k,
                           double top_p) {
    pg_tensor *x = born(PG_F32, SHAPE(DRAWS, v)), *ids = born(PG_I32, SHAPE(DRAWS));
    for (int64_t i = 0; i < DRAWS * v; i++) set(x, i, logits[i % v]);
    ok(pg_sample(ids, x, temperature, top_k, top_p, 5, 6, 0));
    double *got = numbers(ids), *often = doubles(v);
    for (int64_t i = 0; i < DRAWS; i++) often[(int64_t)got[i]]++;
    for (int64_t i = 0; i < v; i++) often[i] /= DRAWS;
    return often;
}

static void close_to(const double *got, const double *want, int64_t n) {
    for (int64_t i = 0; i < n; i++) /* five deviations of a frequency */
        if (fabs(got[i] - want[i]) > 5 * sqrt(want[i] * (1 - want[i]) / DRAWS))
            fail_msg("id %d came %.4f of the time, not %.4f", (int)i, got[i], want[i]);
}

static void frequencies_follow_the_softmax(void **state) {
    (void)state;
    double logits[] = {log(0.1), log(0.4), log(0.2), log(0.3), -INFINITY};
    double all[] = {0.1, 0.4, 0.2, 0.3, 0}, two[] = {0, 4.0 / 7, 0, 3.0 / 7, 0};
    double squares[] = {0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3, 0};
    double three[] = {0, 4.0 / 9, 2.0 / 9, 3.0 / 9, 0}, one[] = {0, 1, 0, 0, 0};
    close_to(frequencies(logits, 5, 1, 0, 1), all, 5);
    close_to(frequencies(logits, 5, 0.5, 0, 1), squares, 5);
    close_to(frequencies(logits, 5, 1, 2, 1), two, 5);
    close_to(frequencies(logits, 5, 1, 0, 0.65), two, 5); /* 0.4 + 0.3 reach it */
    close_to(frequencies(logits, 5, 1, 0, 0.75), three, 5);
    close_to(frequencies(logits, 5, 1, 3, 0.7), two, 5);  /* 0.7 of the three's 0.9 */
    close_to(frequencies(logits, 5, 1, 0, 1e-9), one, 5); /* never fewer than one */
    close_to(frequencies(logits, 5, 0, 0, 1), one, 5);
    close_to(frequencies(logits, 5, 1, 99, 1), all, 5);
}

/* A row draws by its index: the same however the rows are shared out. */
static void draws_follow_the_counter(void **state) {
    (void)state;
    pg_tensor *x = noisy(PG_F32, SHAPE(60, 11)), *ids = born(PG_I32, SHAPE(60)), *late, *late_ids;
    ok(pg_sample(ids, x, 1, 0, 1, 1, 2, 100));
    ok(pg_tensor_view(&late, x, 40 * 11, SHAPE(20, 11)));
    late_ids = born(PG_I32, SHAPE(20));
    ok(pg_sample(late_ids, late, 1, 0, 1, 1, 2, 140));
    pg_tensor_free(late);
    assert_memory_equal((int32_t *)pg_tensor_data(ids) + 40, pg_tensor_data(late_ids), 80);
}

static void equal_weights_prefer_the_smaller_id(void **state) {
    (void)state;
    double logits[300], *got;
    for (int i = 0; i < 300; i++) logits[i] = 0;
    got = frequencies(logits, 300, 1, 3, 1);
    assert_true(got[0] > 0.3 && got[1] > 0.3 && got[2] > 0.3);
}

static void bad_calls_are_told(void **state) {
    (void)state;
    pg_tensor *x = noisy(PG_F32, SHAPE(2, 5)), *ids = born(PG_I32, SHAPE(2));
    pg_tensor *three = born(PG_I32, SHAPE(3)), *wide = born(PG_I64, SHAPE(2));
    refuses(PG_EINVAL, "temperature -1", pg_sample(ids, x, -1, 0, 1, 0, 0, 0));
    refuses(PG_EINVAL, "temperature nan", pg_sample(ids, x, fabs(NAN), 0, 1, 0, 0, 0));
    refuses(PG_EINVAL, "top_p 0 lies outside (0,1]", pg_sample(ids, x, 1, 0, 0, 0, 0, 0));
    refuses(PG_EINVAL, "top_k -2", pg_sample(ids, x, 1, -2, 1, 0, 0, 0));
    refuses(PG_ESHAPE, "an id for each row", pg_sample(three, x, 1, 0, 1, 0, 0, 0));
    refuses(PG_ESHAPE, "dtype must be i32", pg_sample(wide, x, 1, 0, 1, 0, 0, 0));
    refuses(PG_ESHAPE, "an id for each row", pg_argmax(three, x));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(argmax_takes_the_first_of_equals, numbers_end),
        cmocka_unit_test_teardown(frequencies_follow_the_softmax, numbers_end),
        cmocka_unit_test_teardown(draws_follow_the_counter, numbers_end),
        cmocka_unit_test_teardown(equal_weights_prefer_the_smaller_id, numbers_end),
        cmocka_unit_test_teardown(bad_calls_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
