/* attention_grad.c: gradients of attention to q, k and v.
 *
 * With p = softmax(s), s = scale q k':  dv = p' dout,  ds = p (dout v' - delta), where
 * delta = sum over a row of dout * out,  dq = scale ds k,  dk = scale ds' q.  The scores are worked
 * out again from q, k and lse, a block of rows at a time, as in attention.c.
 * Source: Dao et al. 2022, appendix B.  Loops: attention_grad_typed.h. */
#include <cblas.h>
#include <omp.h>
#include "attention.h"

/* Of one thread: a row of random numbers, and BLOCK rows each of p and ds. */
static int64_t scratch_bytes(const pg_attn_args *a) {
    int64_t units = attention_align(a->dropout > 0 ? a->keys : 0) * (int64_t)sizeof(float);
    return units + 2 * attention_align(BLOCK * a->keys) * pg_dtype_size(a->dtype);
}

#define TYPED_BODY "attention_grad_typed.h"
#include "typed_twice.h"

int64_t cpu_attention_grad_scratch(const pg_attn_args *a) {
    return omp_get_max_threads() * scratch_bytes(a);
}

int cpu_attention_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                       const void *lse, const pg_attn_args *a, int add, void *scratch,
                       pg_stream s) {
    (void)s;
    TYPED_CALL(attention_grad, a->dtype, dq, dk, dv, dout, out, lse, a, add, scratch);
}
