/* Fill, copy, casts between all dtypes and random fills: values, roundings,
 * layouts, bad arguments. */
#include "tensors.h"
#include "../../kernels/cpu.h"
#include "../../kernels/philox.h"

static void fill_all_dtypes(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 7, 100003};
    for (int dtype = 0; dtype < PG_NDTYPES; dtype++)
        for (int i = 0; i < 4; i++) {
            pg_tensor *t = tensor(dtype, sizes[i]), *back = tensor(PG_F64, sizes[i]);
            ok(pg_fill(t, 3));
            ok(pg_copy(back, t));
            for (int64_t j = 0; j < sizes[i]; j++) assert_true(at(back, j) == 3);
            pg_tensor_free(t);
            pg_tensor_free(back);
        }
}

/* One number x of one dtype, cast to another, as doubles; halves go by way of their own bits. */
static double cast_one(double x, int from, int to) {
    double out = NAN;
    union {
        double real;
        uint64_t bits;
    } a, b;
    ok(cpu_cast(&a, &x, 1, from, PG_F64, NULL));
    ok(cpu_cast(&b, &a, 1, to, from, NULL));
    ok(cpu_cast(&out, &b, 1, PG_F64, to, NULL));
    return out;
}

/* Small integers pass through all pairs unharmed, in every length of piece. */
static void all_pairs(void **state) {
    (void)state;
    for (int from = 0; from < PG_NDTYPES; from++)
        for (int to = 0; to < PG_NDTYPES; to++) {
            int64_t n = 40000 + from;
            pg_tensor *a = tensor(PG_I32, n), *b = tensor(from, n), *c = tensor(to, n),
                      *d = tensor(PG_I32, n);
            for (int64_t i = 0; i < n; i++) put_at(a, i, (double)(i % 129));
            ok(pg_copy(b, a));
            ok(pg_copy(c, b));
            ok(pg_copy(d, c));
            assert_memory_equal(pg_tensor_data(a), pg_tensor_data(d), (size_t)n * 4);
            pg_tensor_free(a), pg_tensor_free(b), pg_tensor_free(c), pg_tensor_free(d);
        }
}

static void rounding(void **state) {
    (void)state;
    /* bf16 has 8 bits: the neighbours of 256 are 255 and 258; ties go to even */
    assert_true(cast_one(257, PG_F32, PG_BF16) == 256);
    assert_true(cast_one(259, PG_F32, PG_BF16) == 260);
    assert_true(cast_one(257.0001, PG_F32, PG_BF16) == 258);
    assert_true(cast_one(-257, PG_F32, PG_BF16) == -256);
    /* f64 straight: just above a tie of bf16, but f32 would round it onto the tie first */
    assert_true(cast_one(257 + 1e-9, PG_F64, PG_BF16) == 258);
    assert_true(cast_one(257 - 1e-9, PG_F64, PG_BF16) == 256);
    assert_true(cast_one(2049 + 1e-9, PG_F64, PG_F16) == 2050);
    assert_true(cast_one(2049, PG_F64, PG_F16) == 2048);
    /* ends of the ranges */
    assert_true(cast_one(65519.99, PG_F64, PG_F16) == 65504);
    assert_true(cast_one(65520, PG_F32, PG_F16) == INFINITY);
    assert_true(cast_one(1e300, PG_F64, PG_F32) == INFINITY);
    assert_true(cast_one(-1e300, PG_F64, PG_BF16) == -INFINITY);
    assert_true(cast_one(3.4e38, PG_F32, PG_BF16) == INFINITY);
    /* subnormal numbers */
    assert_true(cast_one(0x1p-24, PG_F32, PG_F16) == 0x1p-24);
    assert_true(cast_one(0x1.8p-24, PG_F32, PG_F16) == 0x1p-23);
    assert_true(cast_one(0x1p-25, PG_F64, PG_F16) == 0);
    assert_true(cast_one(0x1.000001p-25, PG_F64, PG_F16) == 0x1p-24);
    assert_true(cast_one(0x1p-149, PG_F64, PG_F32) == 0x1p-149);
    assert_true(cast_one(0x1p-133, PG_F32, PG_BF16) == 0x1p-133);
    assert_true(cast_one(1e-320, PG_F64, PG_BF16) == 0);
    assert_true(cast_one(1e-320, PG_F64, PG_F64) == 1e-320);
    for (int dtype = PG_F32; dtype <= PG_F16; dtype++)
        for (int from = PG_F32; from <= PG_F64; from++) {
            assert_true(cast_one(INFINITY, from, dtype) == INFINITY);
            assert_true(cast_one(-INFINITY, from, dtype) == -INFINITY);
            assert_true(isnan(cast_one(NAN, from, dtype)));
            assert_true(signbit(cast_one(-0.0, from, dtype)));
        }
}

/* Every f16 and bf16 number survives the way through f32 and f64. */
static void halves_survive(void **state) {
    (void)state;
    enum { ALL = 65536 };
    static uint16_t half[ALL], back[ALL];
    static double wide[ALL];
    for (int dtype = PG_BF16; dtype <= PG_F16; dtype++)
        for (int by = PG_F32; by <= PG_F64; by++) {
            for (int i = 0; i < ALL; i++) half[i] = (uint16_t)i;
            ok(cpu_cast(wide, half, ALL, by, dtype, NULL));
            ok(cpu_cast(back, wide, ALL, dtype, by, NULL));
            for (int i = 0; i < ALL; i++)
                if (!isnan(number_at(wide, by, i))) assert_int_equal(half[i], back[i]);
        }
}

static void integers(void **state) {
    (void)state;
    int64_t big = ((int64_t)1 << 53) + 1, out = 0;
    pg_tensor *a = tensor(PG_I64, 2), *b = tensor(PG_I64, 2), *c = tensor(PG_I32, 2);
    ok(pg_tensor_write(a, 0, &big, 8));
    big = 10151188881778163;
    ok(pg_tensor_write(a, 1, &big, 8));
    ok(pg_copy(b, a));
    ok(pg_tensor_read(b, 0, &out, 8));
    assert_true(out == ((int64_t)1 << 53) + 1);
    ok(pg_tensor_read(b, 1, &out, 8));
    assert_true(out == 10151188881778163);
    put_at(c, 0, -7), put_at(c, 1, 7);
    ok(pg_copy(b, c));
    assert_true(at(b, 0) == -7 && at(b, 1) == 7);
    pg_tensor_free(a), pg_tensor_free(b), pg_tensor_free(c);
    /* truncation, and the nearest end where a number does not fit */
    assert_true(cast_one(2.9, PG_F64, PG_I32) == 2 && cast_one(-2.9, PG_F32, PG_I64) == -2);
    assert_true(cast_one(1e10, PG_F64, PG_I32) == INT32_MAX);
    assert_true(cast_one(-INFINITY, PG_F64, PG_I32) == INT32_MIN);
    assert_true(cast_one(1e300, PG_F64, PG_I64) == 0x1p63); /* INT64_MAX as a double */
    assert_true(cast_one(NAN, PG_F64, PG_I64) == 0 && cast_one(NAN, PG_F32, PG_U8) == 0);
    assert_true(cast_one(255.9, PG_F64, PG_U8) == 255 && cast_one(-0.5, PG_F64, PG_U8) == 0);
    assert_true(cast_one(-40000, PG_F64, PG_I16) == -32768 && cast_one(-2.9, PG_F64, PG_I16) == -2);
    assert_true(cast_one(32767.5, PG_F64, PG_I16) == 32767 && cast_one(-5, PG_I32, PG_I16) == -5);
    assert_true(cast_one(300, PG_F64, PG_U8) == 255 && cast_one(-3, PG_F64, PG_U8) == 0);
}

/* A slice of a matrix gets the numbers that the whole matrix has there. */
static void random_by_slices(void **state) {
    (void)state;
    for (int normal = 0; normal < 2; normal++) {
        pg_tensor *all = tensor(PG_F32, 301, 173), *part = tensor(PG_F32, 301, 60),
                  *wide = tensor(PG_F64, 301, 173);
        int (*draw)(pg_tensor *, uint64_t, uint64_t, double, double, int64_t, int64_t,
                    int64_t) = normal ? pg_random_normal : pg_random_uniform;
        ok(draw(all, 5, 6, -1, 3, 0, 0, 0));
        ok(draw(wide, 5, 6, -1, 3, 0, 0, 0));
        ok(draw(part, 5, 6, -1, 3, 17, 60, 173));
        for (int64_t i = 0; i < 301 * 60; i++)
            assert_true(at(part, i) == at(all, i / 60 * 173 + 17 + i % 60));
        for (int64_t i = 0; i < 301 * 173; i++) assert_true((float)at(wide, i) == at(all, i));
        uint64_t stream = pg_philox_stream(5, 6);
        for (int64_t i = 0; i < 50; i++) {
            double base = normal ? pg_philox_normal(stream, i) : pg_philox_uniform(stream, i);
            double span = normal ? 3 : 4, error = at(wide, i) - (-1 + span * base);
            assert_true(fabs(error) < 1e-13);
        }
        pg_tensor_free(all), pg_tensor_free(part), pg_tensor_free(wide);
    }
}

/* Mean, deviation and tails of a million numbers: five standard errors. */
static void random_moments(void **state) {
    (void)state;
    int64_t n = 1000000;
    pg_tensor *t = tensor(PG_F32, n);
    ok(pg_random_normal(t, 1, 2, 0.5, 2, 0, 0, 0));
    double sum = 0, square = 0, cube = 0, beyond = 0;
    for (int64_t i = 0; i < n; i++) {
        double z = (at(t, i) - 0.5) / 2;
        sum += z, square += z * z, cube += z * z * z, beyond += fabs(z) > 3;
    }
    assert_true(fabs(sum / n) < 0.005 && fabs(square / n - 1) < 0.0071);
    assert_true(fabs(cube / n) < 0.02 && fabs(beyond / n - 0.0027) < 0.00026);
    ok(pg_random_uniform(t, 1, 2, -1, 1, 0, 0, 0));
    sum = square = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += at(t, i), square += at(t, i) * at(t, i);
        assert_true(at(t, i) >= -1 && at(t, i) < 1);
    }
    assert_true(fabs(sum / n) < 0.0029 && fabs(square / n - 1.0 / 3) < 0.0015);
    pg_tensor_free(t);
}

static void refusals(void **state) {
    (void)state;
    pg_tensor *a = tensor(PG_F32, 4), *b = tensor(PG_F32, 5), *i = tensor(PG_I32, 4);
    refuses(PG_ESHAPE, "copy: y is [4] f32, x is [5] f32", pg_copy(a, b));
    refuses(PG_EINVAL, "copy: x is missing", pg_copy(a, NULL));
    refuses(PG_EINVAL, "fill: y is missing", pg_fill(NULL, 0));
    refuses(PG_ESHAPE, "normal: y is [4] i32", pg_random_normal(i, 0, 0, 0, 1, 0, 0, 0));
    refuses(PG_EINVAL, "std -1", pg_random_normal(a, 0, 0, 0, -1, 0, 0, 0));
    refuses(PG_EINVAL, "from 2 to 1", pg_random_uniform(a, 0, 0, 2, 1, 0, 0, 0));
    refuses(PG_EINVAL, "first -1", pg_random_uniform(a, 0, 0, 0, 1, -1, 0, 0));
    pg_tensor_free(a), pg_tensor_free(b), pg_tensor_free(i);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(fill_all_dtypes, nothing_alive),
                                       cmocka_unit_test_teardown(all_pairs, nothing_alive),
                                       cmocka_unit_test(rounding),
                                       cmocka_unit_test(halves_survive),
                                       cmocka_unit_test_teardown(integers, nothing_alive),
                                       cmocka_unit_test_teardown(random_by_slices, nothing_alive),
                                       cmocka_unit_test_teardown(random_moments, nothing_alive),
                                       cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
