/* cast.c: see cast.h.  Any dtype is loaded into a short run of doubles or int64, then stored. */
#include "cast.h"

#include <math.h>
#include <string.h>

#define RUN 512 /* elements; 4 KiB of double, stays in the first cache */

/* One loop over a run: `from` and `at` are bytes, so that a value may lie on any address. */
#define EACH(type, ...)                                                                            \
    for (int i = 0; i < n; i++) {                                                                  \
        type v;                                                                                    \
        __VA_ARGS__;                                                                               \
    }                                                                                              \
    break
#define LOAD(type, value)                                                                          \
    EACH(type, memcpy(&v, from + (size_t)i * sizeof v, sizeof v); to[i] = (value))
#define STORE(type, value) EACH(type, v = (value); memcpy(to + (size_t)i * sizeof v, &v, sizeof v))

static void load_reals(double *to, const char *from, int dtype, int n) {
    switch (dtype) {
    case PG_F32: LOAD(float, (double)v);
    case PG_F64: LOAD(double, v);
    case PG_BF16: LOAD(uint16_t, (double)pg_bf16_to_f32(v));
    case PG_F16: LOAD(uint16_t, (double)pg_f16_to_f32(v));
    case PG_I32: LOAD(int32_t, (double)v);
    case PG_I64: LOAD(int64_t, (double)v);
    case PG_I16: LOAD(int16_t, (double)v);
    default: LOAD(uint8_t, (double)v);
    }
}

static void load_integers(int64_t *to, const char *from, int dtype, int n) {
    switch (dtype) {
    case PG_I32: LOAD(int32_t, v);
    case PG_I64: LOAD(int64_t, v);
    case PG_I16: LOAD(int16_t, v);
    default: LOAD(uint8_t, v);
    }
}

/* 2^63 itself does not fit, and is what INT64_MAX becomes as a double. */
static int64_t truncate_within(double x, int64_t low, int64_t high) {
    if (isnan(x)) return 0;
    if (x <= (double)low) return low;
    return x >= (double)high ? high : (int64_t)x;
}

static void store_reals(char *to, int dtype, const double *x, int n) {
    switch (dtype) {
    case PG_F32: STORE(float, (float)x[i]);
    case PG_F64: STORE(double, x[i]);
    case PG_BF16: STORE(uint16_t, pg_f32_to_bf16((float)x[i]));
    case PG_F16: STORE(uint16_t, pg_f32_to_f16((float)x[i]));
    case PG_I32: STORE(int32_t, (int32_t)truncate_within(x[i], INT32_MIN, INT32_MAX));
    case PG_I64: STORE(int64_t, truncate_within(x[i], INT64_MIN, INT64_MAX));
    case PG_I16: STORE(int16_t, (int16_t)truncate_within(x[i], INT16_MIN, INT16_MAX));
    default: STORE(uint8_t, (uint8_t)truncate_within(x[i], 0, UINT8_MAX));
    }
}

static void store_integers(char *to, int dtype, const int64_t *x, int n) {
    switch (dtype) {
    case PG_I32: STORE(int32_t, (int32_t)x[i]);
    case PG_I64: STORE(int64_t, x[i]);
    case PG_I16: STORE(int16_t, (int16_t)x[i]);
    default: STORE(uint8_t, (uint8_t)x[i]);
    }
}

void pg_cast(void *dst, int to, const void *src, int from, int64_t n) {
    union {
        double reals[RUN];
        int64_t integers[RUN];
    } run;
    int64_t from_size = pg_dtype_size(from), to_size = pg_dtype_size(to);
    for (int64_t done = 0; done < n; done += RUN) {
        int now = (int)pg_min64(RUN, n - done);
        const char *source = (const char *)src + done * from_size;
        char *target = (char *)dst + done * to_size;
        if (pg_is_integer(from) && pg_is_integer(to)) {
            load_integers(run.integers, source, from, now);
            store_integers(target, to, run.integers, now);
        } else {
            load_reals(run.reals, source, from, now);
            store_reals(target, to, run.reals, now);
        }
    }
}
