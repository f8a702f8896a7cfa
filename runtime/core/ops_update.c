/* ops_update.c: the end of a step: norm of the gradients, clipping, looking for bad numbers, and
 * the updates of AdamW and SGD over a segment.  Helpers in check.h; formulas in pg.h. */
#include "../base/capture.h"
#include "check.h"

#include <math.h>

/* Where the host can read them, the ends must rise to the count of x: kernels trust them. */
static int check_ends(const pg_backend *b, const char *op, const char *name, const pg_tensor *x,
                      const pg_tensor *ends) {
    if (!b->memory->host_visible) return PG_OK;
    const int64_t *end = pg_tensor_at(ends);
    int64_t last = 0;
    for (int64_t r = 0; r < ends->count; last = end[r++])
        if (end[r] < last)
            return pg_fail(PG_EINVAL, "%s: run %lld ends at %lld, before %lld; ends must rise", op,
                           (long long)r, (long long)end[r], (long long)last);
    if (last == x->count) return PG_OK;
    return pg_fail(PG_ESHAPE, "%s: the runs end at %lld, %s is %s; they must cover it", op,
                   (long long)last, name, pg_shape_text(x));
}

int pg_sumsq(pg_tensor *step, const pg_tensor *x, const pg_tensor *ends, const pg_tensor *weights) {
    PG_POLL();
    PG_GIVEN("sumsq", step, x);
    PG_TRY(pg_check_step("sumsq", step));
    PG_FLOATING("sumsq", x);
    PG_APART("sumsq", step, x);
    if (!ends != !weights)
        return pg_fail(PG_EINVAL, "sumsq: %s without %s; give both, or neither (all count once)",
                       ends ? "ends" : "weights", ends ? "weights" : "ends");
    if (ends) {
        PG_HAS_DTYPE("sumsq", ends, PG_I64);
        PG_HAS_DTYPE("sumsq", weights, PG_F32);
        PG_SAME_COUNT("sumsq", weights, ends);
    }
    PG_OPEN(b, "sumsq", step, x, ends, weights);
    if (ends) PG_TRY(check_ends(b, "sumsq", "x", x, ends));
    return b->kernels->sumsq(pg_tensor_at(step), pg_tensor_at(x), x->count,
                             ends ? pg_tensor_at(ends) : NULL, ends ? pg_tensor_at(weights) : NULL,
                             ends ? ends->count : 0, x->dtype, b->stream);
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
    PG_TRY(pg_capture_bars("count_nonfinite", "the host sees no numbers; look at them afterwards"));
    int64_t found = b->kernels->count_nonfinite(pg_tensor_at(x), x->count, x->dtype, b->stream);
    if (found < 0) return (int)found;
    *count = found;
    return PG_OK;
}

/* ---- updates ---- */
/* value with its master: bf16 with i16, or bf16 or f16 with f32. */
static int check_master(const char *op, const pg_tensor *value, const pg_tensor *master) {
    int known = (value->dtype == PG_BF16 && master->dtype == PG_I16) ||
                (pg_is_half(value->dtype) && master->dtype == PG_F32);
    if (!known)
        return pg_fail(PG_ESHAPE,
                       "%s: value is %s, master is %s; bf16 goes with i16 or f32, f16 with f32", op,
                       pg_shape_text(value), pg_shape_text(master));
    PG_SAME_COUNT(op, master, value);
    PG_APART(op, value, master);
    return PG_OK;
}

/* What adamw and sgd share: a segment, its runs and the step block. */
static int check_segment(const char *op, const pg_tensor *value, const pg_tensor *master,
                         const pg_tensor *grad, const pg_tensor *ends, const pg_tensor *factors,
                         const pg_tensor *step) {
    PG_GIVEN(op, value, grad, ends, factors, step);
    if (master) {
        PG_TRY(check_master(op, value, master));
        PG_MIXED(op, grad, value);
        PG_APART(op, master, grad);
    } else {
        PG_FLOATING(op, value);
        if (pg_is_half(value->dtype))
            return pg_fail(PG_ESHAPE,
                           "%s: value is %s; without a master it must be f32 or f64 (a small step "
                           "does not move %s: give its master)",
                           op, pg_shape_text(value), pg_dtype_name(value->dtype));
        PG_SAME_DTYPE(op, grad, value);
    }
    PG_SAME_COUNT(op, grad, value);
    PG_APART(op, value, grad);
    PG_HAS_DTYPE(op, ends, PG_I64);
    PG_HAS_DTYPE(op, factors, PG_F32);
    PG_HAS_COUNT(op, factors, 2 * ends->count);
    return pg_check_step(op, step);
}

/* A moment: like value; with a master f32 or bf16. */
static int check_state(const char *op, const char *name, const pg_tensor *state,
                       const pg_tensor *value, const pg_tensor *master) {
    if (!master) PG_TRY(pg_check_dtype(op, name, state, "value", value));
    else if (state->dtype != PG_F32 && state->dtype != PG_BF16)
        return pg_fail(PG_ESHAPE, "%s: %s is %s; with a master it must be f32 or bf16", op, name,
                       pg_shape_text(state));
    PG_TRY(pg_check_count(op, name, state, "value", value));
    PG_TRY(pg_check_apart(op, "value", value, name, state, 0));
    return master ? pg_check_apart(op, "master", master, name, state, 0) : PG_OK;
}

static int dtype_or(const pg_tensor *t, int without) { return t ? t->dtype : without; }

int pg_adamw(pg_tensor *value, pg_tensor *master, const pg_tensor *grad, pg_tensor *m, pg_tensor *v,
             const pg_tensor *ends, const pg_tensor *factors, const pg_tensor *step, double beta1,
             double beta2, double eps) {
    PG_POLL();
    PG_TRY(check_segment("adamw", value, master, grad, ends, factors, step));
    PG_GIVEN("adamw", m, v);
    PG_TRY(check_state("adamw", "m", m, value, master));
    PG_TRY(check_state("adamw", "v", v, value, master));
    PG_SAME_DTYPE("adamw", m, v);
    PG_APART("adamw", m, v);
    if (!(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1 && eps >= 0))
        return pg_fail(PG_EINVAL,
                       "adamw: betas %g and %g, eps %g; betas lie in [0,1), eps is not "
                       "below 0",
                       beta1, beta2, eps);
    PG_OPEN(b, "adamw", value, master, grad, m, v, ends, factors, step);
    PG_TRY(check_ends(b, "adamw", "value", value, ends));
    return b->kernels->adamw(pg_tensor_at(value), at_or_null(master), pg_tensor_at(grad),
                             pg_tensor_at(m), pg_tensor_at(v), value->count, pg_tensor_at(ends),
                             pg_tensor_at(factors), ends->count, pg_tensor_at(step), beta1, beta2,
                             eps, value->dtype, dtype_or(master, -1), grad->dtype, m->dtype,
                             b->stream);
}

int pg_sgd(pg_tensor *value, pg_tensor *master, const pg_tensor *grad, pg_tensor *m,
           const pg_tensor *ends, const pg_tensor *factors, const pg_tensor *step, double momentum,
           double dampening, int nesterov, int first) {
    PG_POLL();
    PG_TRY(check_segment("sgd", value, master, grad, ends, factors, step));
    if (m) PG_TRY(check_state("sgd", "m", m, value, master));
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
    PG_OPEN(b, "sgd", value, master, grad, m, ends, factors, step);
    PG_TRY(check_ends(b, "sgd", "value", value, ends));
    return b->kernels->sgd(pg_tensor_at(value), at_or_null(master), pg_tensor_at(grad),
                           at_or_null(m), value->count, pg_tensor_at(ends), pg_tensor_at(factors),
                           ends->count, pg_tensor_at(step), momentum, dampening, nesterov, first,
                           value->dtype, dtype_or(master, -1), grad->dtype, dtype_or(m, PG_F32),
                           b->stream);
}

int pg_master_join(pg_tensor *out, const pg_tensor *value, const pg_tensor *master) {
    PG_POLL();
    PG_GIVEN("master_join", out, value, master);
    PG_TRY(check_master("master_join", value, master));
    PG_HAS_DTYPE("master_join", out, PG_F32);
    PG_SAME_COUNT("master_join", out, value);
    PG_APART("master_join", out, value);
    PG_APART("master_join", out, master);
    PG_OPEN(b, "master_join", out, value, master);
    return b->kernels->master_join(pg_tensor_at(out), pg_tensor_at(value), pg_tensor_at(master),
                                   value->count, value->dtype, master->dtype, b->stream);
}

int pg_master_split(pg_tensor *value, pg_tensor *master, const pg_tensor *in) {
    PG_POLL();
    PG_GIVEN("master_split", value, master, in);
    PG_TRY(check_master("master_split", value, master));
    PG_HAS_DTYPE("master_split", in, PG_F32);
    PG_SAME_COUNT("master_split", in, value);
    PG_APART("master_split", value, in);
    PG_APART("master_split", master, in);
    PG_OPEN(b, "master_split", value, master, in);
    return b->kernels->master_split(pg_tensor_at(value), pg_tensor_at(master), pg_tensor_at(in),
                                    value->count, value->dtype, master->dtype, b->stream);
}
