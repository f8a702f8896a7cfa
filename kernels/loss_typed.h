/* loss_typed.h: softmax and cross-entropy, row by row; see typed_twice.h.
 *
 * Exponentials are summed in REAL over CHUNK of them, and the chunks in double: a vocabulary of
 * 50,000 then costs no digits, and the inner loops stay vector code. */

PG_CLONES static REAL N(row_max)(const REAL *x, int64_t v) {
    REAL m = -INFINITY;
#pragma omp simd reduction(max : m)
    for (int64_t i = 0; i < v; i++) m = x[i] > m ? x[i] : m;
    return m;
}

PG_CLONES static double N(row_sum_exp)(const REAL *x, int64_t v, REAL shift) {
    double sum = 0;
    for (int64_t from = 0; from < v; from += CHUNK) {
        int64_t to = from + CHUNK < v ? from + CHUNK : v;
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = from; i < to; i++) part += M(vexp)(x[i] - shift);
        sum += (double)part;
    }
    return sum;
}

/* The same, keeping each exponential in y; y may be x. */
PG_CLONES static double N(row_exp)(REAL *y, const REAL *x, int64_t v, REAL shift) {
    double sum = 0;
    for (int64_t from = 0; from < v; from += CHUNK) {
        int64_t to = from + CHUNK < v ? from + CHUNK : v;
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = from; i < to; i++) {
            REAL e = M(vexp)(x[i] - shift);
            y[i] = e;
            part += e;
        }
        sum += (double)part;
    }
    return sum;
}

PG_CLONES static void N(scale_row)(REAL *y, int64_t v, REAL factor) {
    for (int64_t i = 0; i < v; i++) y[i] *= factor;
}

PG_CLONES static void N(log_softmax_row)(REAL *y, const REAL *x, int64_t v, double shift) {
#pragma omp simd
    for (int64_t i = 0; i < v; i++) y[i] = (REAL)((double)x[i] - shift);
}

static void N(softmax)(REAL *y, const REAL *x, int64_t n, int64_t v, int logarithm) {
#pragma omp parallel for if (n * v >= CPU_MANY / 4)
    for (int64_t i = 0; i < n; i++) {
        const REAL *row = x + i * v;
        REAL m = N(row_max)(row, v);
        if (logarithm) {
            double sum = N(row_sum_exp)(row, v, m);
            N(log_softmax_row)(y + i * v, row, v, (double)m + log(sum));
        } else {
            double sum = N(row_exp)(y + i * v, row, v, m);
            N(scale_row)(y + i * v, v, (REAL)(1 / sum));
        }
    }
}

/* softmax: dx = y (dy - sum(dy y));  log-softmax: dx = dy - exp(y) sum(dy). */
PG_CLONES static double N(softmax_grad_sum)(const REAL *dy, const REAL *y, int64_t v,
                                             int logarithm) {
    double sum = 0;
    if (logarithm) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < v; i++) sum += (double)dy[i];
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < v; i++) sum += (double)dy[i] * (double)y[i];
    }
    return sum;
}

PG_CLONES static void N(softmax_grad_row)(REAL *dx, const REAL *dy, const REAL *y, int64_t v,
                                           REAL sum, REAL keep, int logarithm) {
    if (logarithm) {
#pragma omp simd
        for (int64_t i = 0; i < v; i++) {
            REAL g = dy[i] - M(vexp)(y[i]) * sum;
            dx[i] = keep != 0 ? dx[i] + g : g;
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < v; i++) {
            REAL g = y[i] * (dy[i] - sum);
            dx[i] = keep != 0 ? dx[i] + g : g;
        }
    }
}

static void N(softmax_grad)(REAL *dx, const REAL *dy, const REAL *y, int64_t n, int64_t v,
                             int logarithm, int add) {
#pragma omp parallel for if (n * v >= CPU_MANY / 4)
    for (int64_t i = 0; i < n; i++) {
        const REAL *g = dy + i * v, *row = y + i * v;
        double sum = N(softmax_grad_sum)(g, row, v, logarithm);
        N(softmax_grad_row)(dx + i * v, g, row, v, (REAL)sum, (REAL)add, logarithm);
    }
}

/* out from the loss of each row, in the order of the rows. */
static void N(mean_loss)(REAL *out, const double *loss, const void *targets, int64_t n,
                          int64_t ignore, const double *step, int dtype_ids) {
    double sum = 0;
    int64_t valid = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += loss[i];
        valid += id_at(targets, i, dtype_ids) != ignore;
    }
    out[0] = (REAL)(step ? sum * step[PG_STEP_INV_TOKENS] : valid ? sum / (double)valid : 0);
    out[1] = (REAL)valid;
}

static void N(cross_entropy)(REAL *out, REAL *rows, REAL *lse, const REAL *logits,
                              const void *targets, int64_t n, int64_t v, int64_t ignore,
                              const double *step, double *loss, int dtype_ids) {
#pragma omp parallel for if (n * v >= CPU_MANY / 4)
    for (int64_t i = 0; i < n; i++) {
        int64_t target = id_at(targets, i, dtype_ids);
        loss[i] = 0;
        lse[i] = 0;
        if (target != ignore) {
            const REAL *row = logits + i * v;
            REAL m = N(row_max)(row, v);
            double log_sum = log(N(row_sum_exp)(row, v, m));
            lse[i] = (REAL)((double)m + log_sum);
            loss[i] = log_sum - ((double)row[target] - (double)m);
        }
        if (rows) rows[i] = (REAL)loss[i];
    }
    N(mean_loss)(out, loss, targets, n, ignore, step, dtype_ids);
}

/* Both numbers of an ignored row are 0. */
static void N(vocab_stats)(REAL *stats, const REAL *logits, const void *targets, int64_t n,
                            int64_t v, int64_t first, int64_t valid, int64_t ignore,
                            int dtype_ids) {
#pragma omp parallel for if (n * v >= CPU_MANY / 4)
    for (int64_t i = 0; i < n; i++) {
        int64_t target = id_at(targets, i, dtype_ids);
        const REAL *row = logits + i * v;
        REAL lse = 0, at_target = 0;
        if (target != ignore) {
            REAL m = N(row_max)(row, valid), shift = m > -INFINITY ? m : 0; /* nothing: log(0) */
            lse = (REAL)((double)shift + log(N(row_sum_exp)(row, valid, shift)));
            if (target >= first && target - first < valid) at_target = row[target - first];
        }
        stats[i] = lse;
        stats[n + i] = at_target;
    }
}

/* Of row i of parts [r,2,n]: the log of the sum of all exponentials, and the target's logit. */
static double N(join_parts)(const REAL *parts, int64_t r, int64_t n, int64_t i, double *logit) {
    double m = -INFINITY, sum = 0;
    *logit = 0;
    for (int64_t k = 0; k < r; k++) {
        m = fmax(m, (double)parts[2 * k * n + i]);
        *logit += (double)parts[(2 * k + 1) * n + i];
    }
    for (int64_t k = 0; k < r; k++) sum += exp((double)parts[2 * k * n + i] - m);
    return m + log(sum);
}

static void N(vocab_loss)(REAL *out, REAL *rows, REAL *lse, const REAL *parts,
                           const void *targets, int64_t r, int64_t n, int64_t ignore,
                           const double *step, double *loss, int dtype_ids) {
    for (int64_t i = 0; i < n; i++) {
        double all = 0, logit = 0;
        if (id_at(targets, i, dtype_ids) != ignore) all = N(join_parts)(parts, r, n, i, &logit);
        loss[i] = all - logit;
        lse[i] = (REAL)all;
        if (rows) rows[i] = (REAL)loss[i];
    }
    N(mean_loss)(out, loss, targets, n, ignore, step, dtype_ids);
}

PG_CLONES static void N(cross_entropy_grad_row)(REAL *dx, const REAL *x, int64_t v, REAL shift,
                                                 REAL factor, int add) {
    if (add) {
#pragma omp simd
        for (int64_t i = 0; i < v; i++) dx[i] += M(vexp)(x[i] - shift) * factor;
    } else {
#pragma omp simd
        for (int64_t i = 0; i < v; i++) dx[i] = M(vexp)(x[i] - shift) * factor;
    }
}

static void N(cross_entropy_grad)(REAL *dlogits, const REAL *dloss, int per_row,
                                   const REAL *logits, const void *targets, const REAL *lse,
                                   const REAL *out, int64_t n, int64_t v, int64_t first,
                                   int64_t valid, int64_t ignore, const double *step, int add,
                                   int dtype_ids) {
    double mean = 1;
    if (!per_row) {
        mean = step ? step[PG_STEP_INV_TOKENS] : out[1] > 0 ? 1 / (double)out[1] : 0;
        mean *= (double)dloss[0];
    }
#pragma omp parallel for if (n * v >= CPU_MANY / 4)
    for (int64_t i = 0; i < n; i++) {
        int64_t target = id_at(targets, i, dtype_ids);
        int64_t used = target == ignore ? 0 : valid; /* the others have gradient 0 */
        REAL *row = dlogits + i * v;
        REAL factor = (REAL)(per_row ? (double)dloss[i] : mean);
        N(cross_entropy_grad_row)(row, logits + i * v, used, lse[i], factor, add);
        if (target >= first && target - first < used) row[target - first] -= factor;
        if (!add) memset(row + used, 0, (size_t)(v - used) * sizeof *row);
    }
}
