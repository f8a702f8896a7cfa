/* tune_cublas.c: choosing among cuBLASLt's candidates for a shape by their time on this card.
 *
 * The library's first guess costs up to a fifth on single shapes.  Every candidate runs once; those
 * within a fifth of the best then run in turns, so that a clock that drops under load drops for all,
 * and the host waits for none of them: a card that rests in between ranks them otherwise than one at
 * its power limit.  Those that are close then run some turns more; the least median wins.  Operands
 * are the real ones: zeros would run faster than numbers do. */
#include "matmul_cublas.h"

#include <stdlib.h>
#include <string.h>

#ifndef WORTH_FLOPS
#define WORTH_FLOPS 4e9f /* smaller products take a few us, where the choice is noise */
#endif
#define CONTENDER  1.2f /* times the best of the first round, and still in the race */
#define FINALIST   1.04f
#define BURST_MS   0.3f /* what is timed at once is at least so long, */
#define BURST_MOST 16   /* or so many runs */
enum { EARLY_TURNS = 5, TURNS = 13 };

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
    const cublasLtMatmulHeuristicResult_t *found;
    int n, runs; /* runs: of a candidate in a turn */
    int racing[GEMM_CANDIDATES];
    float ms[GEMM_CANDIDATES][TURNS];              /* of one run */
    cudaEvent_t marks[TURNS][GEMM_CANDIDATES + 1]; /* before each candidate, and after the last */
} bench;

static int make_marks(bench *b) {
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i <= b->n; i++)
            if (cudaEventCreate(&b->marks[turn][i]) != cudaSuccess) return 0;
    return 1;
}

static void free_marks(bench *b) {
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i <= b->n; i++)
            if (b->marks[turn][i]) cudaEventDestroy(b->marks[turn][i]);
}

/* A turn of all that race, put into the stream.  One that fails is out. */
static int enqueue(bench *b, int turn, int runs) {
    for (int i = 0; i < b->n; i++) {
        if (cudaEventRecord(b->marks[turn][i], b->call.stream) != cudaSuccess) return 0;
        for (int k = 0; k < runs && b->racing[i]; k++)
            b->racing[i] = gemm_launch(b->plan, &b->call, &b->found[i].algo) ==
                           CUBLAS_STATUS_SUCCESS;
    }
    return cudaEventRecord(b->marks[turn][b->n], b->call.stream) == cudaSuccess;
}

static int measure(bench *b, int turn, int runs) {
    if (cudaEventSynchronize(b->marks[turn][b->n]) != cudaSuccess) return 0;
    for (int i = 0; i < b->n; i++) {
        float ms;
        cudaError_t told = cudaEventElapsedTime(&ms, b->marks[turn][i], b->marks[turn][i + 1]);
        if (told != cudaSuccess) return 0;
        b->ms[i][turn] = ms / (float)runs;
    }
    return 1;
}

static int run_turns(bench *b, int from, int to) {
    for (int turn = from; turn < to; turn++)
        if (!enqueue(b, turn, b->runs)) return 0;
    for (int turn = from; turn < to; turn++)
        if (!measure(b, turn, b->runs)) return 0;
    return 1;
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* By the medians of the first `turns`: who wins, or -1.  Leaves in the race those within `factor`
 * of the winner. */
static int judge(bench *b, int turns, float factor) {
    int winner = -1;
    for (int i = 0; i < b->n; i++) {
        if (!b->racing[i]) continue;
        qsort(b->ms[i], (size_t)turns, sizeof(float), by_size);
        if (winner < 0 || b->ms[i][turns / 2] < b->ms[winner][turns / 2]) winner = i;
    }
    for (int i = 0; i < b->n && winner >= 0; i++)
        if (b->ms[i][turns / 2] > b->ms[winner][turns / 2] * factor) b->racing[i] = 0;
    return winner;
}

/* The first run of each loads it; the second counts. */
static int first_round(bench *b) {
    for (int i = 0; i < b->n; i++) b->racing[i] = 1;
    if (!enqueue(b, 0, 1) || !measure(b, 0, 1)) return 0;
    if (!enqueue(b, 0, 1) || !measure(b, 0, 1)) return 0;
    int best = judge(b, 1, CONTENDER);
    if (best < 0) return 0;
    float ms = b->ms[best][0];
    b->runs = ms * BURST_MOST < BURST_MS ? BURST_MOST : 1 + (int)(BURST_MS / ms);
    return 1;
}

static int race(bench *b) {
    if (!first_round(b) || !run_turns(b, 0, EARLY_TURNS)) return -1;
    int winner = judge(b, EARLY_TURNS, FINALIST), finalists = 0;
    for (int i = 0; i < b->n; i++) finalists += b->racing[i];
    if (finalists < 2) return winner;
    return run_turns(b, EARLY_TURNS, TURNS) ? judge(b, TURNS, FINALIST) : -1;
}

int gemm_tune(const gemm_plan *p, const gemm_call *call,
              const cublasLtMatmulHeuristicResult_t *found, int n, int *timed) {
    const int64_t *at = p->key.at;
    bench b = {.plan = p, .call = *call, .found = found, .n = n};
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
    if (make_marks(&b)) winner = race(&b);
done:
    free_marks(&b);
    if (block) cudaFree(block);
    cudaGetLastError(); /* a lack of memory here is no error: the first candidate serves */
    *timed = winner >= 0;
    return winner >= 0 ? winner : 0;
}
