/* Slices, places and permutes of every dtype against index arithmetic. */
#include "tensors.h"

/* x of [outer,nx,inner]: rows [start, start + n) out of it, and back into it. */
static void slice_and_place(void **state) {
    (void)state;
    const int64_t sizes[][5] = {{1, 1, 1, 0, 1},       {3, 7, 5, 2, 4},    {64, 90, 33, 50, 40},
                                {1, 700, 129, 3, 600}, {5000, 9, 1, 8, 1}, {4, 6, 5, 6, 0},
                                {0, 3, 3, 1, 2}};
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++)
        for (int dtype = 0; dtype < PG_NDTYPES; dtype++) {
            if (dtype == PG_BF16 || dtype == PG_F16) continue; /* by size, as the others */
            int64_t outer = sizes[c][0], nx = sizes[c][1], inner = sizes[c][2];
            int64_t start = sizes[c][3], n = sizes[c][4], line = n * inner;
            pg_tensor *x = tensor(dtype, outer, nx, inner), *y = tensor(dtype, outer, n, inner);
            pg_tensor *z = tensor(dtype, outer, nx, inner);
            for (int64_t i = 0; i < pg_tensor_count(x); i++) put_at(x, i, (double)(i % 251));
            ok(pg_slice(y, x, 1, start, 0));
            for (int64_t i = 0; i < pg_tensor_count(y); i++)
                assert_true(at(y, i) == at(x, (i / line * nx + start) * inner + i % line));
            ok(pg_fill(z, 3));
            ok(pg_place(z, y, 1, start, 0));
            for (int64_t i = 0; i < pg_tensor_count(z); i++) {
                int64_t row = i / inner % nx;
                assert_true(at(z, i) == (row >= start && row < start + n ? at(x, i) : 3));
            }
            if (dtype <= PG_F64) {
                ok(pg_place(z, y, 1, start, 1));
                ok(pg_slice(y, x, 1, start, 1));
                for (int64_t i = 0; i < pg_tensor_count(y); i++) {
                    int64_t j = (i / line * nx + start) * inner + i % line;
                    assert_true(at(y, i) == 2 * at(x, j) && at(z, j) == 2 * at(x, j));
                }
            }
            pg_tensor_free(x), pg_tensor_free(y), pg_tensor_free(z);
        }
}

static void check_permute(int dtype, int ndim, const int64_t *dims, const int32_t *order) {
    int64_t dims_y[8], steps[8], step = 1;
    for (int i = ndim - 1; i >= 0; step *= dims[i--]) steps[i] = step;
    for (int i = 0; i < ndim; i++) dims_y[i] = dims[order[i]];
    pg_tensor *x = make(dtype, ndim, dims), *y = make(dtype, ndim, dims_y);
    int64_t n = pg_tensor_count(x);
    for (int64_t i = 0; i < n; i++) put_at(x, i, (double)(i % 251));
    ok(pg_permute(y, x, order, 0));
    for (int add = 0; add < 2; add++) {
        for (int64_t i = 0; i < n; i++) {
            int64_t rest = i, from = 0;
            for (int k = ndim - 1; k >= 0; rest /= dims_y[k--])
                from += rest % dims_y[k] * steps[order[k]];
            assert_true(at(y, i) == (1 + add) * at(x, from));
        }
        if (dtype > PG_F64) break;
        if (!add) ok(pg_permute(y, x, order, 1));
    }
    pg_tensor_free(x), pg_tensor_free(y);
}

static void permutes(void **state) {
    (void)state;
    const struct {
        int n;
        int64_t dims[5];
        int32_t order[5];
    } cases[] = {{0, {0}, {0}},
                 {1, {9}, {0}},
                 {2, {70, 33}, {1, 0}},
                 {2, {1, 33}, {1, 0}},
                 {2, {300, 201}, {1, 0}},
                 {3, {5, 6, 7}, {2, 1, 0}},
                 {3, {5, 6, 7}, {1, 2, 0}},
                 {3, {40, 50, 60}, {0, 2, 1}},
                 {3, {5, 0, 7}, {2, 0, 1}},
                 {4, {3, 17, 4, 65}, {0, 2, 1, 3}}, /* heads before time */
                 {4, {3, 17, 4, 65}, {0, 2, 3, 1}},
                 {4, {3, 17, 4, 65}, {0, 1, 2, 3}},
                 {5, {2, 3, 4, 5, 6}, {4, 1, 3, 0, 2}}};
    const int dtypes[] = {PG_F32, PG_F64, PG_I32, PG_I64, PG_U8};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int d = 0; d < 5; d++)
            check_permute(dtypes[d], cases[c].n, cases[c].dims, cases[c].order);
}

static void permute_halves(void **state) { /* two bytes: values as bits */
    (void)state;
    pg_tensor *x = tensor(PG_BF16, 100, 75), *y = tensor(PG_BF16, 75, 100);
    uint16_t *from = pg_tensor_data(x), *to = pg_tensor_data(y);
    for (int i = 0; i < 7500; i++) from[i] = (uint16_t)i;
    ok(pg_permute(y, x, (int32_t[]){1, 0}, 0));
    for (int i = 0; i < 7500; i++) assert_int_equal(to[i], from[i % 100 * 75 + i / 100]);
    pg_tensor_free(x), pg_tensor_free(y);
}

static void refusals(void **state) {
    (void)state;
    pg_tensor *x = tensor(PG_F32, 4, 6), *y = tensor(PG_F32, 4, 2), *i = tensor(PG_I32, 4, 6);
    pg_tensor *t = tensor(PG_F32, 6, 4), *j = tensor(PG_I32, 4, 2);
    refuses(PG_ESHAPE, "slice: [4,2] f32 is no part of [4,6] f32 from 5 along dim 1",
            pg_slice(y, x, 1, 5, 0));
    refuses(PG_ESHAPE, "from -1 along", pg_slice(y, x, 1, -1, 0));
    refuses(PG_ESHAPE, "no part of", pg_slice(y, x, 0, 0, 0));
    refuses(PG_ESHAPE, "dim 2 of [4,6] f32", pg_place(x, y, 2, 0, 0));
    refuses(PG_ESHAPE, "must be f32, f64, bf16 or f16", pg_slice(j, i, 1, 0, 1));
    refuses(PG_ESHAPE, "slice: part is [4,2] f32, whole is [4,6] i32", pg_slice(y, i, 1, 0, 0));
    refuses(PG_EINVAL, "share memory", pg_slice(x, x, 1, 0, 0));
    refuses(PG_EINVAL, "order[1] is 0; each of 0 to 1", pg_permute(t, x, (int32_t[]){0, 0}, 0));
    refuses(PG_EINVAL, "order[0] is -1", pg_permute(t, x, (int32_t[]){-1, 0}, 0));
    refuses(PG_ESHAPE, "permute: y is [6,4] f32, x is [4,6] f32",
            pg_permute(t, x, (int32_t[]){0, 1}, 0));
    refuses(PG_EINVAL, "order is missing", pg_permute(t, x, NULL, 0));
    pg_tensor_free(x), pg_tensor_free(y), pg_tensor_free(i), pg_tensor_free(t), pg_tensor_free(j);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(slice_and_place, nothing_alive),
                                       cmocka_unit_test_teardown(permutes, nothing_alive),
                                       cmocka_unit_test_teardown(permute_halves, nothing_alive),
                                       cmocka_unit_test_teardown(refusals, nothing_alive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
