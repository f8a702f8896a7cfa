/* check.h: the C test helper on cmocka: numbers close by norm, codes with their
 * messages, nothing left alive. */
#ifndef PG_CHECK_H
#define PG_CHECK_H
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "../runtime/pg.h"

/* Tolerances, named once.  Norm of the error over norm of the reference. */
#define TOLERANCE_F32  1e-5
#define TOLERANCE_F64  1e-12
#define TOLERANCE_BF16 5e-3
#define TOLERANCE_F16  1e-3

#define ok(call)                                                                                   \
    do {                                                                                           \
        int ok_code = (call);                                                                      \
        if (ok_code < 0) fail_msg("%s gave %d: %s", #call, ok_code, pg_errmsg());                  \
    } while (0)

/* The call fails with `code` and its message holds `part`. */
#define refuses(code, part, call)                                                                  \
    do {                                                                                           \
        int refused_code = (call);                                                                 \
        if (refused_code != (code)) fail_msg("%s gave %d, not %d", #call, refused_code, (code));   \
        if (!strstr(pg_errmsg(), (part)))                                                          \
            fail_msg("%s said \"%s\", without \"%s\"", #call, pg_errmsg(), (part));                \
    } while (0)

/* ||got - want|| / ||want|| (or ||got|| where want is all zero); infinity if not finite. */
static inline double error_norm(const double *got, const double *want, int64_t n) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = got[i] - want[i];
        error += d * d;
        size += want[i] * want[i];
    }
    double r = size > 0 ? sqrt(error / size) : sqrt(error);
    return isfinite(r) ? r : INFINITY;
}

/* Run at the end of each test: no tensor handle is left. */
static inline int nothing_alive(void **state) {
    (void)state;
    pg_mem m;
    pg_mem_stats(&m);
    if (m.tensors) fprintf(stderr, "%lld tensors left alive\n", (long long)m.tensors);
    return m.tensors ? -1 : 0;
}
#endif
