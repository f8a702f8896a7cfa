/* Matrix products: value against a loop in double, for all readings, transposes and epilogues. */
#include "numbers.h"

typedef struct {
    int64_t batch, m, n, k;
    int ta, tb, fold, sum, epilogue, with_bias, with_aux; /* fold: b is one matrix; sum: out is */
    double alpha, beta;
} product;

static double slope_at(double v, int epilogue) {
    if (epilogue == PG_EPILOGUE_GELU_GRAD)
        return 0.5 * (1 + erf(v / sqrt(2))) + v * exp(-v * v / 2) / sqrt(2 * M_PI);
    double t = tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v));
    return 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * v * v);
}

static double activate(double v, int epilogue) {
    if (epilogue == PG_EPILOGUE_GELU) return 0.5 * v * (1 + erf(v / sqrt(2)));
    if (epilogue == PG_EPILOGUE_GELU_TANH)
        return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    return v;
}

/* The product before alpha, bias and the rest. */
static double entry(const product *p, const double *a, const double *b, int64_t s, int64_t i,
                    int64_t j) {
    double sum = 0;
    for (int64_t l = 0; l < p->k; l++) {
        double x = a[s * p->m * p->k + (p->ta ? l * p->m + i : i * p->k + l)];
        double y = b[(p->fold ? 0 : s) * p->n * p->k + (p->tb ? j * p->k + l : l * p->n + j)];
        sum += x * y;
    }
    return sum;
}

static void check_product(const product *p, int dtype) {
    int64_t S = p->batch, M = p->m, N = p->n, K = p->k;
    pg_tensor *a = noisy(dtype, SHAPE(S, p->ta ? K : M, p->ta ? M : K));
    pg_tensor *b = p->fold ? noisy(dtype, SHAPE(p->tb ? N : K, p->tb ? K : N))
                           : noisy(dtype, SHAPE(S, p->tb ? N : K, p->tb ? K : N));
    int out_dims = p->sum ? 2 : 3;
    int64_t flat[] = {M, N}, deep[] = {S, M, N}, *dims = p->sum ? flat : deep;
    pg_tensor *out = p->beta != 0 ? noisy(dtype, out_dims, dims) : poisoned(dtype, out_dims, dims);
    pg_tensor *bias = noisy(dtype, SHAPE(N)), *aux = poisoned(dtype, out_dims, dims);
    pg_tensor *scale = born(PG_F32, SHAPE(1));
    set(scale, 0, 0.5);
    int64_t count = pg_tensor_count(out);
    double *want = doubles(count), *before = doubles(count), *x = numbers(a), *y = numbers(b);
    double *old = numbers(out), *shift = numbers(bias);
    for (int64_t s = 0; s < S; s++)
        for (int64_t i = 0; i < M; i++)
            for (int64_t j = 0; j < N; j++)
                before[((p->sum ? 0 : s) * M + i) * N + j] += 0.5 * p->alpha *
                                                              entry(p, x, y, s, i, j);
    for (int64_t i = 0; i < count; i++) {
        if (p->with_bias) before[i] += shift[i % N];
        want[i] = activate(before[i], p->epilogue) + (p->beta != 0 ? p->beta * old[i] : 0);
    }
    pg_gemm o = {.transpose_a = p->ta,
                 .transpose_b = p->tb,
                 .alpha = p->alpha,
                 .beta = p->beta,
                 .bias = p->with_bias ? bias : NULL,
                 .epilogue = p->epilogue,
                 .aux = p->with_aux ? aux : NULL,
                 .scale_a = scale};
    ok(pg_matmul(out, a, b, &o));
    near_to(out, want, tolerance(dtype));
    if (p->with_aux) near_to(aux, before, tolerance(dtype));
    numbers_end(NULL);
}

static void all_kinds_agree_with_a_loop(void **state) {
    (void)state;
    for (int kind = 0; kind < 96; kind++) {
        int epilogue = kind % 3, reading = kind / 3 % 4; /* batch, fold, sum, one */
        product p = {.batch = reading == 3 ? 1 : 3,
                     .m = 7 + kind % 5,
                     .n = 5 + kind % 11,
                     .k = 9,
                     .ta = reading == 2   ? 1
                           : reading == 1 ? 0
                                          : kind / 12 % 2,
                     .tb = reading == 2 ? 0 : kind / 24 % 2,
                     .fold = reading == 1,
                     .sum = reading == 2,
                     .epilogue = epilogue,
                     .with_bias = kind / 48,
                     .with_aux = kind / 2 % 2,
                     .alpha = 1.5,
                     .beta = kind % 5 < 2 ? 0.75 : 0};
        check_product(&p, kind % 2 ? PG_F64 : PG_F32);
    }
}

static void check_slope(int dtype, int epilogue, int64_t m, int64_t n, int64_t k) {
    pg_tensor *a = noisy(dtype, SHAPE(2, m, k)), *b = noisy(dtype, SHAPE(k, n));
    pg_tensor *out = poisoned(dtype, SHAPE(2, m, n)), *aux = noisy(dtype, SHAPE(2, m, n));
    product p = {.batch = 2, .m = m, .n = n, .k = k, .fold = 1};
    double *x = numbers(a), *y = numbers(b), *at = numbers(aux), *want = doubles(2 * m * n);
    for (int64_t i = 0; i < 2 * m * n; i++)
        want[i] = 1.5 * entry(&p, x, y, i / (m * n), i / n % m, i % n) * slope_at(at[i], epilogue);
    pg_gemm o = {.alpha = 1.5, .epilogue = epilogue, .aux = aux};
    ok(pg_matmul(out, a, b, &o));
    near_to(out, want, tolerance(dtype));
    near_to(aux, at, 0);
    numbers_end(NULL);
}

static void gradients_through_an_activation(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        int dtype = i % 2 ? PG_F64 : PG_F32;
        int epilogue = i < 4 ? PG_EPILOGUE_GELU_GRAD : PG_EPILOGUE_GELU_TANH_GRAD;
        check_slope(dtype, epilogue, 5 + i, 19 - i, i % 3 ? 9 : 0);
        check_slope(dtype, epilogue, 70, 33, 8);
    }
    pg_tensor *a = noisy(PG_F32, SHAPE(4, 4)), *b = noisy(PG_F32, SHAPE(4, 4));
    pg_tensor *out = noisy(PG_F32, SHAPE(4, 4)), *aux = noisy(PG_F32, SHAPE(4, 4));
    const char *rule = "needs aux, no bias and beta 0";
    pg_gemm o = {.alpha = 1, .epilogue = PG_EPILOGUE_GELU_GRAD};
    refuses(PG_EINVAL, rule, pg_matmul(out, a, b, &o));
    o.aux = aux, o.beta = 1;
    refuses(PG_EINVAL, rule, pg_matmul(out, a, b, &o));
}

static void large_and_odd_sizes(void **state) {
    (void)state;
    product p[] = {{.batch = 1,
                    .m = 129,
                    .n = 257,
                    .k = 65,
                    .alpha = 1,
                    .with_bias = 1,
                    .epilogue = PG_EPILOGUE_GELU,
                    .with_aux = 1},
                   {.batch = 1,
                    .m = 130,
                    .n = 70,
                    .k = 33,
                    .alpha = 1,
                    .beta = 1,
                    .tb = 1,
                    .epilogue = PG_EPILOGUE_GELU_TANH,
                    .with_bias = 1},
                   {.batch = 9, .m = 33, .n = 31, .k = 17, .alpha = 1, .beta = 1},
                   {.batch = 2, .m = 80, .n = 90, .k = 100, .alpha = -2}};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++) check_product(&p[i], PG_F32);
}

static void an_empty_sum_is_bias_and_old_values(void **state) {
    (void)state;
    for (int beta = 0; beta < 2; beta++) {
        product p = {.batch = 2, .m = 3, .n = 4, .k = 0, .alpha = 1, .beta = beta, .with_bias = 1};
        check_product(&p, PG_F32);
        product none = {.batch = 1, .m = 0, .n = 4, .k = 5, .alpha = 1};
        check_product(&none, PG_F64);
    }
}

static void bad_shapes_are_told(void **state) {
    (void)state;
    pg_tensor *a = noisy(PG_F32, SHAPE(32, 128)), *b = noisy(PG_F32, SHAPE(96, 256));
    pg_tensor *out = noisy(PG_F32, SHAPE(32, 256)), *d = noisy(PG_F64, SHAPE(128, 256));
    pg_tensor *good = noisy(PG_F32, SHAPE(128, 256)), *v = noisy(PG_F32, SHAPE(128));
    pg_tensor *deep = noisy(PG_F32, SHAPE(2, 128, 256)), *deep_a = noisy(PG_F32, SHAPE(3, 32, 128));
    pg_tensor *square = noisy(PG_F32, SHAPE(8, 8)), *wide = noisy(PG_F32, SHAPE(32, 255));
    refuses(PG_ESHAPE,
            "matmul: a is [32,128] f32, b is [96,256] f32; inner sizes 128 and 96 differ",
            pg_matmul(out, a, b, NULL));
    refuses(PG_ESHAPE, "dtypes must be equal", pg_matmul(out, a, d, NULL));
    refuses(PG_ESHAPE, "two dims or more", pg_matmul(out, a, v, NULL));
    refuses(PG_ESHAPE, "out must end in [32,256]", pg_matmul(wide, a, good, NULL));
    refuses(PG_ESHAPE, "leading dims must be equal", pg_matmul(out, deep_a, deep, NULL));
    refuses(PG_EINVAL, "share memory", pg_matmul(square, square, square, NULL));
    refuses(PG_EINVAL, "b is missing", pg_matmul(out, a, NULL, NULL));
    pg_gemm o = {.alpha = 1, .bias = v};
    refuses(PG_ESHAPE, "must hold 256 numbers", pg_matmul(out, a, good, &o));
    o = (pg_gemm){.alpha = 1, .epilogue = 9};
    refuses(PG_EINVAL, "kind 9 is unknown", pg_matmul(out, a, good, &o));
    o = (pg_gemm){.alpha = 1, .aux = wide};
    refuses(PG_ESHAPE, "shapes must be equal", pg_matmul(out, a, good, &o));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(all_kinds_agree_with_a_loop, numbers_end),
        cmocka_unit_test_teardown(gradients_through_an_activation, numbers_end),
        cmocka_unit_test_teardown(large_and_odd_sizes, numbers_end),
        cmocka_unit_test_teardown(an_empty_sum_is_bias_and_old_values, numbers_end),
        cmocka_unit_test_teardown(bad_shapes_are_told, numbers_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
