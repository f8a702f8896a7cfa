/* tensors.h: making, filling and reading small tensors in C tests, always by way of doubles. */
#ifndef PG_TEST_TENSORS_H
#define PG_TEST_TENSORS_H
#include "check.h"
#include "../runtime/base/types.h"

/* A new tensor; floating ones start as NaN, so that a number nobody wrote shows. */
static inline pg_tensor *make(int dtype, int ndim, const int64_t *dims) {
    pg_tensor *t = NULL;
    ok(pg_tensor_new(&t, dtype, ndim, dims));
    unsigned char *at = pg_tensor_data(t);
    memset(at, 0xff, (size_t)(pg_tensor_count(t) * pg_dtype_size(dtype)));
    return t;
}
/* tensor(PG_F32, 2, 3): its dims; tensor(PG_F32): one number. */
#define tensor(...) tensor_of((int64_t[]){__VA_ARGS__}, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8))
static inline pg_tensor *tensor_of(const int64_t *dtype_and_dims, int n) {
    return make((int)dtype_and_dims[0], n - 1, dtype_and_dims + 1);
}

static inline double number_at(const void *data, int dtype, int64_t i) {
    switch (dtype) {
    case PG_F32: return ((const float *)data)[i];
    case PG_F64: return ((const double *)data)[i];
    case PG_I32: return ((const int32_t *)data)[i];
    case PG_I64: return (double)((const int64_t *)data)[i];
    case PG_U8: return ((const uint8_t *)data)[i];
    case PG_I16: return ((const int16_t *)data)[i];
    case PG_BF16: return pg_bf16_to_f32(((const uint16_t *)data)[i]);
    case PG_F16: return pg_f16_to_f32(((const uint16_t *)data)[i]);
    default: fail_msg("no numbers of dtype %d here", dtype);
    }
    return 0;
}
static inline double at(pg_tensor *t, int64_t i) {
    return number_at(pg_tensor_data(t), pg_tensor_dtype(t), i);
}
static inline void put_at(pg_tensor *t, int64_t i, double value) {
    void *data = pg_tensor_data(t);
    switch (pg_tensor_dtype(t)) {
    case PG_F32: ((float *)data)[i] = (float)value; break;
    case PG_F64: ((double *)data)[i] = value; break;
    case PG_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case PG_I64: ((int64_t *)data)[i] = (int64_t)value; break;
    case PG_U8: ((uint8_t *)data)[i] = (uint8_t)value; break;
    case PG_I16: ((int16_t *)data)[i] = (int16_t)value; break;
    case PG_BF16: ((uint16_t *)data)[i] = pg_f32_to_bf16((float)value); break;
    case PG_F16: ((uint16_t *)data)[i] = pg_f32_to_f16((float)value); break;
    default: fail_msg("no numbers of this dtype here");
    }
}

/* A new block of n doubles; the caller frees it. */
static inline double *doubles(int64_t n) { return calloc((size_t)n + 1, sizeof(double)); }
static inline double *numbers_of(pg_tensor *t) {
    int64_t n = pg_tensor_count(t);
    double *out = doubles(n);
    for (int64_t i = 0; i < n; i++) out[i] = at(t, i);
    return out;
}
static inline void put(pg_tensor *t, const double *from) {
    for (int64_t i = 0; i < pg_tensor_count(t); i++) put_at(t, i, from[i]);
}

/* The next number of a small generator, in [-1, 1); its own, so that tests do not lean on ours. */
static inline double chance(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(int64_t)state * 0x1p-63;
}
/* Fills t with numbers of [middle - width, middle + width), and returns t. */
static inline pg_tensor *scatter(pg_tensor *t, double middle, double width) {
    for (int64_t i = 0; i < pg_tensor_count(t); i++) put_at(t, i, middle + width * chance());
    return t;
}

/* The numbers of t against want, by norm, within the tolerance of its dtype. */
#define close_to(t, want) close_to_(t, want, #t, __FILE__, __LINE__)
static inline void close_to_(pg_tensor *t, const double *want, const char *name, const char *file,
                             int line) {
    double *got = numbers_of(t), error = error_norm(got, want, pg_tensor_count(t));
    free(got);
    int dtype = pg_tensor_dtype(t);
    double most = dtype == PG_F64    ? TOLERANCE_F64
                  : dtype == PG_BF16 ? TOLERANCE_BF16
                  : dtype == PG_F16  ? TOLERANCE_F16
                                     : TOLERANCE_F32;
    if (!(error <= most)) {
        print_error("%s:%d: %s is off by %.3g, more than %.3g\n", file, line, name, error, most);
        _fail(file, line);
    }
}
#endif
