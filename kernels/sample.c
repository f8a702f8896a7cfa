/* sample.c: the next token: the largest logit, or one drawn at random by counter.
 *
 * A row's candidates become a heap by weight only when a cut is asked for; then the most likely are
 * taken off one by one until top_k of them, or the mass top_p, are reached.  top_p counts within
 * what top_k left.  Equal weights: the smaller id first.  Source of top_p: Holtzman et al. 2020. */
#include <omp.h>
#include "philox.h"
#include "kernels.h"

typedef struct {
    double weight;
    int32_t id;
} candidate;

static int before(const candidate *a, const candidate *b) {
    return a->weight > b->weight || (a->weight == b->weight && a->id < b->id);
}

static void sink(candidate *heap, int64_t n, int64_t at) {
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(&heap[child + 1], &heap[child])) child++;
        if (before(&heap[at], &heap[child])) return;
        candidate swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
    }
}

/* Move the best of heap[0..n) to heap[n-1]; the rest stays a heap. */
static void pop(candidate *heap, int64_t n) {
    candidate best = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = best;
    sink(heap, n - 1, 0);
}

/* Keep the likely ones at the end of list, best last; returns their number, *sum their weight. */
static int64_t cut(candidate *list, int64_t v, double *sum, int64_t top_k, double top_p) {
    for (int64_t at = v / 2 - 1; at >= 0; at--) sink(list, v, at);
    int64_t most = top_k > 0 && top_k < v ? top_k : v, kept = 0;
    if (most < v) {
        *sum = 0;
        for (int64_t i = 0; i < most; i++) {
            pop(list, v - i);
            *sum += list[v - 1 - i].weight;
        }
    }
    double enough = top_p * *sum, mass = 0;
    while (kept < most && (kept == 0 || mass < enough)) {
        if (most == v) pop(list, v - kept);
        mass += list[v - 1 - kept++].weight;
    }
    *sum = mass;
    return kept;
}

static int32_t draw(candidate *list, int64_t v, double sum, int64_t top_k, double top_p, double u) {
    int64_t kept = v;
    if (top_p < 1 || (top_k > 0 && top_k < v)) kept = cut(list, v, &sum, top_k, top_p);
    double left = u * sum;
    int32_t id = list[v - 1].id;
    for (int64_t i = v - 1; i >= v - kept; i--) {
        if (list[i].weight > 0) id = list[i].id; /* rounding never leads to an impossible one */
        left -= list[i].weight;
        if (left < 0) break;
    }
    return id;
}

/* 53 bits in [0,1) from a Philox block of its own for each index. */
static double unit(uint64_t stream, int64_t index) {
    pg_philox b = pg_philox_block(stream, (uint64_t)index);
    return (double)(((uint64_t)b.word[0] << 32 | b.word[1]) >> 11) * 0x1p-53;
}

#define TYPED_BODY "sample_typed.h"
#include "typed_twice.h"

int cpu_argmax(void *ids, const void *x, int64_t n, int64_t v, int dtype, int dtype_ids,
               pg_stream s) {
    (void)s;
    TYPED_CALL(argmax, dtype, ids, x, n, v, dtype_ids);
}

int64_t cpu_sample_scratch(int64_t n, int64_t v) {
    return pg_min64(pg_max64(n, 1), omp_get_max_threads()) * v * (int64_t)sizeof(candidate);
}

int cpu_sample(int32_t *ids, const void *logits, int64_t n, int64_t v, double temperature,
               int64_t top_k, double top_p, uint64_t seed, uint64_t key, int64_t first,
               void *scratch, int dtype, pg_stream s) {
    if (temperature == 0) return cpu_argmax(ids, logits, n, v, dtype, PG_I32, s);
    uint64_t stream = pg_philox_stream(seed, key);
    TYPED_CALL(sample, dtype, ids, logits, n, v, temperature, top_k, top_p, stream, first, scratch);
}
