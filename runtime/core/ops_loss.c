/* ops_loss.c: softmax and cross-entropy with their gradients: checks, then one kernel call. */
#include "ops_nn.h"

static int has_rows(const char *op, const char *name, const pg_tensor *x) {
    PG_TRY(pg_check_floating(op, name, x));
    if (x->ndim > 0 && pg_last_dim(x) > 0) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: %s is %s; its last dim must hold something", op, name,
                   pg_shape_text(x));
}

int pg_softmax(pg_tensor *y, const pg_tensor *x, int log) {
    PG_POLL();
    PG_GIVEN("softmax", y, x);
    PG_TRY(has_rows("softmax", "x", x));
    PG_LIKE("softmax", y, x);
    PG_IN_PLACE("softmax", y, x);
    PG_OPEN(b, "softmax", y, x);
    return b->kernels->softmax(pg_tensor_at(y), pg_tensor_at(x), rows_of(x), pg_last_dim(x),
                               log != 0, x->dtype, b->stream);
}

int pg_softmax_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *y, int log, int add) {
    PG_POLL();
    PG_GIVEN("softmax_grad", dx, dy, y);
    PG_TRY(has_rows("softmax_grad", "y", y));
    PG_LIKE("softmax_grad", dx, y);
    PG_LIKE("softmax_grad", dy, y);
    PG_APART("softmax_grad", dx, y);
    if (add) PG_APART("softmax_grad", dx, dy);
    else PG_IN_PLACE("softmax_grad", dx, dy);
    PG_OPEN(b, "softmax_grad", dx, dy, y);
    return b->kernels->softmax_grad(pg_tensor_at(dx), pg_tensor_at(dy), pg_tensor_at(y), rows_of(y),
                                    pg_last_dim(y), log != 0, add, y->dtype, b->stream);
}

/* logits [..,V], a target for each row. */
static int loss_shapes(const char *op, const pg_tensor *logits, const pg_tensor *targets,
                       const pg_tensor *step) {
    PG_TRY(has_rows(op, "logits", logits));
    PG_TRY(pg_ids_dtype(op, "target", targets));
    PG_TRY(pg_check_step(op, step));
    if (targets->count == rows_of(logits)) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: logits are %s, targets are %s; each row needs one target", op,
                   pg_shape_text(logits), pg_shape_text(targets));
}

int pg_cross_entropy(pg_tensor *out, pg_tensor *rows, pg_tensor *lse, const pg_tensor *logits,
                     const pg_tensor *targets, int64_t ignore, const pg_tensor *step) {
    PG_POLL();
    PG_GIVEN("cross_entropy", out, lse, logits, targets);
    PG_TRY(loss_shapes("cross_entropy", logits, targets, step));
    int64_t n = rows_of(logits), v = pg_last_dim(logits);
    PG_KEPT("cross_entropy", out, logits, 2);
    PG_KEPT("cross_entropy", lse, logits, n);
    if (rows) PG_KEPT("cross_entropy", rows, logits, n);
    PG_OPEN(b, "cross_entropy", out, rows, lse, logits, targets, step);
    PG_TRY(pg_ids_check(b, "cross_entropy", "target", targets, v, &ignore));
    void *scratch;
    PG_TRY(take_scratch(&scratch, "cross_entropy", b->kernels->cross_entropy_scratch(n)));
    return b->kernels->cross_entropy(pg_tensor_at(out), at_or_null(rows), pg_tensor_at(lse),
                                     pg_tensor_at(logits), pg_tensor_peek(targets), n, v, ignore,
                                     at_or_null(step), scratch, logits->dtype, targets->dtype,
                                     b->stream);
}

int pg_cross_entropy_grad(pg_tensor *dlogits, const pg_tensor *dloss, const pg_tensor *logits,
                          const pg_tensor *targets, const pg_tensor *lse, const pg_tensor *out,
                          int64_t ignore, const pg_tensor *step, int add) {
    PG_POLL();
    PG_GIVEN("cross_entropy_grad", dlogits, dloss, logits, targets, lse);
    PG_TRY(loss_shapes("cross_entropy_grad", logits, targets, step));
    int64_t n = rows_of(logits), v = pg_last_dim(logits);
    PG_LIKE("cross_entropy_grad", dlogits, logits);
    PG_KEPT("cross_entropy_grad", lse, logits, n);
    if (out) PG_KEPT("cross_entropy_grad", out, logits, 2);
    int per_row = dloss->count == n && (n != 1 || !out);
    if (!per_row && dloss->count != 1)
        return pg_fail(PG_ESHAPE,
                       "cross_entropy_grad: dloss is %s, logits are %s; dloss must hold one "
                       "number or one for each row",
                       pg_shape_text(dloss), pg_shape_text(logits));
    PG_HAS_DTYPE("cross_entropy_grad", dloss, kept_dtype(logits));
    if (!per_row && !step && !out)
        return pg_fail(PG_EINVAL,
                       "cross_entropy_grad: out is missing (nil); without a step block the "
                       "mean needs its count of valid rows");
    if (add) PG_APART("cross_entropy_grad", dlogits, logits);
    else PG_IN_PLACE("cross_entropy_grad", dlogits, logits);
    PG_OPEN(b, "cross_entropy_grad", dlogits, dloss, logits, targets, lse, out, step);
    PG_TRY(pg_ids_check(b, "cross_entropy_grad", "target", targets, v, &ignore));
    return b->kernels->cross_entropy_grad(
        pg_tensor_at(dlogits), pg_tensor_at(dloss), per_row, pg_tensor_at(logits),
        pg_tensor_peek(targets), pg_tensor_at(lse), at_or_null(out), n, v, 0, v, ignore,
        at_or_null(step), add, logits->dtype, targets->dtype, b->stream);
}
