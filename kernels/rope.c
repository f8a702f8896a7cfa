/* rope.c: rotary positions: the tables of cosines and sines, and the rotation with its gradient
 * (the same rotation backwards: sign -1).  Source: Su et al. 2021; the pairing of column i with
 * i + K/2 is Hugging Face's.  Arithmetic: rope_typed.h. */
#define TYPED_BODY "rope_typed.h"
#include "typed_twice.h"

int cpu_rope_table(void *cos, void *sin, double theta, int64_t first, int64_t t, int64_t half,
                   int dtype, pg_stream s) {
    (void)s;
    TYPED_CALL(rope_table, dtype, cos, sin, theta, first, t, half);
}

int cpu_rope(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
             int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add, int dtype,
             pg_stream s) {
    (void)s;
    TYPED_CALL(rope, dtype, y, x, cos, sin, b, t, c, heads, half, start, sign, add);
}
