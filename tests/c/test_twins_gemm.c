/* Matrix products on the GPU against the CPU's in f64: dtypes, transposes, batches, epilogues,
 * beta; choices of algorithms as text; the same bits twice.  limit: 300 */
#include "../twins.h"

#define TOLERANCE_TF32 2e-3 /* 10 bits of mantissa in the inputs */

typedef struct {
    int dtype, dtype_c, ta, tb, epilogue, with_bias, with_aux, with_scales;
    int64_t batch, m, n, k;
    double alpha, beta;
} product;

typedef struct {
    twin_array a, b, bias, scales, c, aux;
    pg_gemm_args cpu, cuda;
} pair;

static pg_gemm_args args_of(const product *p) {
    return (pg_gemm_args){.m = p->m,
                          .n = p->n,
                          .k = p->k,
                          .batch = p->batch,
                          .lda = pg_max64(p->ta ? p->m : p->k, 1),
                          .ldb = pg_max64(p->tb ? p->k : p->n, 1),
                          .ldc = pg_max64(p->n, 1),
                          .stride_a = p->m * p->k,
                          .stride_b = p->k * p->n,
                          .stride_c = p->m * p->n,
                          .dtype = p->dtype,
                          .dtype_c = p->dtype_c,
                          .transpose_a = p->ta,
                          .transpose_b = p->tb,
                          .epilogue = p->epilogue,
                          .alpha = p->alpha,
                          .beta = p->beta};
}

static pair make(const product *p) {
    int64_t S = p->batch;
    pair t = {.a = input(S * p->m * p->k, p->dtype),
              .b = input(S * p->k * p->n, p->dtype),
              .bias = input(p->n, p->dtype),
              .c = output(S * p->m * p->n, p->dtype_c, p->beta != 0),
              .aux = output(S * p->m * p->n, p->dtype_c, 0),
              .cpu = args_of(p),
              .cuda = args_of(p)};
    t.scales = aligned_of((double[]){0.5, 3}, 2, PG_F32);
    if (p->with_bias) t.cpu.bias = t.bias.host, t.cuda.bias = t.bias.device;
    if (p->with_aux) t.cpu.aux = t.aux.host, t.cuda.aux = t.aux.device;
    t.cpu.dtype = t.cpu.dtype_c = PG_F64;
    return t;
}

static void run_cuda(pair *t, const product *p) {
    if (p->with_scales) {
        t->cuda.scale_a = t->scales.device;
        t->cuda.scale_b = (float *)t->scales.device + 1;
    }
    ok(twins.cuda->gemm(t->c.device, t->a.device, t->b.device, &t->cuda, twins.stream));
}

static void run_cpu(pair *t, const product *p) {
    static const float half = 0.5f, three = 3;
    if (p->with_scales) t->cpu.scale_a = &half, t->cpu.scale_b = &three;
    ok(twins.cpu->gemm(t->c.host, t->a.host, t->b.host, &t->cpu, NULL));
}

static void check(const product *p) {
    pair t = make(p);
    run_cuda(&t, p);
    run_cpu(&t, p);
    near(t.c, bound(p->dtype_c));
    if (p->with_aux) near(t.aux, bound(p->dtype_c));
    twins_free();
}

static product drawn(int dtype, int64_t most) {
    int half = dtype == PG_BF16 || dtype == PG_F16;
    return (product){.dtype = dtype,
                     .dtype_c = half && draw_int(0, 2) == 0 ? PG_F32 : dtype,
                     .ta = (int)draw_int(0, 1),
                     .tb = (int)draw_int(0, 1),
                     .epilogue = (int)draw_int(0, 2),
                     .with_bias = (int)draw_int(0, 1),
                     .with_aux = (int)draw_int(0, 1),
                     .with_scales = draw_int(0, 4) == 0,
                     .batch = draw_int(0, 1) ? 1 : draw_int(2, 5),
                     .m = draw_size(most),
                     .n = draw_size(most),
                     .k = draw_size(most),
                     .alpha = draw(0.5, 2),
                     .beta = draw_int(0, 1) ? 0 : draw(-1, 1)};
}

static void random_products(void **state) {
    (void)state;
    need_gpu();
    for (int d = 0; d < 4; d++) {
        for (int i = 0; i < 60; i++) {
            product p = drawn(floating[d], 300);
            twins.shift = draw_int(0, 3) == 0; /* addresses off their 16-byte borders */
            check(&p);
        }
    }
}

/* All that the library may do by itself, at sizes that its fast kernels take. */
static void every_epilogue(void **state) {
    (void)state;
    need_gpu();
    for (int kind = 0; kind < 96; kind++) {
        product p = {.dtype = kind % 2 ? PG_BF16 : PG_F16,
                     .epilogue = kind / 2 % 3,
                     .with_bias = kind / 6 % 2,
                     .with_aux = kind / 12 % 2,
                     .beta = kind / 24 % 2 ? 0.5 : 0,
                     .tb = kind / 48,
                     .batch = 1 + kind % 5 / 4,
                     .m = 256,
                     .n = 384,
                     .k = 128,
                     .alpha = 1};
        p.dtype_c = p.dtype;
        check(&p);
        p.dtype = p.dtype_c = PG_F32;
        check(&p);
    }
}

/* Times the slope of an activation: by the library, or by a pass of our own behind it. */
static void gradients_through_an_activation(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < 64; i++) {
        product p = drawn(floating[i % 4], 300);
        p.dtype_c = p.dtype, p.beta = 0, p.with_bias = 0, p.with_aux = 1;
        p.epilogue = i % 8 < 6 ? PG_EPILOGUE_GELU_TANH_GRAD : PG_EPILOGUE_GELU_GRAD;
        if (i % 4 >= 2) p.n = p.n / 8 * 8 + 8;
        if (i >= 48) p.m = 512, p.n = 640, p.k = 256, p.batch = 1;
        twins.shift = draw_int(0, 5) == 0;
        pair t = make(&p);
        t.aux = input_in(p.batch * p.m * p.n, p.dtype, -4, 4);
        t.cpu.aux = t.aux.host, t.cuda.aux = t.aux.device;
        run_cuda(&t, &p);
        run_cpu(&t, &p);
        near(t.c, bound_gradient(p.dtype));
        same(t.aux);
        twins_free();
    }
}

/* The three products of a linear layer, with a weight gradient that adds into f32. */
static void a_layer_and_its_gradients(void **state) {
    (void)state;
    need_gpu();
    for (int beta = 0; beta < 2; beta++) {
        product forward = {.dtype = PG_BF16,
                           .dtype_c = PG_BF16,
                           .tb = 1,
                           .batch = 1,
                           .m = 320,
                           .n = 192,
                           .k = 256,
                           .alpha = 1,
                           .beta = beta};
        product input_grad = {.dtype = PG_BF16,
                              .dtype_c = PG_BF16,
                              .batch = 1,
                              .m = 320,
                              .n = 256,
                              .k = 192,
                              .alpha = 1,
                              .beta = beta};
        product weight_grad = {.dtype = PG_BF16,
                               .dtype_c = PG_F32,
                               .ta = 1,
                               .batch = 1,
                               .m = 192,
                               .n = 256,
                               .k = 320,
                               .alpha = 1,
                               .beta = beta};
        check(&forward);
        check(&input_grad);
        check(&weight_grad);
    }
}

static void empty_sums_and_empty_results(void **state) {
    (void)state;
    need_gpu();
    for (int d = 0; d < 4; d++) {
        for (int i = 0; i < 24; i++) {
            product p = drawn(floating[d], 40);
            if (i % 4 == 0) p.m = 0;
            else if (i % 4 == 1) p.n = 0;
            else p.k = 0;
            check(&p);
        }
    }
}

/* ---- choosing by time: from 4e9 operations on ----
 * On stand-ins for the libraries (tests/cuda/fake.h) from 4e6 on: an eighth of each size. */
static int64_t part(int64_t size) { return getenv("PG_TWINS_STANDIN") ? size / 8 : size; }
static const product whole = {.dtype = PG_BF16,
                              .dtype_c = PG_F32,
                              .ta = 1,
                              .batch = 1,
                              .m = 1024,
                              .n = 2048,
                              .k = 1032,
                              .alpha = 1,
                              .beta = 1};

static product large(void) {
    product p = whole;
    p.m = part(p.m), p.n = part(p.n), p.k = part(p.k);
    return p;
}

static void timing_spoils_nothing(void **state) {
    (void)state;
    need_gpu();
    product p = large();
    check(&p); /* beta 1: had the trials run on c, it would hold their sums */
    p.beta = 0, p.dtype_c = PG_BF16, p.epilogue = PG_EPILOGUE_GELU_TANH, p.with_aux = 1;
    check(&p);
}

static int lines_of(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static void choices_travel_as_text(void **state) {
    (void)state;
    need_gpu();
    product p = large();
    check(&p);
    char *text = strdup(twins.cuda->gemm_choices());
    assert_true(getenv("PG_GEMM_TUNE") || lines_of(text) >= 2);
    ok(twins.cuda->gemm_adopt(text));
    check(&p); /* the plan is made anew, from the text */
    assert_string_equal(text, twins.cuda->gemm_choices());
    refuses(PG_EINVAL, "no title", twins.cuda->gemm_adopt("nonsense"));
    char *bad = malloc(strlen(text) + 32);
    assert_non_null(bad);
    sprintf(bad, "%s1\tcard\tnumbers\n", text);
    refuses(PG_EINVAL, "is of another form", twins.cuda->gemm_adopt(bad));
    free(bad);
    free(text);
}

static void choices_are_kept_in_a_file(void **state) {
    (void)state;
    need_gpu();
    if (getenv("PG_GEMM_TUNE")) skip();
    char path[] = "/tmp/pg-choices-XXXXXX", line[64] = "";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    unlink(path);
    ok(pg_gemm_cache(path));
    product p = large();
    p.m += 8;
    check(&p);
    ok(pg_gemm_cache(NULL));
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    fclose(f);
    unlink(path);
    assert_string_equal(line, "pgrun gemm choices 1\n");
}

static void the_same_bits_twice(void **state) {
    (void)state;
    need_gpu();
    static const int64_t sizes[][3] = {{64, 64, 8192}, {1024, 1024, 2056}, {129, 77, 1000}};
    for (int d = 0; d < 4; d++) {
        for (int i = 0; i < 3; i++) {
            product p = {.dtype = floating[d],
                         .dtype_c = floating[d],
                         .tb = 1,
                         .batch = 1,
                         .m = part(sizes[i][0]),
                         .n = part(sizes[i][1]),
                         .k = part(sizes[i][2]),
                         .alpha = 1};
            pair t = make(&p);
            run_cuda(&t, &p);
            double *first = device_numbers(&t.c, "c");
            for (int again = 0; again < 3; again++) {
                run_cuda(&t, &p);
                double *second = device_numbers(&t.c, "c");
                assert_memory_equal(first, second, (size_t)t.c.n * sizeof *first);
                free(second);
            }
            free(first);
            twins_free();
        }
    }
}

static void tf32_only_where_allowed(void **state) {
    (void)state;
    need_gpu();
    product p = {
        .dtype = PG_F32, .dtype_c = PG_F32, .batch = 1, .m = 256, .n = 256, .k = 256, .alpha = 1};
    check(&p);
    pair t = make(&p);
    assert_int_equal(pg_allow_tf32(1), 0);
    run_cuda(&t, &p);
    assert_int_equal(pg_allow_tf32(0), 1);
    run_cpu(&t, &p);
    near(t.c, TOLERANCE_TF32);
    double *got = device_numbers(&t.c, "c"), error = error_norm(got, t.c.host, t.c.n);
    free(got);
    assert_true(error > TOLERANCE_F32); /* else the switch does nothing */
}

static void more_products_than_the_library_counts(void **state) {
    (void)state;
    need_gpu();
    product p = {.dtype = PG_F32, .dtype_c = PG_F32, .m = 1, .n = 1, .k = 1, .alpha = 1};
    p.batch = (int64_t)INT32_MAX + 1;
    pg_gemm_args g = args_of(&p);
    twin_array x = input(1, PG_F32); /* never looked at */
    refuses(PG_EINVAL, "2147483648 products",
            twins.cuda->gemm(x.device, x.device, x.device, &g, twins.stream));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        twin_test(random_products),
        twin_test(every_epilogue),
        twin_test(gradients_through_an_activation),
        twin_test(a_layer_and_its_gradients),
        twin_test(empty_sums_and_empty_results),
        twin_test(timing_spoils_nothing),
        twin_test(choices_travel_as_text),
        twin_test(choices_are_kept_in_a_file),
        twin_test(the_same_bits_twice),
        twin_test(tf32_only_where_allowed),
        twin_test(more_products_than_the_library_counts),
    };
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
