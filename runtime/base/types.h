/* types.h: what a dtype is, and the few helpers all rooms share. */
#ifndef PG_TYPES_H
#define PG_TYPES_H
#include "../pg.h"

#define PG_MAX_DIMS 8
#define PG_ALIGN    64 /* bytes; every block starts on a cache line */

static inline int pg_is_floating(int dtype) { return dtype >= PG_F32 && dtype <= PG_F16; }
static inline int pg_is_integer(int dtype) { return dtype >= PG_I32 && dtype <= PG_I16; }
static inline int pg_is_half(int dtype) { return dtype == PG_BF16 || dtype == PG_F16; }
static inline int64_t pg_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pg_max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Round-trip between bf16 and f32: the upper half, rounded to nearest even, NaN kept quiet. */
static inline float pg_bf16_to_f32(uint16_t h) {
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}
static inline uint16_t pg_f32_to_bf16(float f) {
    union {
        float f;
        uint32_t u;
    } v = {f};
    if ((v.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((v.u >> 16) | 0x40);
    return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1)) >> 16);
}
float pg_f16_to_f32(uint16_t h);
uint16_t pg_f32_to_f16(float f); /* nearest even, overflow to infinity */
#endif
