/* attention.c: out = softmax(scale q k' + mask) v, by head and by strips of query rows.
 *
 * A thread holds the scores of ROWS rows against all keys they may see, so no pass over a row is
 * approximate and no rescaling is needed, and a causal strip multiplies only up to its last row's
 * key.  The keys of a head are turned into panels first, so that products run along them.
 * The products are our own: attention_product_typed.h.  attention_grad.c goes back.
 * Loops: attention_typed.h. */
#include <omp.h>
#include "attention.h"

/* Query rows that share one packing of the keys; chunks are also what threads take in turn. */
#define CHUNK 256

/* Of one thread: a row of random numbers, ROWS rows of scores, a head of keys, one of values and
 * CHUNK rows of q. */
static int64_t scratch_bytes(const pg_attn_args *a) {
    int64_t keys = attention_align(a->keys);
    int64_t numbers = keys * (ROWS + 2 * a->width) + CHUNK * a->width;
    return attention_align(numbers) * pg_dtype_size(a->dtype) +
           (a->dropout > 0 ? keys : 0) * (int64_t)sizeof(float);
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
