/* runs.cuh: numbers of a segment by the runs they belong to, for adamw.cu and sumsq.cu.
 *
 * A segment holds many parameters in runs; ends [runs] says where each ends.  A thread that goes
 * round the grid stays in one run for many turns, so it keeps that run's end and looks again, by
 * halving, only when it comes past it. */
#ifndef PG_RUNS_CUH
#define PG_RUNS_CUH
#include "common.cuh"

/* ends [runs], factors [runs,2] (decay, rate) for the updates, [runs] (weights) for sums. */
typedef struct {
    const int64_t *ends;
    const float *factors;
    int64_t runs;
} segment;

/* Where a thread is: its run, and that run's end.  {-1, 0}: nowhere yet. */
typedef struct { int64_t run, end; } run_place;

/* The first run that ends after element i. */
__device__ __forceinline__ int64_t run_of(const int64_t *ends, int64_t runs, int64_t i) {
    int64_t low = 0, high = runs;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ends[middle] > i) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* To the run of element i, which is not before the last one asked for; enter(run) where it is
 * another.  0: i lies behind all runs. */
template <typename E>
__device__ __forceinline__ bool to_run(const segment &g, int64_t i, run_place *at, E enter) {
    if (i < at->end) return true;
    int64_t run = run_of(g.ends, g.runs, i);
    if (run >= g.runs) return false;
    at->run = run;
    at->end = g.ends[run];
    enter(run);
    return true;
}

/* visit(k) for the elements i .. i + W of a pack that belong to a run, with enter(run) before the
 * first of each. */
template <int W, typename E, typename F>
__device__ __forceinline__ void each_element(const segment &g, int64_t i, int64_t n, run_place *at,
                                             E enter, F visit) {
    if (!to_run(g, i, at, enter)) return;
    if (i + W <= at->end && i + W <= n) { /* the usual pack */
#pragma unroll
        for (int k = 0; k < W; k++) visit(k);
        return;
    }
#pragma unroll
    for (int k = 0; k < W; k++) {
        if (i + k >= n || !to_run(g, i + k, at, enter)) break;
        visit(k);
    }
}
#endif
