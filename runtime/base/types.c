/* types.c: names and sizes of dtypes; half precision by hand, exact on any processor. */
#include "types.h"

#include <math.h>

static const struct {
    const char *name;
    int64_t size;
} dtypes[PG_NDTYPES] = {
    [PG_F32] = {"f32", 4}, [PG_F64] = {"f64", 8}, [PG_BF16] = {"bf16", 2}, [PG_F16] = {"f16", 2},
    [PG_I32] = {"i32", 4}, [PG_I64] = {"i64", 8}, [PG_U8] = {"u8", 1},     [PG_I16] = {"i16", 2},
};

const char *pg_dtype_name(int dtype) {
    return dtype >= 0 && dtype < PG_NDTYPES ? dtypes[dtype].name : "?";
}

int64_t pg_dtype_size(int dtype) {
    return dtype >= 0 && dtype < PG_NDTYPES ? dtypes[dtype].size : 0;
}

/* The bits moved to their places in f32 stand for a number 2^112 too small, subnormal ones too. */
float pg_f16_to_f32(uint16_t h) {
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)(h & 0x7fff) << 13}, sign = {(uint32_t)(h >> 15) << 31};
    if (v.u >= 0x0f800000u) v.u |= 0x7f800000u; /* infinity and NaN stay so */
    else v.f *= 0x1p112f;
    v.u |= sign.u;
    return v.f;
}

uint16_t pg_f32_to_f16(float f) {
    union {
        float f;
        uint32_t u;
    } v = {f};
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
