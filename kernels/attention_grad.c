/* attention_grad.c: gradients of attention to q, k and v.
 *
 * With p = softmax(s), s = scale q k':  dv = p' dout,  ds = p (dout v' - delta), where
 * delta = sum over a row of dout * out,  dq = scale ds k,  dk = scale ds' q.  The scores are worked
 * out again from q, k and lse, a block of rows at a time: by strips of rows for p, ds and dq, then
 * by strips of keys for dk and dv.
 * Source: Dao et al. 2022, appendix B.  Loops: attention_grad_typed.h. */
#include <omp.h>
#include "attention.h"

/* Rows between two additions to dk and dv: few enough that p and ds stay in the L2 cache. */
#define BLOCK 64

/* Of one thread: five heads of keys, and for a block its rows of q, dout and delta, p, ds
 * and the random numbers. */
static int64_t scratch_bytes(const pg_attn_args *a) {
    int64_t keys = attention_align(a->keys);
    int64_t numbers = 5 * keys * a->width + BLOCK * (2 * (keys + a->width) + 1);
    return attention_align(numbers) * pg_dtype_size(a->dtype) +
           (a->dropout > 0 ? BLOCK * keys : 0) * (int64_t)sizeof(float);
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
