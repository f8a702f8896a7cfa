/* Philox against the known answers of its paper, and its streams against the rules of philox.h. */
#include "check.h"
#include "../../kernels/cpu.h"
#include "../../kernels/philox.h"

static void check_words(pg_philox got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t want[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) assert_int_equal(got.word[i], want[i]);
}

/* Salmon et al. 2011, file of known answers: philox4x32, 10 rounds. */
static void known_answers(void **state) {
    (void)state;
    const uint32_t f = 0xffffffffu;
    check_words(pg_philox_rounds((pg_philox){{0, 0, 0, 0}}, 0, 0), 0x6627e8d5, 0xe169c58d,
                0xbc57ac4c, 0x9b00dbd8);
    check_words(pg_philox_rounds((pg_philox){{f, f, f, f}}, f, f), 0x408f276d, 0x41c83b0e,
                0xa20bc7c6, 0x6d5451fd);
}

static void words_by_index(void **state) {
    (void)state;
    uint64_t stream = pg_philox_stream(7, 11);
    int64_t far = ((int64_t)1 << 40) + 5; /* past 32 bits of counter */
    for (int64_t i = far; i < far + 9; i++)
        assert_int_equal(pg_philox_u32(stream, i),
                         pg_philox_block(stream, (uint64_t)i / 4).word[i % 4]);
    assert_true(pg_philox_stream(7, 11) != pg_philox_stream(11, 7));
    assert_true(pg_philox_stream(0, 0) != pg_philox_stream(0, 1));
}

/* Each number stays the same however the run around it is cut. */
static void units_in_runs(void **state) {
    (void)state;
    uint64_t stream = pg_philox_stream(1, 2);
    float got[1000];
    for (int64_t first = 0; first < 7; first++)
        for (int64_t n = 0; n <= 1000; n += 333) {
            cpu_units(got, stream, first, n);
            for (int64_t i = 0; i < n; i++)
                assert_true(got[i] == pg_philox_uniform(stream, first + i));
        }
}

/* Against Box and Muller by libm. */
static void normals_by_libm(void **state) {
    (void)state;
    uint64_t stream = pg_philox_stream(3, 4);
    for (int64_t i = 0; i < 20000; i++) {
        pg_philox b = pg_philox_block(stream, (uint64_t)i / 2);
        double u = ((double)b.word[i % 2 * 2] + 1) / 4294967296.0;
        double turn = (double)b.word[i % 2 * 2 + 1] / 4294967296.0;
        double want = sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * turn);
        assert_true(fabs(pg_philox_normal(stream, i) - want) <= 1e-14 * (1 + fabs(want)));
    }
    /* the ends of both words, where series and octants meet */
    const uint32_t edges[] = {0,          1,          0x1fffffff, 0x20000000, 0x5fffffff,
                              0x60000000, 0x80000000, 0xa0000000, 0xdfffffff, 0xe0000000,
                              0xb504f333, 0xfffffffe, 0xffffffff};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        for (size_t j = 0; j < sizeof edges / sizeof *edges; j++) {
            double u = ((double)edges[i] + 1) / 4294967296.0,
                   turn = (double)edges[j] / 4294967296.0;
            double want = sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * turn);
            assert_true(fabs(pg_philox_gauss(edges[i], edges[j]) - want) <= 1e-14);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers), cmocka_unit_test(words_by_index),
        cmocka_unit_test(units_in_runs), cmocka_unit_test(normals_by_libm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
