/* elementwise.c: functions of one tensor and of two, their slopes, and y = alpha x + beta y.
 * The loops stand in elementwise_typed.h; here work is cut into pieces and handed to threads. */
#define TYPED_BODY "elementwise_typed.h"
#include "typed_twice.h"

/* Runs one of the two calls for each piece of CPU_GRAIN elements: `count` of them from `i` on. */
#define PIECES(n, call32, call64)                                                                  \
    _Pragma("omp parallel for schedule(static) if (n >= CPU_MANY)") for (int64_t i = 0; i < n;     \
                                                                         i += CPU_GRAIN) {         \
        int64_t count = pg_min64(CPU_GRAIN, n - i);                                                \
        if (dtype == PG_F32) call32;                                                               \
        else call64;                                                                               \
    }

int cpu_unary(void *y, const void *x, int64_t n, int kind, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("unary", dtype));
    PIECES(n, unary_f32((float *)y + i, (const float *)x + i, count, kind),
           unary_f64((double *)y + i, (const double *)x + i, count, kind))
    return PG_OK;
}

int cpu_unary_grad(void *dx, const void *dy, const void *x, int64_t n, int kind, int add, int dtype,
                   pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("unary_grad", dtype));
    PIECES(n,
           unary_grad_f32((float *)dx + i, (const float *)dy + i, (const float *)x + i, count, kind,
                          add),
           unary_grad_f64((double *)dx + i, (const double *)dy + i, (const double *)x + i, count,
                          kind, add))
    return PG_OK;
}

/* Elements [i, i + count) of a binary, in runs over which b does not start again. */
static void binary_piece(void *y, const void *a, const void *b, int64_t i, int64_t count,
                         int64_t nb, int kind, int add, int dtype) {
    for (int64_t end = i + count, run; i < end; i += run) {
        int64_t j = nb > 1 ? i % nb : 0;
        run = nb > 1 ? pg_min64(end - i, nb - j) : end - i;
        if (dtype == PG_F32)
            binary_f32((float *)y + i, (const float *)a + i, (const float *)b + j, run, nb > 1,
                       kind, add);
        else
            binary_f64((double *)y + i, (const double *)a + i, (const double *)b + j, run, nb > 1,
                       kind, add);
    }
}

int cpu_binary(void *y, const void *a, const void *b, int64_t n, int64_t nb, int kind, int add,
               int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("binary", dtype));
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN)
        binary_piece(y, a, b, i, pg_min64(CPU_GRAIN, n - i), nb, kind, add, dtype);
    return PG_OK;
}

int cpu_axpby(void *y, const void *x, double alpha, double beta, int64_t n, int dtype,
              pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("axpby", dtype));
    PIECES(n, axpby_f32((float *)y + i, (const float *)x + i, (float)alpha, (float)beta, count),
           axpby_f64((double *)y + i, (const double *)x + i, alpha, beta, count))
    return PG_OK;
}
