/* fake.h: a plug-in of stand-ins, for machines without a GPU: our C code around cuBLASLt and cuDNN
 * is real, the libraries and the .cu kernels under it are plain loops on the host.
 *
 *   fake_cublas.c   cuBLASLt as its manual tells it, and matmul_finish.cu
 *   fake_cudnn.c    plans that compute attention, and the kernels around them
 *   fake_plugin.c   memory, events, and the table
 *
 * tests/journey/cuda_logic.sh builds libpg_cuda.so of these and runs the twin tests against it: it
 * tests layouts, strides, epilogues, scratch and fallbacks, and the twin tests themselves. */
#ifndef PG_TEST_FAKE_H
#define PG_TEST_FAKE_H
#include <stdlib.h>
#include <string.h>
#include "../../kernels/cuda.h"

/* n numbers of a dtype as doubles; and back, rounded once. */
static inline void fake_numbers(double *out, const void *in, int64_t n, int dtype) {
    pg_kernels_cpu()->cast(out, in, n, PG_F64, dtype, NULL);
}
static inline void fake_round(void *out, const double *in, int64_t n, int dtype) {
    pg_kernels_cpu()->cast(out, in, n, dtype, PG_F64, NULL);
}
/* One number; the casts above are made for many. */
static inline double fake_get(const void *x, int64_t i, int dtype) {
    switch (dtype) {
    case PG_F64: return ((const double *)x)[i];
    case PG_F32: return (double)((const float *)x)[i];
    case PG_F16: return (double)pg_f16_to_f32(((const uint16_t *)x)[i]);
    default: return (double)pg_bf16_to_f32(((const uint16_t *)x)[i]);
    }
}
static inline void fake_put(void *x, int64_t i, double v, int dtype) {
    switch (dtype) {
    case PG_F64: ((double *)x)[i] = v; break;
    case PG_F32: ((float *)x)[i] = (float)v; break;
    case PG_F16: ((uint16_t *)x)[i] = pg_f32_to_f16((float)v); break;
    default: ((uint16_t *)x)[i] = pg_f32_to_bf16((float)v);
    }
}
static inline double *fake_doubles(const void *in, int64_t n, int dtype) {
    double *out = malloc(sizeof *out * (size_t)(n + 1));
    if (!out) abort();
    if (in) fake_numbers(out, in, n, dtype);
    else memset(out, 0, sizeof *out * (size_t)(n + 1));
    return out;
}

extern int fake_timing; /* 1 between two events: a trial run may spoil its output */
#endif
