/* attention.h: what attention.c and attention_grad.c share: which keys a row sees, where a head
 * lies, and the dropout mask. */
#ifndef PG_ATTENTION_H
#define PG_ATTENTION_H
#include "cpu.h"
#include "philox.h"

/* Query rows whose sums stay in registers together.  With two vectors of columns these are eight
 * sums, as many as it takes to keep two multiplying units of four cycles busy. */
#define ROWS 4

/* Keys that row `row` of sample b may see: the first `seen` ones. */
static inline int64_t attention_seen(const pg_attn_args *a, int64_t b, int64_t row) {
    int64_t seen = a->lengths ? pg_max64(0, pg_min64(a->lengths[b], a->keys)) : a->keys;
    if (a->causal) seen = pg_min64(seen, row + 1 + a->keys - a->rows);
    return pg_max64(seen, 0);
}

/* The random stream of one head of one sample of the global batch. */
static inline uint64_t attention_stream(const pg_attn_args *a, int64_t b, int64_t h) {
    uint64_t seed = a->step ? (uint64_t)a->step[PG_STEP_RANDOM] : 0;
    uint64_t head = (uint64_t)((a->sample0 + b) * a->heads_all + a->head0 + h);
    return pg_philox_stream(pg_philox_stream(seed, a->key), head);
}

/* One row's uniform numbers; column j is kept where u[j] >= dropout. */
static inline void attention_units(float *u, uint64_t stream, int64_t row, int64_t n) {
    cpu_units(u, stream, (int64_t)((uint64_t)row << 32), n);
}

static inline int64_t attention_align(int64_t n) { return (n + 15) / 16 * 16; }
#endif
