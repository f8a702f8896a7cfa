/* ops.c: filling, copying, elementwise ops, reductions and rearranging: the checks of their
 * arguments, then one call of a kernel.  Neighbours: ops_nn.c, ops_update.c; helpers in check.h. */
#include "../base/capture.h"
#include "check.h"

#include <math.h>

int pg_fill(pg_tensor *y, double value) {
    PG_POLL();
    PG_GIVEN("fill", y);
    PG_OPEN(b, "fill", y);
    return b->kernels->fill(pg_tensor_at(y), value, y->count, y->dtype, b->stream);
}

int pg_copy(pg_tensor *y, const pg_tensor *x) {
    PG_POLL();
    PG_GIVEN("copy", y, x);
    PG_SAME_COUNT("copy", y, x);
    if (y->dtype != x->dtype) PG_APART("copy", y, x);
    PG_OPEN(b, "copy", y, x);
    if (y->dtype != x->dtype)
        return b->kernels->cast(pg_tensor_at(y), pg_tensor_peek(x), y->count, y->dtype, x->dtype,
                                b->stream);
    pg_id_range before = y->storage->ids, now = x->storage->ids; /* of all of x: wide enough */
    PG_TRY(b->memory->copy(pg_tensor_at(y), pg_tensor_peek(x), y->count * pg_dtype_size(y->dtype),
                           b->stream));
    if (pg_capture_on()) now.known = 0; /* x may hold others the next time */
    pg_ids_note(y, before, now);
    return PG_OK;
}

/* ---- random ---- */
static int check_map(const char *op, int64_t first, int64_t cols, int64_t stride) {
    if (first >= 0 && cols >= 0 && stride >= 0) return PG_OK;
    return pg_fail(PG_EINVAL, "%s: first %lld, cols %lld, stride %lld; none may be below 0", op,
                   (long long)first, (long long)cols, (long long)stride);
}

int pg_random_uniform(pg_tensor *y, uint64_t seed, uint64_t key, double low, double high,
                      int64_t first, int64_t cols, int64_t stride) {
    PG_POLL();
    PG_GIVEN("uniform", y);
    PG_FLOATING("uniform", y);
    PG_TRY(check_map("uniform", first, cols, stride));
    if (!(low <= high) || !isfinite(high - low))
        return pg_fail(PG_EINVAL, "uniform: from %g to %g; give finite bounds in order", low, high);
    PG_OPEN(b, "uniform", y);
    return b->kernels->random_uniform(pg_tensor_at(y), y->count, seed, key, low, high,
                                      (pg_index_map){first, cols, stride}, y->dtype, b->stream);
}

int pg_random_normal(pg_tensor *y, uint64_t seed, uint64_t key, double mean, double std,
                     int64_t first, int64_t cols, int64_t stride) {
    PG_POLL();
    PG_GIVEN("normal", y);
    PG_FLOATING("normal", y);
    PG_TRY(check_map("normal", first, cols, stride));
    if (!isfinite(mean) || !(std >= 0) || !isfinite(std))
        return pg_fail(PG_EINVAL, "normal: mean %g, std %g; give finite ones, std not below 0",
                       mean, std);
    PG_OPEN(b, "normal", y);
    return b->kernels->random_normal(pg_tensor_at(y), y->count, seed, key, mean, std,
                                     (pg_index_map){first, cols, stride}, y->dtype, b->stream);
}

int pg_dropout(pg_tensor *y, const pg_tensor *x, double p, const pg_tensor *step, uint64_t key,
               int64_t first, int64_t cols, int64_t stride, int add) {
    PG_POLL();
    PG_GIVEN("dropout", y, x);
    PG_FLOATING("dropout", x);
    PG_LIKE("dropout", y, x);
    PG_IN_PLACE("dropout", y, x);
    PG_TRY(pg_check_step("dropout", step));
    PG_TRY(check_map("dropout", first, cols, stride));
    if (!(p >= 0 && p <= 1)) return pg_fail(PG_EINVAL, "dropout: p is %g; give 0 to 1", p);
    PG_OPEN(b, "dropout", y, x, step);
    return b->kernels->dropout(pg_tensor_at(y), pg_tensor_at(x), y->count, p,
                               step ? pg_tensor_at(step) : NULL, key,
                               (pg_index_map){first, cols, stride}, add, y->dtype, b->stream);
}

/* ---- elementwise ---- */
static const char *const unary_names[] = {
    [PG_RELU] = "relu", [PG_SILU] = "silu",       [PG_GELU] = "gelu", [PG_GELU_TANH] = "gelu_tanh",
    [PG_TANH] = "tanh", [PG_SIGMOID] = "sigmoid", [PG_EXP] = "exp",   [PG_LOG] = "log",
    [PG_SQRT] = "sqrt", [PG_SQUARE] = "square",   [PG_NEG] = "neg",   [PG_ABS] = "abs"};
static const char *const binary_names[] = {[PG_ADD] = "add", [PG_SUB] = "sub", [PG_MUL] = "mul",
                                           [PG_DIV] = "div", [PG_MAX] = "max", [PG_MIN] = "min"};
#define COUNT(names) ((int)(sizeof(names) / sizeof *(names)))

int pg_unary(pg_tensor *y, const pg_tensor *x, int kind) {
    PG_POLL();
    PG_TRY(pg_check_kind("unary", kind, COUNT(unary_names)));
    const char *op = unary_names[kind];
    PG_GIVEN(op, y, x);
    PG_FLOATING(op, x);
    PG_LIKE(op, y, x);
    PG_IN_PLACE(op, y, x);
    PG_OPEN(b, op, y, x);
    return b->kernels->unary(pg_tensor_at(y), pg_tensor_at(x), y->count, kind, y->dtype, b->stream);
}

int pg_unary_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x, int kind, int add) {
    PG_POLL();
    PG_TRY(pg_check_kind("unary_grad", kind, COUNT(unary_names)));
    const char *op = unary_names[kind];
    PG_GIVEN(op, dx, dy, x);
    PG_FLOATING(op, x);
    PG_LIKE(op, dx, x);
    PG_LIKE(op, dy, x);
    PG_IN_PLACE(op, dx, dy);
    PG_IN_PLACE(op, dx, x);
    PG_OPEN(b, op, dx, dy, x);
    return b->kernels->unary_grad(pg_tensor_at(dx), pg_tensor_at(dy), pg_tensor_at(x), x->count,
                                  kind, add, x->dtype, b->stream);
}

/* b is one number, or its dims are the last dims of a. */
static int check_broadcast(const char *op, const pg_tensor *a, const pg_tensor *b) {
    int skip = a->ndim - b->ndim, fits = skip >= 0;
    for (int i = 0; fits && i < b->ndim; i++) fits = b->dims[i] == a->dims[skip + i];
    if (fits || b->count == 1) return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "%s: a is %s, b is %s; b must have the shape of a, its last dims, or "
                   "one number",
                   op, pg_shape_text(a), pg_shape_text(b));
}

int pg_binary(pg_tensor *y, const pg_tensor *a, const pg_tensor *b, int kind, int add) {
    PG_POLL();
    PG_TRY(pg_check_kind("binary", kind, COUNT(binary_names)));
    const char *op = binary_names[kind];
    PG_GIVEN(op, y, a, b);
    PG_FLOATING(op, a);
    PG_LIKE(op, y, a);
    PG_SAME_DTYPE(op, a, b);
    PG_TRY(check_broadcast(op, a, b));
    PG_IN_PLACE(op, y, a);
    PG_IN_PLACE(op, y, b);
    PG_OPEN(now, op, y, a, b);
    return now->kernels->binary(pg_tensor_at(y), pg_tensor_at(a), pg_tensor_at(b), y->count,
                                b->count, kind, add, y->dtype, now->stream);
}

int pg_axpby(pg_tensor *y, const pg_tensor *x, double alpha, double beta) {
    PG_POLL();
    PG_GIVEN("axpby", y, x);
    PG_FLOATING("axpby", x);
    PG_MIXED("axpby", y, x);
    PG_SAME_SHAPE("axpby", y, x);
    if (y->dtype == x->dtype) PG_IN_PLACE("axpby", y, x);
    else PG_APART("axpby", y, x);
    PG_OPEN(b, "axpby", y, x);
    return b->kernels->axpby(pg_tensor_at(y), pg_tensor_at(x), alpha, beta, y->count, y->dtype,
                             x->dtype, b->stream);
}

/* ---- reductions ---- */
typedef struct {
    int64_t outer, n, inner;
} split; /* a tensor cut at one dim */

/* dim -1, where allowed (`whole`): the tensor is one line. */
static int cut(split *s, const char *op, const pg_tensor *x, int dim, int whole) {
    if (dim == -1 && whole) {
        *s = (split){1, x->count, 1};
        return PG_OK;
    }
    if (dim < 0 || dim >= x->ndim)
        return pg_fail(PG_ESHAPE, "%s: dim %d of %s; there are dims 0 to %d", op, dim,
                       pg_shape_text(x), x->ndim - 1);
    *s = (split){pg_dims_product(x, 0, dim), x->dims[dim], pg_dims_product(x, dim + 1, x->ndim)};
    return PG_OK;
}

/* `full` holds the dim, `less` does not; mixed: `less` may be f32 beside bf16 and f16. */
static int check_reduced(split *s, const char *op, const pg_tensor *less, const pg_tensor *full,
                         int dim, int mixed) {
    PG_FLOATING(op, full);
    PG_TRY(cut(s, op, full, dim, 1));
    int wider = mixed && less->dtype == PG_F32 && pg_is_half(full->dtype);
    if ((wider || less->dtype == full->dtype) && less->count == s->outer * s->inner) return PG_OK;
    return pg_fail(
        PG_ESHAPE, "%s: %s without dim %d does not make %s; %lld numbers of the same dtype%s do",
        op, pg_shape_text(full), dim, pg_shape_text(less), (long long)(s->outer * s->inner),
        mixed && pg_is_half(full->dtype) ? " or f32" : "");
}

static const char *const reduce_names[] = {
    [PG_SUM] = "sum", [PG_MEAN] = "mean", [PG_RMAX] = "max", [PG_RMIN] = "min"};

int pg_reduce(pg_tensor *y, const pg_tensor *x, int kind, int dim, int add) {
    PG_POLL();
    PG_TRY(pg_check_kind("reduce", kind, COUNT(reduce_names)));
    const char *op = reduce_names[kind];
    split s;
    PG_GIVEN(op, y, x);
    PG_TRY(check_reduced(&s, op, y, x, dim, kind == PG_SUM || kind == PG_MEAN));
    PG_APART(op, y, x);
    if (!s.n && kind != PG_SUM && y->count)
        return pg_fail(PG_ESHAPE, "%s: dim %d of %s is empty; only a sum of nothing has a value",
                       op, dim, pg_shape_text(x));
    PG_OPEN(b, op, y, x);
    return b->kernels->reduce(pg_tensor_at(y), pg_tensor_at(x), kind, s.outer, s.n, s.inner, add,
                              y->dtype, x->dtype, b->stream);
}

int pg_expand(pg_tensor *y, const pg_tensor *x, int dim, double scale, int add) {
    PG_POLL();
    split s;
    PG_GIVEN("expand", y, x);
    PG_TRY(check_reduced(&s, "expand", x, y, dim, 0));
    PG_APART("expand", y, x);
    PG_OPEN(b, "expand", y, x);
    return b->kernels->expand(pg_tensor_at(y), pg_tensor_at(x), scale, s.outer, s.n, s.inner, add,
                              y->dtype, b->stream);
}

int pg_reduce_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x, const pg_tensor *y,
                   int kind, int dim, int add) {
    PG_POLL();
    split s;
    if (kind != PG_RMAX && kind != PG_RMIN)
        return pg_fail(PG_EINVAL,
                       "reduce_grad: kind %d; max and min have it, sum and mean use "
                       "expand",
                       kind);
    const char *op = reduce_names[kind];
    PG_GIVEN(op, dx, dy, x, y);
    PG_TRY(check_reduced(&s, op, y, x, dim, 0));
    PG_LIKE(op, dx, x);
    PG_SAME_DTYPE(op, dy, y);
    PG_SAME_COUNT(op, dy, y);
    PG_APART(op, dx, dy);
    PG_APART(op, dx, x);
    PG_APART(op, dx, y);
    PG_OPEN(b, op, dx, dy, x, y);
    return b->kernels->reduce_grad(pg_tensor_at(dx), pg_tensor_at(dy), pg_tensor_at(x),
                                   pg_tensor_at(y), kind, s.outer, s.n, s.inner, add, x->dtype,
                                   b->stream);
}

/* ---- rearranging ---- */
/* `part` is `whole` but in dim, where it covers [start, start + its size). */
static int check_part(split *s, const char *op, const pg_tensor *part, const pg_tensor *whole,
                      int dim, int64_t start, int add) {
    if (add) PG_FLOATING(op, whole);
    PG_SAME_DTYPE(op, part, whole);
    PG_TRY(cut(s, op, whole, dim, 0));
    int fits = part->ndim == whole->ndim;
    for (int i = 0; fits && i < part->ndim; i++)
        fits = i == dim ? start >= 0 && part->dims[i] <= whole->dims[i] - start
                        : part->dims[i] == whole->dims[i];
    PG_APART(op, part, whole);
    if (fits) return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "%s: %s is no part of %s from %lld along dim %d; the other dims must "
                   "be equal",
                   op, pg_shape_text(part), pg_shape_text(whole), (long long)start, dim);
}

int pg_slice(pg_tensor *y, const pg_tensor *x, int dim, int64_t start, int add) {
    PG_POLL();
    split s;
    PG_GIVEN("slice", y, x);
    PG_TRY(check_part(&s, "slice", y, x, dim, start, add));
    PG_OPEN(b, "slice", y, x);
    return b->kernels->move(pg_tensor_at(y), pg_tensor_at(x), s.outer, y->dims[dim], 0, s.n, start,
                            y->dims[dim], s.inner, add, y->dtype, b->stream);
}

int pg_place(pg_tensor *y, const pg_tensor *x, int dim, int64_t start, int add) {
    PG_POLL();
    split s;
    PG_GIVEN("place", y, x);
    PG_TRY(check_part(&s, "place", x, y, dim, start, add));
    PG_OPEN(b, "place", y, x);
    return b->kernels->move(pg_tensor_at(y), pg_tensor_at(x), s.outer, s.n, start, x->dims[dim], 0,
                            x->dims[dim], s.inner, add, y->dtype, b->stream);
}

int pg_permute(pg_tensor *y, const pg_tensor *x, const int32_t *order, int add) {
    PG_POLL();
    PG_GIVEN("permute", y, x);
    if (add) PG_FLOATING("permute", x);
    PG_SAME_DTYPE("permute", y, x);
    PG_APART("permute", y, x);
    if (x->ndim && !order) return pg_fail(PG_EINVAL, "permute: order is missing (nil)");
    unsigned seen = 0;
    int fits = y->ndim == x->ndim;
    for (int i = 0; i < x->ndim; i++) {
        if (order[i] < 0 || order[i] >= x->ndim || seen >> order[i] & 1)
            return pg_fail(PG_EINVAL, "permute: order[%d] is %d; each of 0 to %d must come once", i,
                           order[i], x->ndim - 1);
        seen |= 1u << order[i];
        fits = fits && y->dims[i] == x->dims[order[i]];
    }
    if (!fits)
        return pg_fail(PG_ESHAPE, "permute: y is %s, x is %s; dim i of y must be dim order[i] of x",
                       pg_shape_text(y), pg_shape_text(x));
    PG_OPEN(b, "permute", y, x);
    return b->kernels->permute(pg_tensor_at(y), pg_tensor_at(x), x->ndim, x->dims, order, add,
                               x->dtype, b->stream);
}
