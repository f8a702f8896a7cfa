/* fill.c: one value everywhere, and casts between all dtypes.
 *
 * A cast reads a piece into a small buffer of doubles (of int64 where both sides are integers, so
 * that numbers beyond 2^53 keep their value) and writes it from there; the pairs that training uses
 * all the time go straight. */
#include "cpu.h"
#include "vecmath.h"

#define BUFFER 1024 /* elements; 8 KiB, half of a usual L1 cache with both sides */

int cpu_floating(const char *op, int dtype) {
    if (dtype == PG_F32 || dtype == PG_F64) return PG_OK;
    return pg_fail(PG_EINVAL, "%s: a kernel for f32 and f64 was given %s", op,
                   pg_dtype_name(dtype));
}

/* Out of range to the nearest end, NaN to 0: C leaves both undefined. */
PG_INLINE int64_t truncate(double x, double low, double high, int64_t lowest, int64_t highest) {
    if (!(x > low)) return x <= low ? lowest : 0;
    return x >= high ? highest : (int64_t)x;
}
PG_INLINE int64_t to_i64(double x) { return truncate(x, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX); }
PG_INLINE int32_t to_i32(double x) {
    return (int32_t)truncate(x, -0x1p31, 0x1p31, INT32_MIN, INT32_MAX);
}
PG_INLINE int16_t to_i16(double x) {
    return (int16_t)truncate(x, -0x1p15, 0x1p15, INT16_MIN, INT16_MAX);
}
PG_INLINE uint8_t to_u8(double x) { return (uint8_t)truncate(x, -1, 256, 0, 255); }

/* To f32 with the last bit set when anything was cut off ("round to odd"): a later rounding to a
 * shorter format then gives what rounding x itself would.  Source: Boldo and Melquiond 2008. */
PG_INLINE float to_f32_odd(double x) {
    float f = (float)x;
    if ((double)f == x || f != f) return f;
    uint32_t bits = float_bits(f);
    if (fabs((double)f) > fabs(x)) bits -= 1; /* towards zero; from infinity to the largest */
    return bits_float(bits | 1);
}

PG_CLONES static void bf16_from_f32(uint16_t *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = float_bits(x[i]), rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
        y[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40 : rounded);
    }
}
PG_CLONES static void f32_from_bf16(float *y, const uint16_t *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = bits_float((uint32_t)x[i] << 16);
}
/* pg_f32_to_f16 and back (types.c) without branches.  Adding 1/2 leaves a subnormal's units of
 * 2^-24 in the low bits, rounded to nearest even. */
PG_CLONES static void f16_from_f32(uint16_t *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = float_bits(x[i]), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
        uint32_t normal = (a + 0xfffu + ((a >> 13) & 1) - 0x38000000u) >> 13;
        uint32_t tiny = float_bits(bits_float(a) + 0.5f) - 0x3f000000u;
        uint32_t h = a < 0x38800000u ? tiny : a >= 0x477ff000u ? 0x7c00u : normal;
        y[i] = (uint16_t)(sign | (a > 0x7f800000u ? 0x7e00u : h));
    }
}
PG_CLONES static void f32_from_f16(float *y, const uint16_t *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t a = (uint32_t)(x[i] & 0x7fff) << 13, sign = (uint32_t)(x[i] & 0x8000) << 16;
        uint32_t finite = float_bits(bits_float(a) * 0x1p112f);
        y[i] = bits_float(sign | (a >= 0x0f800000u ? a | 0x7f800000u : finite));
    }
}
PG_CLONES static void f64_from_f32(double *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i];
}
PG_CLONES static void f32_from_f64(float *y, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
}

#define EACH(T, expression)                                                                        \
    do {                                                                                           \
        const T *x = from;                                                                         \
        for (int64_t i = 0; i < n; i++) to[i] = (expression);                                      \
    } while (0)
static void load_real(double *to, const void *from, int64_t n, int dtype) {
    switch (dtype) {
    case PG_F32: EACH(float, x[i]); break;
    case PG_F64: EACH(double, x[i]); break;
    case PG_BF16: EACH(uint16_t, pg_bf16_to_f32(x[i])); break;
    case PG_F16: EACH(uint16_t, pg_f16_to_f32(x[i])); break;
    case PG_I32: EACH(int32_t, x[i]); break;
    case PG_I64: EACH(int64_t, (double)x[i]); break;
    case PG_I16: EACH(int16_t, x[i]); break;
    default: EACH(uint8_t, x[i]); break;
    }
}
static void load_integer(int64_t *to, const void *from, int64_t n, int dtype) {
    switch (dtype) {
    case PG_I32: EACH(int32_t, x[i]); break;
    case PG_I64: EACH(int64_t, x[i]); break;
    case PG_I16: EACH(int16_t, x[i]); break;
    default: EACH(uint8_t, x[i]); break;
    }
}
#undef EACH

#define EACH(T, expression)                                                                        \
    do {                                                                                           \
        T *y = to;                                                                                 \
        for (int64_t i = 0; i < n; i++) y[i] = (expression);                                       \
    } while (0)
static void store_real(void *to, const double *from, int64_t n, int dtype) {
    switch (dtype) {
    case PG_F32: EACH(float, (float)from[i]); break;
    case PG_F64: EACH(double, from[i]); break;
    case PG_BF16: EACH(uint16_t, pg_f32_to_bf16(to_f32_odd(from[i]))); break;
    case PG_F16: EACH(uint16_t, pg_f32_to_f16(to_f32_odd(from[i]))); break;
    case PG_I32: EACH(int32_t, to_i32(from[i])); break;
    case PG_I64: EACH(int64_t, to_i64(from[i])); break;
    case PG_I16: EACH(int16_t, to_i16(from[i])); break;
    default: EACH(uint8_t, to_u8(from[i])); break;
    }
}
/* Integer to a shorter integer keeps the low bits, as a C conversion does. */
static void store_integer(void *to, const int64_t *from, int64_t n, int dtype) {
    switch (dtype) {
    case PG_I32: EACH(int32_t, (int32_t)from[i]); break;
    case PG_I64: EACH(int64_t, from[i]); break;
    case PG_I16: EACH(int16_t, (int16_t)from[i]); break;
    default: EACH(uint8_t, (uint8_t)from[i]); break;
    }
}
#undef EACH

void cpu_widen(float *y, const void *x, int64_t n, int dtype) {
    if (dtype == PG_BF16) f32_from_bf16(y, x, n);
    else f32_from_f16(y, x, n);
}
void cpu_narrow(void *y, const float *x, int64_t n, int dtype) {
    if (dtype == PG_BF16) bf16_from_f32(y, x, n);
    else f16_from_f32(y, x, n);
}

/* n <= BUFFER */
static void cast_piece(void *y, const void *x, int64_t n, int dtype_y, int dtype_x) {
    if (pg_is_half(dtype_y) && dtype_x == PG_F32) return cpu_narrow(y, x, n, dtype_y);
    if (dtype_y == PG_F32 && pg_is_half(dtype_x)) return cpu_widen(y, x, n, dtype_x);
    if (dtype_y == PG_F64 && dtype_x == PG_F32) return f64_from_f32(y, x, n);
    if (dtype_y == PG_F32 && dtype_x == PG_F64) return f32_from_f64(y, x, n);
    union {
        double real[BUFFER];
        int64_t integer[BUFFER];
    } buffer;
    if (pg_is_integer(dtype_y) && pg_is_integer(dtype_x)) {
        load_integer(buffer.integer, x, n, dtype_x);
        store_integer(y, buffer.integer, n, dtype_y);
    } else {
        load_real(buffer.real, x, n, dtype_x);
        store_real(y, buffer.real, n, dtype_y);
    }
}

int cpu_cast(void *y, const void *x, int64_t n, int dtype_y, int dtype_x, pg_stream s) {
    (void)s;
    int64_t size_y = pg_dtype_size(dtype_y), size_x = pg_dtype_size(dtype_x);
    if (dtype_y == dtype_x) {
        if (n) memmove(y, x, (size_t)(n * size_y));
        return PG_OK;
    }
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += BUFFER)
        cast_piece((char *)y + i * size_y, (const char *)x + i * size_x, pg_min64(BUFFER, n - i),
                   dtype_y, dtype_x);
    return PG_OK;
}

/* Repeats the first element through a piece by doubling what is filled. */
static void repeat(char *y, const char *element, int64_t size, int64_t n) {
    int64_t done = size, all = size * n;
    memcpy(y, element, (size_t)size);
    for (; done < all; done *= 2) memcpy(y + done, y, (size_t)pg_min64(done, all - done));
}

int cpu_fill(void *y, double value, int64_t n, int dtype, pg_stream s) {
    (void)s;
    int64_t size = pg_dtype_size(dtype);
    char element[8];
    store_real(element, &value, 1, dtype);
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN)
        repeat((char *)y + i * size, element, size, pg_min64(CPU_GRAIN, n - i));
    return PG_OK;
}
