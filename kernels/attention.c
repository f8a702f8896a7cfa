/* attention.c: out = softmax(scale q k' + mask) v, by head and by blocks of query rows.
 *
 * A thread holds the scores of BLOCK rows against all keys they may see, so no pass over a row is
 * approximate and no rescaling is needed; a causal block multiplies only up to its last row's key.
 * Heads are read in place from rows of q, k and v by strides.  attention_grad.c goes back.
 * Loops: attention_typed.h. */
#include <cblas.h>
#include <omp.h>
#include "attention.h"

/* Of one thread: a row of random numbers and BLOCK rows of scores, in whole cache lines. */
static int64_t scratch_bytes(const pg_attn_args *a) {
    int64_t units = attention_align(a->dropout > 0 ? a->keys : 0) * (int64_t)sizeof(float);
    return units + attention_align(BLOCK * a->keys) * pg_dtype_size(a->dtype);
}

#define TYPED_BODY "attention_typed.h"
#include "typed_twice.h"

int64_t cpu_attention_scratch(const pg_attn_args *a) {
    return omp_get_max_threads() * scratch_bytes(a);
}

int cpu_attention(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s) {
    (void)s;
    TYPED_CALL(attention, a->dtype, out, lse, a, scratch);
}
