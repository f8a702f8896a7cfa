/* CUDA kernels against their CPU twins, first half: fill, cast, random, elementwise, norms, reduce,
 * move.  See twins.h; updates stand in test_twins_update.c, the second half in test_twins_nn.c. */
#include "twins.h"

#define CASES 12      /* random shapes a kernel and dtype */
#define LARGE 3000005 /* elements of the large case: all blocks of any card go round */

/* Calls the CPU twin in f64 on the hosts, the CUDA one in dtype on the devices. */
#define cpu_do(name, ...)  ok(twins.cpu->name(__VA_ARGS__, PG_F64, NULL))
#define cuda_do(name, ...) ok(twins.cuda->name(__VA_ARGS__, twins.stream))

/* case 0 is large, case 1 one element; every third one starts off its 16-byte boundary */
static int64_t case_size(int i) {
    twins.shift = i % 3 == 2 ? 1 : 0;
    return i == 0 ? at_most(LARGE) : i == 1 ? 1 : draw_size(5000);
}

/* The device holds exactly these numbers; a NaN is a NaN. */
static void equal_to(const twin_array *a, const double *want, const char *what) {
    double *got = device_numbers(a, what);
    for (int64_t i = 0; i < a->n; i++)
        if (got[i] != want[i] && !(isnan(got[i]) && isnan(want[i])))
            fail_msg("%s: number %lld is %.17g, not %.17g; PG_TWINS_SEED=%llu", what, (long long)i,
                     got[i], want[i], (unsigned long long)twins.seed);
    free(got);
}

/* ---- fill and cast ---- */
static const double corners[] = {0,
                                 -0.0,
                                 1,
                                 -1,
                                 0.5,
                                 1.5,
                                 2.5,
                                 -2.5,
                                 255,
                                 255.5,
                                 256,
                                 300,
                                 -0.5,
                                 -1.5,
                                 65504,
                                 65519.9,
                                 65520,
                                 1e5,
                                 -1e5,
                                 3.4e38,
                                 3.5e38,
                                 -3.5e38,
                                 1e300,
                                 2147483647,
                                 2147483648.0,
                                 -2147483649.0,
                                 9.3e18,
                                 -9.3e18,
                                 6e-8,
                                 2.9e-8,
                                 1e-40,
                                 1e-46,
                                 1.00390625,
                                 1.01171875,
                                 1.0039062500001,
                                 1.001953125,
                                 9007199254740993.0,
                                 INFINITY,
                                 -INFINITY,
                                 NAN};
#define CORNERS ((int64_t)(sizeof corners / sizeof *corners))

static void cast_all_pairs(void **state) {
    (void)state;
    need_gpu();
    for (int from = 0; from < PG_NDTYPES; from++)
        for (int to = 0; to < PG_NDTYPES; to++)
            for (int i = 0; i < 3; i++) {
                twins.shift = i == 2;
                int64_t n = i ? CORNERS + draw_size(3000) : CORNERS;
                double *host = twin_doubles(n), *want = twin_doubles(n);
                for (int64_t k = 0; k < n; k++)
                    host[k] = k < CORNERS ? corners[k] : ldexp(draw(-1, 1), (int)draw_int(-30, 70));
                void *x_cpu = calloc((size_t)n, 8), *y_cpu = calloc((size_t)n, 8);
                ok(twins.cpu->cast(x_cpu, host, n, from, PG_F64, NULL));
                ok(twins.cpu->cast(y_cpu, x_cpu, n, to, from, NULL));
                ok(twins.cpu->cast(want, y_cpu, n, PG_F64, to, NULL));
                twin_array x = input_of(host, n, from), y = output(n, to, 0);
                cuda_do(cast, y.device, x.device, n, to, from);
                equal_to(&y, want, "cast");
                free(host), free(want), free(x_cpu), free(y_cpu);
                twins_free();
            }
}

static void fill_all(void **state) {
    (void)state;
    need_gpu();
    for (int dtype = 0; dtype < PG_NDTYPES; dtype++)
        for (int i = 0; i < 6; i++) {
            int64_t n = case_size(i);
            double value = i == 3 ? 0 : draw(-300, 300);
            twin_array y = output(n, dtype, 0);
            void *in_dtype = calloc((size_t)n, 8);
            ok(twins.cpu->fill(in_dtype, value, n, dtype, NULL));
            ok(twins.cpu->cast(y.host, in_dtype, n, PG_F64, dtype, NULL));
            cuda_do(fill, y.device, value, n, dtype);
            equal_to(&y, y.host, "fill");
            free(in_dtype);
            twins_free();
        }
}

/* ---- random ---- */
static pg_index_map draw_map(int i) {
    pg_index_map map = {draw_int(0, 1000000), 0, 0};
    if (i % 2) {
        map.cols = draw_int(1, 70);
        map.stride = map.cols + draw_int(0, 50);
    }
    return map;
}

static void random_numbers(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < CASES; i++) {
            int64_t n = i ? case_size(i) : 100003;
            int dtype = floating[f];
            uint64_t seed = draw_word(), key = draw_word();
            pg_index_map map = draw_map(i);
            twin_array u = output(n, dtype, 0), z = output(n, dtype, 0);
            void *in_dtype = calloc((size_t)n, 8);
            ok(twins.cpu->random_uniform(in_dtype, n, seed, key, 0, 1, map, dtype, NULL));
            ok(twins.cpu->cast(u.host, in_dtype, n, PG_F64, dtype, NULL));
            cuda_do(random_uniform, u.device, n, seed, key, 0, 1, map, dtype);
            equal_to(&u, u.host, "random_uniform");
            cpu_do(random_normal, z.host, n, seed, key, 0.5, 2, map);
            cuda_do(random_normal, z.device, n, seed, key, 0.5, 2, map, dtype);
            near(z, bound(dtype));
            free(in_dtype);
            twins_free();
        }
}

static void dropout(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < CASES; i++) {
            int64_t n = i ? case_size(i) : 100003;
            int dtype = floating[f], add = i & 1;
            uint64_t key = draw_word();
            double p = draw(0, 0.9), random[PG_STEP_SIZE] = {0};
            pg_index_map map = draw_map(i / 2);
            random[PG_STEP_RANDOM] = (double)draw_int(0, 1ll << 52);
            twin_array x = input(n, dtype), y = output(n, dtype, add);
            int shift = twins.shift;
            twins.shift = 0;
            twin_array step = input_of(random, PG_STEP_SIZE, PG_F64);
            twins.shift = shift;
            int with = i != 3;
            cpu_do(dropout, y.host, x.host, n, p, with ? step.host : NULL, key, map, add);
            cuda_do(dropout, y.device, x.device, n, p, with ? (double *)step.device : NULL, key,
                    map, add, dtype);
            near(y, bound(dtype));
            twins_free();
        }
}

/* ---- elementwise ---- */
static void functions_of_one(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int kind = PG_RELU; kind <= PG_ABS; kind++)
            for (int i = 0; i < 4; i++) {
                int64_t n = case_size(i);
                if (n) n += 64; /* one number near a zero of its function has no norm */
                int dtype = floating[f], add = i & 1, positive = kind == PG_LOG || kind == PG_SQRT;
                twin_array x = input_in(n, dtype, positive ? 1.5 : -4, 4), dy = input(n, dtype);
                twin_array y = output(n, dtype, 0), dx = output(n, dtype, add);
                cpu_do(unary, y.host, x.host, n, kind);
                cuda_do(unary, y.device, x.device, n, kind, dtype);
                near(y, bound(dtype));
                cpu_do(unary_grad, dx.host, dy.host, x.host, n, kind, add);
                cuda_do(unary_grad, dx.device, dy.device, x.device, n, kind, add, dtype);
                near(dx, bound_gradient(dtype));
                twins_free();
            }
}

static void functions_of_two(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int kind = PG_ADD; kind <= PG_MIN; kind++)
            for (int i = 0; i < 9; i++) {
                int64_t n = case_size(i), nb = n;
                if (i % 3 == 1) nb = 1;
                if (i % 3 == 2 || i == 3) nb = draw_size(300), n = nb * draw_int(1, 40);
                int dtype = floating[f], add = i & 1;
                twin_array a = input(n, dtype), y = output(n, dtype, add);
                twin_array b = input_in(nb, dtype, kind == PG_DIV ? 0.5 : -1, 1);
                cpu_do(binary, y.host, a.host, b.host, n, nb, kind, add);
                cuda_do(binary, y.device, a.device, b.device, n, nb, kind, add, dtype);
                near(y, bound(dtype));
                twins_free();
            }
}

static void axpby(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < CASES; i++) {
            int64_t n = case_size(i);
            int dtype = floating[f];
            double beta = i % 3 == 0 ? 0 : i % 3 == 1 ? 1 : -0.7;
            twin_array x = input(n, dtype), y = output(n, dtype, beta != 0);
            cpu_do(axpby, y.host, x.host, 0.3, beta, n, PG_F64);
            cuda_do(axpby, y.device, x.device, 0.3, beta, n, dtype, dtype);
            near(y, bound(dtype));
            twins_free();
        }
}

/* ---- norms ---- */
/* Widths: those of models, odd ones, and some beyond what threads keep in registers. */
static int64_t draw_width(int i) {
    static const int64_t widths[] = {4096, 768, 133, 1, 16384, 40001, 70000, 2056};
    return i < 8 ? at_most(widths[i]) : draw_size(3000);
}

static void norms(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 20; i++) {
            int64_t d = draw_width(i), n = at_most(d > 10000 ? draw_int(1, 9) : draw_int(1, 700));
            int dtype = floating[f], kept = real_dtype(dtype), weights = i % 4 != 3, bias = i % 3;
            twins.shift = i % 5 == 4;
            twin_array x = input_in(n * d, dtype, -1, 1.6), w = input_in(d, dtype, 0.5, 1.5);
            twin_array b = input(d, dtype), y = output(n * d, dtype, 0),
                       z = output(n * d, dtype, 0);
            twin_array rstd = output(n, kept, 0), mean = output(n, kept, 0);
            twin_array rstd_l = output(n, kept, 0);
            cpu_do(rmsnorm, y.host, NULL, rstd.host, x.host, NULL, weights ? w.host : NULL, 1e-5, n,
                   d);
            cuda_do(rmsnorm, y.device, NULL, rstd.device, x.device, NULL, weights ? w.device : NULL,
                    1e-5, n, d, dtype);
            near(y, bound(dtype));
            near(rstd, bound(kept));
            cpu_do(layernorm, z.host, NULL, mean.host, rstd_l.host, x.host, NULL,
                   weights ? w.host : NULL, bias ? b.host : NULL, 1e-5, n, d);
            cuda_do(layernorm, z.device, NULL, mean.device, rstd_l.device, x.device, NULL,
                    weights ? w.device : NULL, bias ? b.device : NULL, 1e-5, n, d, dtype);
            if (d > 1) near(z, bound(dtype)); /* x - mean is all rounding where d is 1 */
            if (d > 1) near(rstd_l, bound(kept));
            near(mean, bound(kept));
            twins_free();
        }
}

/* What a gradient of a norm reads and writes. */
typedef struct {
    int64_t n, d;
    int dtype, layer, add_x, add_w, add_b, no_dx, no_dw, no_db;
    twin_array x, w, dy, mean, rstd, dx, dw, db;
} norm_case;

static norm_case draw_norm(int i, int dtype) {
    norm_case c = {.d = draw_width(i), .dtype = dtype, .layer = i & 1};
    c.n = at_most(c.d > 10000 ? draw_int(1, 100) : draw_int(1, 1500));
    if (i == 9) c.n = 0;
    c.add_x = (i >> 1) & 1, c.add_w = (i >> 2) & 1, c.add_b = i % 3 == 0;
    c.no_dx = i == 10 || i == 11, c.no_dw = i == 12 || i == 13, c.no_db = i == 13 || i == 15;
    twins.shift = i % 5 == 4;
    int kept = real_dtype(dtype);
    c.x = input(c.n * c.d, dtype), c.dy = input(c.n * c.d, dtype), c.w = input(c.d, dtype);
    c.mean = input_in(c.n, kept, -0.1, 0.1), c.rstd = input_in(c.n, kept, 0.5, 2);
    c.dx = output(c.n * c.d, dtype, c.add_x), c.dw = output(c.d, dtype, c.add_w);
    c.db = output(c.d, dtype, c.add_b);
    return c;
}

static void run_norm_grad(norm_case *c, int i) {
    void *dx = c->no_dx ? NULL : c->dx.device, *dw = c->no_dw ? NULL : c->dw.device;
    void *db = c->no_db ? NULL : c->db.device, *w = i % 4 == 3 ? NULL : c->w.device;
    if (c->layer)
        cuda_do(layernorm_grad, dx, dw, db, c->dy.device, c->x.device, w, c->mean.device,
                c->rstd.device, NULL, c->n, c->d, c->add_x, c->add_w, c->add_b,
                scratch_of(twins.cuda->layernorm_grad_scratch(c->n, c->d)), c->dtype, c->dtype);
    else
        cuda_do(rmsnorm_grad, dx, dw, c->dy.device, c->x.device, w, c->rstd.device, NULL, c->n,
                c->d, c->add_x, c->add_w, scratch_of(twins.cuda->rmsnorm_grad_scratch(c->n, c->d)),
                c->dtype, c->dtype);
}

static void norm_gradients(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 20; i++) {
            norm_case c = draw_norm(i, floating[f]);
            void *scratch = malloc((size_t)twins.cpu->layernorm_grad_scratch(c.n, c.d) + 64);
            double *w = i % 4 == 3 ? NULL : c.w.host;
            if (c.layer)
                cpu_do(layernorm_grad, c.dx.host, c.dw.host, c.db.host, c.dy.host, c.x.host, w,
                       c.mean.host, c.rstd.host, NULL, c.n, c.d, c.add_x, c.add_w, c.add_b, scratch,
                       PG_F64);
            else
                cpu_do(rmsnorm_grad, c.dx.host, c.dw.host, c.dy.host, c.x.host, w, c.rstd.host,
                       NULL, c.n, c.d, c.add_x, c.add_w, scratch, PG_F64);
            free(scratch);
            run_norm_grad(&c, i);
            if (!c.no_dx) near(c.dx, bound_gradient(c.dtype));
            double least = 0.1 * sqrt((double)(c.n * c.d)); /* addends are up to 2 in size */
            if (!c.no_dw) near_sum(c.dw, bound_gradient(c.dtype), least);
            if (c.layer && !c.no_db) near_sum(c.db, bound_gradient(c.dtype), least);
            twins_free();
        }
}

/* ---- reductions ---- */
static void draw_dims(int i, int64_t *outer, int64_t *n, int64_t *inner) {
    static const int64_t dims[][3] = {{1, LARGE, 1}, {1, 9000, 768}, {700, 333, 1}, {1, 1, 1},
                                      {3, 5000, 17}, {50000, 7, 1},  {64, 2048, 1}, {2, 999, 4096},
                                      {1, 70000, 3}, {5, 65536, 1}};
    twins.shift = i % 3 == 2;
    *outer = i < 10 ? at_most(dims[i][0]) : draw_size(40);
    *n = i < 10 ? at_most(dims[i][1]) : draw_size(400);
    *inner = i < 10 ? at_most(dims[i][2]) : draw_size(60);
}

static void reductions(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int kind = PG_SUM; kind <= PG_RMIN; kind++)
            for (int i = 0; i < 16; i++) {
                int64_t outer, n, inner;
                draw_dims(i, &outer, &n, &inner);
                int dtype = floating[f], add = i & 1;
                twin_array x = input_in(outer * n * inner, dtype, -0.01,
                                        0.02); /* sums within f16 */
                twin_array y = output(outer * inner, dtype, add);
                cpu_do(reduce, y.host, x.host, kind, outer, n, inner, add, PG_F64);
                cuda_do(reduce, y.device, x.device, kind, outer, n, inner, add, dtype, dtype);
                near(y, bound(dtype));
                twins_free();
            }
}

static void expansions(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 1; i < 16; i++) {
            int64_t outer, n, inner;
            draw_dims(i, &outer, &n, &inner);
            int dtype = floating[f], add = i & 1;
            twin_array x = input(outer * inner, dtype), y = output(outer * n * inner, dtype, add);
            cpu_do(expand, y.host, x.host, 0.25, outer, n, inner, add);
            cuda_do(expand, y.device, x.device, 0.25, outer, n, inner, add, dtype);
            near(y, bound(dtype));
            twins_free();
        }
}

static void picks(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 1; i < 16; i++) {
            int64_t outer, n, inner;
            draw_dims(i, &outer, &n, &inner);
            int dtype = floating[f], add = i & 1;
            twin_array x = input(outer * n * inner, dtype), dy = input(outer * inner, dtype);
            double *most = twin_doubles(outer * inner);
            cpu_do(reduce, most, x.host, PG_RMAX, outer, n, inner, 0, PG_F64);
            twin_array y = input_of(most, outer * inner, dtype);
            twin_array dx = output(outer * n * inner, dtype, add);
            cpu_do(reduce_grad, dx.host, dy.host, x.host, y.host, PG_RMAX, outer, n, inner, add);
            cuda_do(reduce_grad, dx.device, dy.device, x.device, y.device, PG_RMAX, outer, n, inner,
                    add, dtype);
            near(dx, bound_gradient(dtype));
            free(most);
            twins_free();
        }
}

/* ---- rearranging ---- */
static void slices(void **state) {
    (void)state;
    need_gpu();
    for (int dtype = 0; dtype < PG_NDTYPES; dtype++)
        for (int i = 0; i < CASES; i++) {
            int add = pg_is_floating(dtype) && i % 2, whole = i % 4 == 0 ? 16 : 1;
            int64_t outer = draw_int(1, 30), inner = draw_size(70) * whole, n = draw_int(1, 20);
            int64_t y0 = draw_int(0, 5), x0 = draw_int(0, 5), ny = y0 + n + draw_int(0, 4);
            int64_t nx = x0 + n + draw_int(0, 4);
            twins.shift = i % 3 == 2;
            twin_array x = input_in(outer * nx * inner, dtype, 0, 100);
            twin_array y = input_in(outer * ny * inner, dtype, 0, 100);
            double *want = twin_doubles(y.n);
            memcpy(want, y.host, (size_t)y.n * sizeof *want);
            cpu_do(move, want, x.host, outer, ny, y0, nx, x0, n, inner, add);
            cuda_do(move, y.device, x.device, outer, ny, y0, nx, x0, n, inner, add, dtype);
            memcpy(y.host, want, (size_t)y.n * sizeof *want);
            if (add) near(y, bound(dtype));
            else equal_to(&y, want, "move");
            free(want);
            twins_free();
        }
}

static void permutes(void **state) {
    (void)state;
    need_gpu();
    for (int dtype = 0; dtype < PG_NDTYPES; dtype++)
        for (int i = 0; i < 2 * CASES; i++) {
            int add = pg_is_floating(dtype) && i % 2, ndim = i ? (int)draw_int(1, 5) : 2;
            int64_t dims[PG_MAX_DIMS], n = 1;
            int32_t order[PG_MAX_DIMS] = {1, 0};
            for (int k = 0; k < ndim; k++)
                dims[k] = at_most(i ? draw_int(1, 300 / (ndim * ndim) + 8) : 517);
            for (int k = 0; k < ndim; k++) n *= dims[k];
            for (int k = 0; i && k < ndim; k++) { /* insert k at a drawn place */
                int at = (int)draw_int(0, k);
                for (int l = k; l > at; l--) order[l] = order[l - 1];
                order[at] = k;
            }
            twins.shift = i % 3 == 2;
            twin_array x = input_in(n, dtype, 0, 100), y = output(n, dtype, add);
            cpu_do(permute, y.host, x.host, ndim, dims, order, add);
            cuda_do(permute, y.device, x.device, ndim, dims, order, add, dtype);
            if (add) near(y, bound(dtype));
            else equal_to(&y, y.host, "permute");
            twins_free();
        }
}

/* The same bits when asked twice, from the sums that blocks share out. */
static void same_bits_twice(void **state) {
    (void)state;
    need_gpu();
    for (int f = 0; f < 4; f++)
        for (int i = 0; i < 8; i++) {
            uint64_t start = twins.state;
            double *dw[2], *y[2];
            for (int run = 0; run < 2; run++) {
                twins.state = start;
                norm_case c = draw_norm(i, floating[f]);
                c.add_w = 0;
                run_norm_grad(&c, i);
                dw[run] = device_numbers(&c.dw, "dw");
                twin_array sum = output(1, c.dtype, 0);
                cuda_do(reduce, sum.device, c.x.device, PG_SUM, 1, c.n * c.d, 1, 0, c.dtype,
                        c.dtype);
                y[run] = device_numbers(&sum, "sum");
                if (run) {
                    assert_memory_equal(dw[0], dw[1], (size_t)c.d * sizeof(double));
                    assert_memory_equal(y[0], y[1], sizeof(double));
                    free(dw[0]), free(dw[1]), free(y[0]), free(y[1]);
                }
                twins_free();
            }
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {twin_test(cast_all_pairs),
                                       twin_test(fill_all),
                                       twin_test(random_numbers),
                                       twin_test(dropout),
                                       twin_test(functions_of_one),
                                       twin_test(functions_of_two),
                                       twin_test(axpby),
                                       twin_test(norms),
                                       twin_test(norm_gradients),
                                       twin_test(reductions),
                                       twin_test(expansions),
                                       twin_test(picks),
                                       twin_test(slices),
                                       twin_test(permutes),
                                       twin_test(same_bits_twice)};
    return cmocka_run_group_tests(tests, twins_open, NULL);
}
