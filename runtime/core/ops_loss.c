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

/* What the gradients ask of their arguments.  per_row: whether dloss is of the rows. */
static int grad_shapes(const char *op, const pg_tensor *dlogits, const pg_tensor *dloss,
                       const pg_tensor *logits, const pg_tensor *targets, const pg_tensor *lse,
                       const pg_tensor *out, const pg_tensor *step, int add, int *per_row) {
    PG_TRY(loss_shapes(op, logits, targets, step));
    int64_t n = rows_of(logits);
    PG_LIKE(op, dlogits, logits);
    PG_KEPT(op, lse, logits, n);
    if (out) PG_KEPT(op, out, logits, 2);
    *per_row = dloss->count == n && (n != 1 || !out);
    if (!*per_row && dloss->count != 1)
        return pg_fail(PG_ESHAPE,
                       "%s: dloss is %s, logits are %s; dloss must hold one number or one for "
                       "each row",
                       op, pg_shape_text(dloss), pg_shape_text(logits));
    PG_HAS_DTYPE(op, dloss, kept_dtype(logits));
    if (!*per_row && !step && !out)
        return pg_fail(PG_EINVAL,
                       "%s: out is missing (nil); without a step block the mean needs its count "
                       "of valid rows",
                       op);
    if (add) PG_APART(op, dlogits, logits);
    else PG_IN_PLACE(op, dlogits, logits);
    return PG_OK;
}

int pg_cross_entropy_grad(pg_tensor *dlogits, const pg_tensor *dloss, const pg_tensor *logits,
                          const pg_tensor *targets, const pg_tensor *lse, const pg_tensor *out,
                          int64_t ignore, const pg_tensor *step, int add) {
    PG_POLL();
    PG_GIVEN("cross_entropy_grad", dlogits, dloss, logits, targets, lse);
    int per_row = 0;
    PG_TRY(grad_shapes("cross_entropy_grad", dlogits, dloss, logits, targets, lse, out, step, add,
                       &per_row));
    PG_OPEN(b, "cross_entropy_grad", dlogits, dloss, logits, targets, lse, out, step);
    int64_t n = rows_of(logits), v = pg_last_dim(logits);
    PG_TRY(pg_ids_check(b, "cross_entropy_grad", "target", targets, v, &ignore));
    return b->kernels->cross_entropy_grad(
        pg_tensor_at(dlogits), pg_tensor_at(dloss), per_row, pg_tensor_at(logits),
        pg_tensor_peek(targets), pg_tensor_at(lse), at_or_null(out), n, v, 0, v, ignore,
        at_or_null(step), add, logits->dtype, targets->dtype, b->stream);
}

/* ---- a part of the vocabulary ---- */
/* The first `valid` columns of logits are the ids from `first` on. */
static int part_of_vocabulary(const char *op, const pg_tensor *logits, int64_t first,
                              int64_t valid) {
    if (first < 0)
        return pg_fail(PG_EINVAL, "%s: first is %lld; the part's first id must be 0 or above", op,
                       (long long)first);
    if (valid < 0 || valid > pg_last_dim(logits))
        return pg_fail(PG_EINVAL, "%s: valid is %lld, logits are %s; it must lie in [0,%lld]", op,
                       (long long)valid, pg_shape_text(logits), (long long)pg_last_dim(logits));
    return PG_OK;
}

int pg_vocab_stats(pg_tensor *stats, const pg_tensor *logits, const pg_tensor *targets,
                   int64_t first, int64_t valid, int64_t vocab, int64_t ignore) {
    PG_POLL();
    PG_GIVEN("vocab_stats", stats, logits, targets);
    PG_TRY(loss_shapes("vocab_stats", logits, targets, NULL));
    int64_t n = rows_of(logits), v = pg_last_dim(logits);
    PG_KEPT("vocab_stats", stats, logits, 2 * n);
    PG_TRY(part_of_vocabulary("vocab_stats", logits, first, valid));
    if (vocab < valid || first > vocab - valid)
        return pg_fail(PG_EINVAL,
                       "vocab_stats: the ids from %lld on, %lld of them, reach past the "
                       "vocabulary [0,%lld)",
                       (long long)first, (long long)valid, (long long)vocab);
    PG_APART("vocab_stats", stats, logits);
    PG_OPEN(b, "vocab_stats", stats, logits, targets);
    PG_TRY(pg_ids_check(b, "vocab_stats", "target", targets, vocab, &ignore));
    return b->kernels->vocab_stats(pg_tensor_at(stats), pg_tensor_at(logits),
                                   pg_tensor_peek(targets), n, v, first, valid, ignore,
                                   logits->dtype, targets->dtype, b->stream);
}

/* parts [R,2,N] and what comes of them. */
static int parts_shapes(const pg_tensor *out, const pg_tensor *rows, const pg_tensor *lse,
                        const pg_tensor *parts, const pg_tensor *targets, const pg_tensor *step) {
    PG_TRY(pg_ids_dtype("vocab_loss", "target", targets));
    PG_TRY(pg_check_step("vocab_loss", step));
    int64_t n = targets->count;
    if (parts->dtype != PG_F32 && parts->dtype != PG_F64)
        return pg_fail(PG_ESHAPE, "vocab_loss: parts are %s; they must be f32 or f64",
                       pg_shape_text(parts));
    if (parts->ndim != 3 || parts->dims[0] < 1 || parts->dims[1] != 2 || parts->dims[2] != n)
        return pg_fail(PG_ESHAPE,
                       "vocab_loss: parts are %s, targets are %s; parts must be [R,2,N] with a "
                       "target for each of the N rows",
                       pg_shape_text(parts), pg_shape_text(targets));
    PG_KEPT("vocab_loss", out, parts, 2);
    PG_KEPT("vocab_loss", lse, parts, n);
    if (rows) PG_KEPT("vocab_loss", rows, parts, n);
    return PG_OK;
}

int pg_vocab_loss(pg_tensor *out, pg_tensor *rows, pg_tensor *lse, const pg_tensor *parts,
                  const pg_tensor *targets, int64_t ignore, const pg_tensor *step) {
    PG_POLL();
    PG_GIVEN("vocab_loss", out, lse, parts, targets);
    PG_TRY(parts_shapes(out, rows, lse, parts, targets, step));
    PG_APART("vocab_loss", lse, parts);
    if (rows) PG_APART("vocab_loss", rows, parts);
    PG_OPEN(b, "vocab_loss", out, rows, lse, parts, targets, step);
    int64_t r = parts->dims[0], n = targets->count;
    void *scratch;
    PG_TRY(take_scratch(&scratch, "vocab_loss", b->kernels->cross_entropy_scratch(n)));
    return b->kernels->vocab_loss(pg_tensor_at(out), at_or_null(rows), pg_tensor_at(lse),
                                  pg_tensor_at(parts), pg_tensor_peek(targets), r, n, ignore,
                                  at_or_null(step), scratch, parts->dtype, targets->dtype,
                                  b->stream);
}

/* Targets need no look: one outside this part only misses its column. */
int pg_vocab_grad(pg_tensor *dlogits, const pg_tensor *dloss, const pg_tensor *logits,
                  const pg_tensor *targets, const pg_tensor *lse, const pg_tensor *out,
                  int64_t first, int64_t valid, int64_t ignore, const pg_tensor *step, int add) {
    PG_POLL();
    PG_GIVEN("vocab_grad", dlogits, dloss, logits, targets, lse);
    int per_row = 0;
    PG_TRY(
        grad_shapes("vocab_grad", dlogits, dloss, logits, targets, lse, out, step, add, &per_row));
    PG_TRY(part_of_vocabulary("vocab_grad", logits, first, valid));
    PG_OPEN(b, "vocab_grad", dlogits, dloss, logits, targets, lse, out, step);
    return b->kernels->cross_entropy_grad(
        pg_tensor_at(dlogits), pg_tensor_at(dloss), per_row, pg_tensor_at(logits),
        pg_tensor_peek(targets), pg_tensor_at(lse), at_or_null(out), rows_of(logits),
        pg_last_dim(logits), first, valid, ignore, at_or_null(step), add, logits->dtype,
        targets->dtype, b->stream);
}
