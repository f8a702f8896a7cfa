/* adamw_typed.h: the loops of adamw.c over a piece of one run; see typed_twice.h. */

/* The order of operations of torch.optim.AdamW on one tensor: decay, both moments, then the step
 * rate / bias1 * m / (sqrt(v) / sqrt(bias2) + eps).  So both agree to rounding over many steps. */
PG_CLONES static void N(adamw)(REAL *value, const REAL *grad, REAL *m, REAL *v, int64_t n,
                               const adamw_run *r) {
    const REAL clip = (REAL)r->clip, keep = (REAL)r->keep, beta2 = (REAL)r->beta2;
    const REAL new1 = (REAL)(1 - r->beta1), new2 = (REAL)(1 - r->beta2), eps = (REAL)r->eps;
    const REAL root_bias2 = (REAL)r->root_bias2, rate = (REAL)r->rate;
    for (int64_t i = 0; i < n; i++) {
        REAL g = grad[i] * clip;
        REAL mi = m[i] + new1 * (g - m[i]);
        REAL vi = v[i] * beta2 + new2 * g * g;
        m[i] = mi;
        v[i] = vi;
        value[i] = value[i] * keep - rate * mi / (M(sqrt)(vi) / root_bias2 + eps);
    }
}

/* m NULL: no momentum */
PG_CLONES static void N(sgd)(REAL *value, const REAL *grad, REAL *m, int64_t n, const sgd_run *r) {
    const REAL clip = (REAL)r->clip, decay = (REAL)r->decay, rate = (REAL)r->rate;
    const REAL old = (REAL)r->old, new = (REAL)r->new, ahead = (REAL)r->ahead;
    const REAL now = (REAL)r->now;
    if (!m) {
        for (int64_t i = 0; i < n; i++) value[i] -= rate * (grad[i] * clip + decay * value[i]);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        REAL g = grad[i] * clip + decay * value[i];
        REAL mi = r->first ? g : old * m[i] + new *g;
        m[i] = mi;
        value[i] -= rate * (now * g + ahead * mi);
    }
}

PG_CLONES static double N(squares)(const REAL *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

PG_CLONES static int64_t N(bad)(const REAL *x, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += !(M(fabs)(x[i]) < INFINITY);
    return count;
}
