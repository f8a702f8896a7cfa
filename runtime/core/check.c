/* check.c: the shared argument checks; see check.h for how an op uses them. */
#include "check.h"

/* names is "a, b, c" as written in the caller; the i-th of them, for "%.*s". */
static const char *name_at(const char *names, int i, int *length) {
    while (i-- > 0)
        while (*names && *names++ != ',') {}
    while (*names == ' ') names++;
    *length = 0;
    while (names[*length] && names[*length] != ',') ++*length;
    return names;
}

int pg_check_given(const char *op, const char *names, const pg_tensor *const *list, int n) {
    for (int i = 0; i < n; i++) {
        if (list[i]) continue;
        int length;
        const char *name = name_at(names, i, &length);
        return pg_fail(PG_EINVAL, "%s: %.*s is missing (nil); give a tensor", op, length, name);
    }
    return PG_OK;
}

int pg_check_open(const pg_backend **b, const char *op, const pg_tensor *const *list, int n) {
    *b = pg_backend_now();
    if (!*b) return pg_fail_within(PG_EDEVICE, "%s: ", op);
    if (!(*b)->kernels) return PG_OK;
    for (int i = 0; i < n; i++)
        if (list[i]) PG_TRY(pg_tensor_usable(list[i], op));
    return PG_OK;
}

static int differ(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                  const pg_tensor *y, const char *rule) {
    return pg_fail(PG_ESHAPE, "%s: %s is %s, %s is %s; %s", op, name_x, pg_shape_text(x), name_y,
                   pg_shape_text(y), rule);
}

int pg_check_dtype(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                   const pg_tensor *y) {
    if (x->dtype == y->dtype) return PG_OK;
    return differ(op, name_x, x, name_y, y, "their dtypes must be equal (cast one of them)");
}

int pg_check_mixed(const char *op, const char *name_y, const pg_tensor *y, const char *name_x,
                   const pg_tensor *x) {
    if (y->dtype == x->dtype || (y->dtype == PG_F32 && pg_is_half(x->dtype))) return PG_OK;
    return pg_fail(PG_ESHAPE,
                   "%s: %s is %s, %s is %s; the dtype of %s must be equal, or f32 beside bf16 or "
                   "f16 (cast one of them)",
                   op, name_y, pg_shape_text(y), name_x, pg_shape_text(x), name_y);
}

int pg_check_shape(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                   const pg_tensor *y) {
    if (pg_same_shape(x, y)) return PG_OK;
    return differ(op, name_x, x, name_y, y, "their shapes must be equal");
}

int pg_check_count(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                   const pg_tensor *y) {
    if (x->count == y->count) return PG_OK;
    return differ(op, name_x, x, name_y, y, "they must hold equally many numbers");
}

int pg_check_floating(const char *op, const char *name, const pg_tensor *x) {
    if (pg_is_floating(x->dtype)) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: %s is %s; it must be f32, f64, bf16 or f16 (cast it)", op, name,
                   pg_shape_text(x));
}

int pg_check_is(const char *op, const char *name, const pg_tensor *x, int dtype) {
    if (x->dtype == dtype) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: %s is %s; its dtype must be %s", op, name, pg_shape_text(x),
                   pg_dtype_name(dtype));
}

int pg_check_holds(const char *op, const char *name, const pg_tensor *x, int64_t count) {
    if (x->count == count) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: %s is %s; it must hold %lld numbers", op, name, pg_shape_text(x),
                   (long long)count);
}

int pg_check_apart(const char *op, const char *name_y, const pg_tensor *y, const char *name_x,
                   const pg_tensor *x, int in_place) {
    if (y->storage != x->storage || !y->count || !x->count) return PG_OK;
    int64_t size_y = pg_dtype_size(y->dtype), size_x = pg_dtype_size(x->dtype);
    int64_t y0 = y->first * size_y, y1 = y0 + y->count * size_y;
    int64_t x0 = x->first * size_x, x1 = x0 + x->count * size_x;
    if (y1 <= x0 || x1 <= y0 || (in_place && y0 == x0 && y1 == x1)) return PG_OK;
    return pg_fail(PG_EINVAL, "%s: %s %s and %s %s share memory%s; write to another tensor", op,
                   name_y, pg_shape_text(y), name_x, pg_shape_text(x), in_place ? " in part" : "");
}

int pg_check_kind(const char *op, int kind, int kinds) {
    if (kind >= 0 && kind < kinds) return PG_OK;
    return pg_fail(PG_EINVAL, "%s: kind %d is unknown; there are 0 to %d", op, kind, kinds - 1);
}

int pg_check_step(const char *op, const pg_tensor *step) {
    if (!step || (step->dtype == PG_F64 && step->count == PG_STEP_SIZE)) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: step is %s; a step block is [%d] f64", op, pg_shape_text(step),
                   PG_STEP_SIZE);
}

int64_t pg_dims_product(const pg_tensor *t, int from, int to) {
    int64_t product = 1;
    for (int i = from; i < to; i++) product *= t->dims[i];
    return product;
}

int64_t pg_last_dim(const pg_tensor *t) { return t->ndim ? t->dims[t->ndim - 1] : 1; }
