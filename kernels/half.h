/* half.h: bf16 and f16 on the CPU: the call of an f32 kernel on widened copies.
 *
 * Inputs are widened to f32, the kernel runs, and each output is rounded once, to nearest even.  A
 * door of kernels.c lists the tensors of a call and gives the call itself:
 *
 *     WIDENED(cpu_unary(y, x, n, kind, dtype, s), READ(x, n), WRITE(y, n));
 *
 * While the call runs, x and y are the copies and dtype is PG_F32; for other dtypes the call is all
 * that happens.  NULL tensors are left alone.  The copies of one call are one block, taken from
 * malloc and given back, beside the pool: 4 bytes for each number of the call's tensors. */
#ifndef PG_HALF_H
#define PG_HALF_H
#include "cpu.h"

typedef struct {
    void *slot; /* where the caller keeps the tensor's address */
    int64_t n;
    int dtype, read, write;
    void *half; /* the tensor itself, while slot holds the copy; NULL: there is none */
} half_part;

/* ..._AS: a tensor with a dtype of its own; f32 passes as it is.  UPDATE: read only where `add`. */
#define READ(x, n)                                                                                 \
    { &x, n, dtype, 1, 0, NULL }
#define WRITE(y, n)                                                                                \
    { &y, n, dtype, 0, 1, NULL }
#define UPDATE(y, n, add)                                                                          \
    { &y, n, dtype, (add) != 0, 1, NULL }
#define UPDATE_AS(y, n, add, dtype_y)                                                              \
    { &y, n, dtype_y, (add) != 0, 1, NULL }

#define WIDENED(call, ...)                                                                         \
    do {                                                                                           \
        if (!pg_is_half(dtype)) return call;                                                       \
        half_part parts[] = {__VA_ARGS__};                                                         \
        int count = (int)(sizeof parts / sizeof *parts);                                           \
        void *block;                                                                               \
        PG_TRY(half_open(parts, count, &block, __func__));                                         \
        dtype = PG_F32;                                                                            \
        return half_close(parts, count, block, call);                                              \
    } while (0)

/* PG_ENOMEM names the op by the name of its door. */
int half_open(half_part *parts, int count, void **block, const char *door);
/* Rounds the outputs unless rc is an error; gives the block back; returns rc. */
int half_close(half_part *parts, int count, void *block, int rc);
#endif
