/* types.c: names and sizes of dtypes; half precision by hand, exact on any processor. */
#include "types.h"

#include <math.h>

static const struct { const char *name; int64_t size; } dtypes[PG_NDTYPES] = {
    [PG_F32] = {"f32", 4},  [PG_F64] = {"f64", 8}, [PG_BF16] = {"bf16", 2}, [PG_F16] = {"f16", 2},
    [PG_I32] = {"i32", 4},  [PG_I64] = {"i64", 8}, [PG_U8] = {"u8", 1},
};

const char *pg_dtype_name(int dtype) {
    return dtype >= 0 && dtype < PG_NDTYPES ? dtypes[dtype].name : "?";
}

int64_t pg_dtype_size(int dtype) {
    return dtype >= 0 && dtype < PG_NDTYPES ? dtypes[dtype].size : 0;
}

float pg_f16_to_f32(uint16_t h) {
    int exponent = (h >> 10) & 31, mantissa = h & 1023;
    float sign = h & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpf((float)mantissa, -24);
    return sign * ldexpf((float)(mantissa | 1024), exponent - 25);
}

uint16_t pg_f32_to_f16(float f) {
    union { float f; uint32_t u; } v = {f};
    uint32_t sign = (v.u >> 16) & 0x8000, magnitude = v.u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);  /* NaN */
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* 65520 and up: infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal, in units of 2^-24 */
        float units = ldexpf(fabsf(f), 24);
        return (uint16_t)(sign | (uint32_t)nearbyintf(units));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}
