/* swiglu.c: the gated unit of LLaMA's feed-forward part.  x holds gate and up side by side in each
 * row, as one fused GEMM gives them.  Source: Shazeer 2020.  Arithmetic: swiglu_typed.h. */
#define TYPED_BODY "swiglu_typed.h"
#include "typed_twice.h"

int cpu_swiglu(void *y, const void *x, int64_t n, int64_t f, int dtype, pg_stream s) {
    (void)s;
    TYPED_CALL(swiglu, dtype, y, x, n, f);
}

int cpu_swiglu_grad(void *dx, const void *dy, const void *x, int64_t n, int64_t f, int add,
                    int dtype, pg_stream s) {
    (void)s;
    TYPED_CALL(swiglu_grad, dtype, dx, dy, x, n, f, add);
}
