/* ops_update.c: the end of a step: norm of the gradients, clipping, looking for bad numbers, and
 * the updates of AdamW and SGD over a segment.  Helpers in check.h; formulas in pg.h. */
#include "check.h"

#include <math.h>

int pg_sumsq(pg_tensor *step, const pg_tensor *x) {
    PG_POLL();
    PG_GIVEN("sumsq", step, x);
    PG_TRY(pg_check_step("sumsq", step));
    PG_FLOATING("sumsq", x);
    PG_APART("sumsq", step, x);
    PG_OPEN(b, "sumsq", step, x);
    return b->kernels->sumsq(pg_tensor_at(step), pg_tensor_at(x), x->count, x->dtype, b->stream);
}

int pg_clip(pg_tensor *step, double max_norm) {
    PG_POLL();
    PG_GIVEN("clip", step);
    PG_TRY(pg_check_step("clip", step));
    if (!(max_norm >= 0))
        return pg_fail(PG_EINVAL, "clip: max_norm is %g; give a norm, or 0 for no clipping",
                       max_norm);
    PG_OPEN(b, "clip", step);
    return b->kernels->clip(pg_tensor_at(step), max_norm, b->stream);
}

int pg_count_nonfinite(int64_t *count, const pg_tensor *x) {
    PG_POLL();
    if (!count) return pg_fail(PG_EINVAL, "count_nonfinite: count is missing (nil)");
    PG_GIVEN("count_nonfinite", x);
    *count = 0;
    PG_OPEN(b, "count_nonfinite", x);
    int64_t found = b->kernels->count_nonfinite(pg_tensor_at(x), x->count, x->dtype, b->stream);
    if (found < 0) return (int)found;
    *count = found;
    return PG_OK;
}

/* What adamw and sgd share: a segment, its runs and the step block. */
static int check_segment(const char *op, const pg_tensor *value, const pg_tensor *grad,
                         const pg_tensor *ends, const pg_tensor *factors, const pg_tensor *step) {
    PG_GIVEN(op, value, grad, ends, factors, step);
    PG_FLOATING(op, value);
    PG_SAME_DTYPE(op, grad, value);
    PG_SAME_COUNT(op, grad, value);
    PG_APART(op, value, grad);
    PG_HAS_DTYPE(op, ends, PG_I64);
    PG_HAS_DTYPE(op, factors, PG_F32);
    PG_HAS_COUNT(op, factors, 2 * ends->count);
    return pg_check_step(op, step);
}

static int check_state(const char *op, const pg_tensor *state, const pg_tensor *value) {
    PG_SAME_DTYPE(op, state, value);
    PG_SAME_COUNT(op, state, value);
    PG_APART(op, state, value);
    return PG_OK;
}

/* Where the host can read them, the ends must rise to the count: kernels trust them. */
static int check_ends(const pg_backend *b, const char *op, const pg_tensor *value,
                      const pg_tensor *ends) {
    if (!b->memory->host_visible) return PG_OK;
    const int64_t *end = pg_tensor_at(ends);
    int64_t last = 0;
    for (int64_t r = 0; r < ends->count; last = end[r++])
        if (end[r] < last)
            return pg_fail(PG_EINVAL, "%s: run %lld ends at %lld, before %lld; ends must rise", op,
                           (long long)r, (long long)end[r], (long long)last);
    if (last == value->count) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: the runs end at %lld, value is %s; they must cover it", op,
                   (long long)last, pg_shape_text(value));
}

int pg_adamw(pg_tensor *value, const pg_tensor *grad, pg_tensor *m, pg_tensor *v,
             const pg_tensor *ends, const pg_tensor *factors, const pg_tensor *step, double beta1,
             double beta2, double eps) {
    PG_POLL();
    PG_TRY(check_segment("adamw", value, grad, ends, factors, step));
    PG_GIVEN("adamw", m, v);
    PG_TRY(check_state("adamw", m, value));
    PG_TRY(check_state("adamw", v, value));
    PG_APART("adamw", m, v);
    if (!(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1 && eps >= 0))
        return pg_fail(PG_EINVAL,
                       "adamw: betas %g and %g, eps %g; betas lie in [0,1), eps is not "
                       "below 0",
                       beta1, beta2, eps);
    PG_OPEN(b, "adamw", value, grad, m, v, ends, factors, step);
    PG_TRY(check_ends(b, "adamw", value, ends));
    return b->kernels->adamw(pg_tensor_at(value), pg_tensor_at(grad), pg_tensor_at(m),
                             pg_tensor_at(v), value->count, pg_tensor_at(ends),
                             pg_tensor_at(factors), ends->count, pg_tensor_at(step), beta1, beta2,
                             eps, value->dtype, b->stream);
}

int pg_sgd(pg_tensor *value, const pg_tensor *grad, pg_tensor *m, const pg_tensor *ends,
           const pg_tensor *factors, const pg_tensor *step, double momentum, double dampening,
           int nesterov, int first) {
    PG_POLL();
    PG_TRY(check_segment("sgd", value, grad, ends, factors, step));
    if (m) PG_TRY(check_state("sgd", m, value));
    if (!(momentum >= 0) || !isfinite(momentum) || !isfinite(dampening))
        return pg_fail(PG_EINVAL,
                       "sgd: momentum %g, dampening %g; give finite ones, momentum not "
                       "below 0",
                       momentum, dampening);
    if (momentum > 0 && !m)
        return pg_fail(PG_EINVAL, "sgd: momentum is %g without a buffer m; give one", momentum);
    if (nesterov && (momentum == 0 || dampening != 0))
        return pg_fail(PG_EINVAL,
                       "sgd: nesterov with momentum %g, dampening %g; it needs momentum "
                       "above 0 and dampening 0",
                       momentum, dampening);
    PG_OPEN(b, "sgd", value, grad, m, ends, factors, step);
    PG_TRY(check_ends(b, "sgd", value, ends));
    return b->kernels->sgd(pg_tensor_at(value), pg_tensor_at(grad), m ? pg_tensor_at(m) : NULL,
                           value->count, pg_tensor_at(ends), pg_tensor_at(factors), ends->count,
                           pg_tensor_at(step), momentum, dampening, nesterov, first, value->dtype,
                           b->stream);
}
