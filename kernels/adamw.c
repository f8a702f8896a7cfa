/* adamw.c: what happens between the last gradient and the next step: the sum of squares, clipping,
 * the count of bad numbers, and the updates of AdamW and SGD.
 *
 * A segment holds many parameters in runs, each with its own decay and rate factor; one call walks
 * all of them.  Numbers that change from step to step come from the step block (pg.h). */
#include "cpu.h"
#include "master.h"

/* The numbers of one run, in double; the loops round them to their own type. */
typedef struct {
    double clip, keep, beta1, beta2, eps, root_bias2, rate;
} adamw_run;
/* momentum: m = old m + new g, and the step is now * g + ahead * m */
typedef struct {
    double clip, decay, rate, old, new, now, ahead;
    int first;
} sgd_run;

#define TYPED_BODY "adamw_typed.h"
#include "typed_twice.h"

/* The first run that ends after element i: ends rise, so half the rest falls away each time. */
static int64_t run_of(const int64_t *ends, int64_t runs, int64_t i) {
    int64_t low = 0, high = runs;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ends[middle] > i) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Numbers [i, i + n) of a segment, all of one run. */
static void adamw_run_of(const master_state *t, int64_t i, int64_t n, const adamw_run *a) {
    if (t->dtype == PG_F64) {
        adamw_f64((double *)t->value + i, (const double *)t->grad + i, (double *)t->m + i,
                  (double *)t->v + i, n, a);
    } else if (t->dtype == PG_F32) {
        adamw_f32((float *)t->value + i, (const float *)t->grad + i, (float *)t->m + i,
                  (float *)t->v + i, n, a);
    } else {
        master_run w;
        for (int64_t end = i + n; i < end; i += w.n) {
            master_open(&w, t, i, end);
            adamw_f32(w.value, w.grad, w.m, w.v, w.n, a);
            master_close(&w, t);
        }
    }
}

int cpu_adamw(void *value, void *master, const void *grad, void *m, void *v, int64_t n,
              const int64_t *ends, const float *factors, int64_t runs, const double *step,
              double beta1, double beta2, double eps, int dtype, int dtype_master, int dtype_grad,
              int dtype_m, pg_stream s) {
    (void)s;
    master_state state = {value, master, m, v, grad, dtype, dtype_master, dtype_grad, dtype_m};
    if (step[PG_STEP_FINITE] == 0) return PG_OK;
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t piece = 0; piece < n; piece += CPU_GRAIN) {
        int64_t end = pg_min64(n, piece + CPU_GRAIN), r = run_of(ends, runs, piece);
        for (int64_t i = piece, last; i < end && r < runs; i = last, r++) {
            last = pg_min64(end, ends[r]);
            double rate = step[PG_STEP_RATE] * factors[2 * r + 1];
            adamw_run a = {step[PG_STEP_CLIP],        1 - rate * factors[2 * r], beta1, beta2, eps,
                           sqrt(step[PG_STEP_BIAS2]), rate / step[PG_STEP_BIAS1]};
            adamw_run_of(&state, i, last - i, &a);
        }
    }
    return PG_OK;
}

static void sgd_run_of(const master_state *t, int64_t i, int64_t n, const sgd_run *a) {
    if (t->dtype == PG_F64) {
        sgd_f64((double *)t->value + i, (const double *)t->grad + i,
                t->m ? (double *)t->m + i : NULL, n, a);
    } else if (t->dtype == PG_F32) {
        sgd_f32((float *)t->value + i, (const float *)t->grad + i, t->m ? (float *)t->m + i : NULL,
                n, a);
    } else {
        master_run w;
        for (int64_t end = i + n; i < end; i += w.n) {
            master_open(&w, t, i, end);
            sgd_f32(w.value, w.grad, w.m, w.n, a);
            master_close(&w, t);
        }
    }
}

int cpu_sgd(void *value, void *master, const void *grad, void *m, int64_t n, const int64_t *ends,
            const float *factors, int64_t runs, const double *step, double momentum,
            double dampening, int nesterov, int first, int dtype, int dtype_master, int dtype_grad,
            int dtype_m, pg_stream s) {
    (void)s;
    master_state state = {value, master, m, NULL, grad, dtype, dtype_master, dtype_grad, dtype_m};
    if (step[PG_STEP_FINITE] == 0) return PG_OK;
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t piece = 0; piece < n; piece += CPU_GRAIN) {
        int64_t end = pg_min64(n, piece + CPU_GRAIN), r = run_of(ends, runs, piece);
        for (int64_t i = piece, last; i < end && r < runs; i = last, r++) {
            last = pg_min64(end, ends[r]);
            sgd_run a = {step[PG_STEP_CLIP],
                         factors[2 * r],
                         step[PG_STEP_RATE] * factors[2 * r + 1],
                         momentum,
                         1 - dampening,
                         nesterov ? 1 : 0,
                         nesterov ? momentum : 1,
                         first};
            sgd_run_of(&state, i, last - i, &a);
        }
    }
    return PG_OK;
}

#define PARTS 64 /* partial sums, added in order */

static double sum_squares(const void *x, int64_t n, int dtype) {
    double parts[PARTS] = {0}, sum = 0;
    int64_t length = (n + PARTS - 1) / PARTS;
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t p = 0; p < PARTS; p++) {
        int64_t i = pg_min64(n, p * length), count = pg_min64(n - i, length);
        parts[p] = dtype == PG_F32 ? squares_f32((const float *)x + i, count)
                                   : squares_f64((const double *)x + i, count);
    }
    for (int p = 0; p < PARTS; p++) sum += parts[p];
    return sum;
}

int cpu_sumsq(double *step, const void *x, int64_t n, const int64_t *ends, const float *weights,
              int64_t runs, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("sumsq", dtype));
    if (!ends) {
        step[PG_STEP_SUMSQ] += sum_squares(x, n, dtype);
        return PG_OK;
    }
    int64_t size = pg_dtype_size(dtype), from = 0;
    for (int64_t r = 0; r < runs; from = ends[r++])
        step[PG_STEP_SUMSQ] += (double)weights[r] *
                               sum_squares((const char *)x + from * size, ends[r] - from, dtype);
    return PG_OK;
}

/* The factor undoes the loss scale and clips in one go; norms are of the unscaled gradient. */
int cpu_clip(double *step, double max_norm, pg_stream s) {
    (void)s;
    double scale = step[PG_STEP_SCALE], norm = sqrt(step[PG_STEP_SUMSQ]) / scale;
    step[PG_STEP_NORM] = norm;
    step[PG_STEP_FINITE] = isfinite(norm);
    step[PG_STEP_CLIP] = (max_norm > 0 && norm > max_norm ? max_norm / norm : 1) / scale;
    return PG_OK;
}

/* bf16 and f16: not finite where all bits of the exponent are set */
PG_CLONES static int64_t bad_half(const uint16_t *x, int64_t n, uint16_t exponent) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += (x[i] & exponent) == exponent;
    return count;
}

int64_t cpu_count_nonfinite(const void *x, int64_t n, int dtype, pg_stream s) {
    (void)s;
    if (pg_is_integer(dtype)) return 0;
    int64_t count = 0;
#pragma omp parallel for schedule(static) reduction(+ : count) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN) {
        int64_t most = pg_min64(CPU_GRAIN, n - i);
        if (dtype == PG_F32) count += bad_f32((const float *)x + i, most);
        else if (dtype == PG_F64) count += bad_f64((const double *)x + i, most);
        else count += bad_half((const uint16_t *)x + i, most, dtype == PG_BF16 ? 0x7f80 : 0x7c00);
    }
    return count;
}
