/* shm_reduce.c: adding up what the ranks hold, in rank order, so that all get the same bits.
 *
 * Blocks of a thousand elements pass through the first-level cache: the first rank's is taken, each
 * other's is folded in.  bf16 and f16 stay in f32 until all ranks are in. */
#include "shm.h"

#include <string.h>

#define BLOCK 1024 /* elements */

/* Thread sanitizers start too late for the resolvers that clones need. */
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

/* A NaN on any side wins in MAX and MIN, so that no rank's NaN is lost. */
#define FOLD(NAME, T)                                                                              \
    CLONES static void NAME(T *restrict y, const T *restrict x, int64_t n, int op) {               \
        if (op == PG_OP_SUM)                                                                       \
            for (int64_t i = 0; i < n; i++) y[i] = (T)(y[i] + x[i]);                               \
        else if (op == PG_OP_MAX)                                                                  \
            for (int64_t i = 0; i < n; i++) y[i] = y[i] > x[i] || y[i] != y[i] ? y[i] : x[i];      \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) y[i] = y[i] < x[i] || y[i] != y[i] ? y[i] : x[i];      \
    }
FOLD(fold_f32, float)
FOLD(fold_f64, double)

/* Integers wrap round like the processor's. */
#define FOLD_INTEGER(NAME, T, U)                                                                   \
    CLONES static void NAME(T *restrict y, const T *restrict x, int64_t n, int op) {               \
        if (op == PG_OP_SUM)                                                                       \
            for (int64_t i = 0; i < n; i++) y[i] = (T)((U)y[i] + (U)x[i]);                         \
        else if (op == PG_OP_MAX)                                                                  \
            for (int64_t i = 0; i < n; i++) y[i] = y[i] > x[i] ? y[i] : x[i];                      \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) y[i] = y[i] < x[i] ? y[i] : x[i];                      \
    }
FOLD_INTEGER(fold_i32, int32_t, uint32_t)
FOLD_INTEGER(fold_i64, int64_t, uint64_t)

CLONES static void widen_bf16(float *restrict y, const uint16_t *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = pg_bf16_to_f32(x[i]);
}
CLONES static void narrow_bf16(uint16_t *restrict y, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = pg_f32_to_bf16(x[i]);
}
#ifdef __FLT16_MAX__ /* the compiler's own half, one instruction where the processor has it */
CLONES static void widen_f16(float *restrict y, const uint16_t *restrict x, int64_t n) {
    const _Float16 *h = (const void *)x;
    for (int64_t i = 0; i < n; i++) y[i] = (float)h[i];
}
CLONES static void narrow_f16(uint16_t *restrict y, const float *restrict x, int64_t n) {
    _Float16 *h = (void *)y;
    for (int64_t i = 0; i < n; i++) h[i] = (_Float16)x[i];
}
#else
static void widen_f16(float *restrict y, const uint16_t *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = pg_f16_to_f32(x[i]);
}
static void narrow_f16(uint16_t *restrict y, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = pg_f32_to_f16(x[i]);
}
#endif

/* n <= BLOCK.  Whole results are built aside, since y may be one of the sources. */
static void reduce_block(char *y, const void *const *x, int sources, int64_t at, int64_t n,
                         int dtype, int op) {
    union {
        float f32[BLOCK];
        double f64[BLOCK];
        int32_t i32[BLOCK];
        int64_t i64[BLOCK];
    } sum;
    float wide[BLOCK];
    int64_t size = pg_dtype_size(dtype);
    int half = dtype == PG_BF16 || dtype == PG_F16;
    for (int s = 0; s < sources; s++) {
        const void *from = (const char *)x[s] + at * size;
        float *as_f32 = s == 0 ? sum.f32 : wide;
        if (dtype == PG_BF16) widen_bf16(as_f32, from, n);
        if (dtype == PG_F16) widen_f16(as_f32, from, n);
        if (s == 0 && !half) memcpy(&sum, from, (size_t)(n * size));
        if (s == 0) continue;
        switch (dtype) {
        case PG_F64: fold_f64(sum.f64, from, n, op); break;
        case PG_I32: fold_i32(sum.i32, from, n, op); break;
        case PG_I64: fold_i64(sum.i64, from, n, op); break;
        default: fold_f32(sum.f32, half ? wide : from, n, op);
        }
    }
    void *to = y + at * size;
    if (dtype == PG_BF16) narrow_bf16(to, sum.f32, n);
    else if (dtype == PG_F16) narrow_f16(to, sum.f32, n);
    else memcpy(to, &sum, (size_t)(n * size));
}

void shm_reduce(void *y, const void *const *x, int sources, int64_t n, int dtype, int op) {
    for (int64_t at = 0; at < n; at += BLOCK)
        reduce_block(y, x, sources, at, pg_min64(BLOCK, n - at), dtype, op);
}
