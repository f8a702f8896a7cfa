/* tune_cublas.c: choosing among cuBLASLt's candidates for a shape by their time on this card.
 *
 * The library's first guess costs up to a fifth on single shapes.  Every candidate runs once; those
 * within a fifth of the best then run in turns, so that a clock that drops under load
 * drops for all, and the least median wins.  Operands are the real ones: zeros would run
 * faster than numbers do. */
#include "matmul_cublas.h"

#include <stdlib.h>
#include <string.h>

#ifndef WORTH_FLOPS
#define WORTH_FLOPS 4e9f /* smaller products take a few us, where the choice is noise */
#endif
#define CONTENDER  1.2f /* times the best, and still in the race */
#define TURNS      5
#define BURST_MS   0.3f /* what is timed at once is at least so long, */
#define BURST_MOST 16   /* or so many runs */

int gemm_worth_tuning(const gemm_plan *p) {
    const char *wish = getenv("PG_GEMM_TUNE");
    if (wish && !strcmp(wish, "0")) return 0;
    const int64_t *at = p->key.at;
    double flops = 2.0 * (double)at[GEMM_M] * (double)at[GEMM_N] * (double)at[GEMM_K] *
                   (double)at[GEMM_BATCH];
    return flops >= (double)WORTH_FLOPS;
}

typedef struct {
    const gemm_plan *plan;
    gemm_call call;
    cudaEvent_t from, to;
} bench;

/* Milliseconds of one of `runs` runs in a row; a negative number if one failed. */
static float time_of(const bench *b, const cublasLtMatmulAlgo_t *algo, int runs) {
    float ms = -1;
    if (cudaEventRecord(b->from, b->call.stream) != cudaSuccess) return -1;
    for (int i = 0; i < runs; i++)
        if (gemm_launch(b->plan, &b->call, algo) != CUBLAS_STATUS_SUCCESS) return -1;
    if (cudaEventRecord(b->to, b->call.stream) != cudaSuccess ||
        cudaEventSynchronize(b->to) != cudaSuccess ||
        cudaEventElapsedTime(&ms, b->from, b->to) != cudaSuccess)
        return -1;
    return ms / (float)runs;
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Each candidate's time once it is loaded, and the least of them; -1 for one that failed. */
static float first_round(const bench *b, const cublasLtMatmulHeuristicResult_t *found, int n,
                         float *ms) {
    float best = -1;
    for (int i = 0; i < n; i++) {
        ms[i] = time_of(b, &found[i].algo, 1);
        if (ms[i] >= 0) ms[i] = time_of(b, &found[i].algo, 1);
        if (ms[i] > 0 && (best < 0 || ms[i] < best)) best = ms[i];
    }
    return best;
}

static int race(const bench *b, const cublasLtMatmulHeuristicResult_t *found, int n) {
    float first[GEMM_CANDIDATES], turns[GEMM_CANDIDATES][TURNS];
    float best = first_round(b, found, n, first), least = -1;
    if (best < 0) return -1;
    int runs = best * BURST_MOST < BURST_MS ? BURST_MOST : 1 + (int)(BURST_MS / best), winner = -1;
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < n; i++) {
            if (first[i] < 0 || first[i] > best * CONTENDER) continue;
            turns[i][turn] = time_of(b, &found[i].algo, runs);
            if (turns[i][turn] < 0) first[i] = -1;
        }
    }
    for (int i = 0; i < n; i++) {
        if (first[i] < 0 || first[i] > best * CONTENDER) continue;
        qsort(turns[i], TURNS, sizeof(float), by_size);
        if (winner >= 0 && turns[i][TURNS / 2] >= least) continue;
        winner = i;
        least = turns[i][TURNS / 2];
    }
    return winner;
}

int gemm_tune(const gemm_plan *p, const gemm_call *call,
              const cublasLtMatmulHeuristicResult_t *found, int n, int *timed) {
    const int64_t *at = p->key.at;
    bench b = {.plan = p, .call = *call};
    void *block = NULL;
    int winner = -1;
    if (at[GEMM_ADDS]) { /* c is still wanted: time on a copy of it */
        int64_t span = (at[GEMM_BATCH] - 1) * at[GEMM_STRIDE_C] + (at[GEMM_M] - 1) * at[GEMM_LDC] +
                       at[GEMM_N];
        size_t bytes = (size_t)(span * pg_dtype_size((int)at[GEMM_DTYPE_C]));
        if (cudaMalloc(&block, bytes) != cudaSuccess ||
            cudaMemcpyAsync(block, call->c, bytes, cudaMemcpyDeviceToDevice, call->stream) !=
                cudaSuccess)
            goto done;
        b.call.c = block;
    }
    if (cudaEventCreate(&b.from) != cudaSuccess || cudaEventCreate(&b.to) != cudaSuccess) goto done;
    winner = race(&b, found, n);
done:
    if (b.from) cudaEventDestroy(b.from);
    if (b.to) cudaEventDestroy(b.to);
    if (block) cudaFree(block);
    cudaGetLastError(); /* a lack of memory here is no error: the first candidate serves */
    *timed = winner >= 0;
    return winner >= 0 ? winner : 0;
}
