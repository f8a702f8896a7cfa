/* vecmath.h: exp, log, tanh, sigmoid and erf that a compiler can vectorise, and PG_CLONES.
 *
 * gcc leaves libm calls scalar without -ffast-math; these are plain branch-free arithmetic, so a
 * loop over them becomes vector code.  Put PG_CLONES in front of the function that holds the loop:
 * it is then compiled for AVX-512, AVX2 and plain x86-64, and the loader picks.  OpenMP regions are
 * not cloned, so the loop of one row lives in its own PG_CLONES function, called from the region.
 *
 * f32: relative error below 3e-7 (polynomials fitted to less than 6e-9, the rest is rounding); inf,
 * NaN, overflow and denormal results are as in libm.  The f64 twins call libm: they serve finite
 * differences and references, not speed. */
#ifndef PG_VECMATH_H
#define PG_VECMATH_H
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Thread sanitizers start too late for the resolvers that clones need. */
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) &&         \
    !defined(__SANITIZE_THREAD__)
#define PG_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PG_CLONES
#endif
#define PG_INLINE static inline __attribute__((always_inline))

PG_INLINE uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

PG_INLINE float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* 2^n with n = round(x / ln 2), times e^r of the rest |r| <= ln2/2; 2^n in two factors, so that
 * results near overflow and denormal ones come out right. */
PG_INLINE float vexpf(float x) {
    const float round = 0x1.8p23f; /* adding it leaves the integer in the low bits */
    x = x > 89.0f ? 89.0f : x;     /* e^89 is inf, e^-104 is 0; a NaN passes both */
    x = x < -104.0f ? -104.0f : x;
    float shifted = x * 1.44269504f + round;
    float n = shifted - round;
    int32_t exponent = (int32_t)(float_bits(shifted) - float_bits(round));
    float r = (x - n * 0.693145752f) - n * 1.42860677e-6f; /* ln 2 in two parts */
    float p = 0.00138143206f;
    p = p * r + 0.00836885069f;
    p = p * r + 0.0416684002f;
    p = p * r + 0.166665196f;
    p = p * r + 0.49999994f;
    p = p * (r * r) + r + 1.0f;
    int32_t half = exponent >> 1;
    float low = bits_float((uint32_t)(half + 127) << 23);
    float high = bits_float((uint32_t)(exponent - half + 127) << 23);
    return p * low * high;
}

/* e^x for x <= 88, as below a maximum, with 0 for what would be a denormal number: no clamps and
 * one factor less than vexpf. */
PG_INLINE float vexp_lowf(float x) {
    const float round = 0x1.8p23f;
    float shifted = x * 1.44269504f + round;
    float n = shifted - round;
    uint32_t exponent = float_bits(shifted) - float_bits(round);
    float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 0.00138143206f;
    p = p * r + 0.00836885069f;
    p = p * r + 0.0416684002f;
    p = p * r + 0.166665196f;
    p = p * r + 0.49999994f;
    p = p * (r * r) + r + 1.0f;
    float y = p * bits_float((exponent + 127) << 23);
    return x < -87.0f ? 0.0f : y;
}

/* x = 2^e (1 + t), 1 + t in [sqrt(1/2), sqrt(2)). */
PG_INLINE float vlogf(float x) {
    float denormal = x < 0x1p-126f ? 0x1p23f : 1.0f;
    uint32_t u = float_bits(x * denormal) - 0x3f3504f3u; /* bits of sqrt(1/2) */
    float e = (float)((int32_t)u >> 23) - (x < 0x1p-126f ? 23.0f : 0.0f);
    float t = bits_float((u & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float p = 0.0674663857f;
    p = p * t - 0.116756514f;
    p = p * t + 0.118881628f;
    p = p * t - 0.124055892f;
    p = p * t + 0.142195523f;
    p = p * t - 0.166679963f;
    p = p * t + 0.200021192f;
    p = p * t - 0.250000089f;
    p = p * t + 0.333333135f;
    float y = p * t * t * t - 0.5f * t * t + e * 1.42860677e-6f + t + e * 0.693145752f;
    y = x == 0.0f ? -INFINITY : y;
    y = x < 0.0f ? NAN : y;
    return x < INFINITY ? y : x; /* inf and NaN stay */
}

/* Below -88.7 it gives 0 where libm would still give a denormal number. */
PG_INLINE float vsigmoidf(float x) { return 1.0f / (1.0f + vexpf(-x)); }

PG_INLINE float vtanhf(float x) {
    float u = x * x, a = fabsf(x);
    float p = -0.0057170447f;
    p = p * u + 0.0206505861f;
    p = p * u - 0.0537434965f;
    p = p * u + 0.133314908f;
    p = p * u - 0.333332837f;
    float large = 1.0f - 2.0f / (vexpf(2.0f * a) + 1.0f);
    return a < 0.625f ? x + x * u * p : copysignf(large, x);
}

/* Below 1 an odd polynomial; above, 1 - e^q(|x|) with q fitted to log(erfc) on [1,4]. */
PG_INLINE float verff(float x) {
    float u = x * x, a = fabsf(x);
    float p = 7.88912294e-05f;
    p = p * u - 0.000802084222f;
    p = p * u + 0.00518953567f;
    p = p * u - 0.0268544443f;
    p = p * u + 0.112836003f;
    p = p * u - 0.37612626f;
    p = p * u + 1.12837911f;
    float b = a > 4.0f ? 4.0f : a; /* erfc(4) = 1.5e-8 is below half a unit of 1 */
    float q = 0.00018557407f;
    q = q * b - 0.00293960795f;
    q = q * b + 0.0218053199f;
    q = q * b - 0.103037372f;
    q = q * b - 0.638225675f;
    q = q * b - 1.12704003f;
    q = q * b - 0.000353718788f;
    return a < 1.0f ? x * p : copysignf(1.0f - vexpf(q), x);
}

PG_INLINE double vexp(double x) { return exp(x); }
PG_INLINE double vexp_low(double x) { return exp(x); }
PG_INLINE double vlog(double x) { return log(x); }
PG_INLINE double vsigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
PG_INLINE double vtanh(double x) { return tanh(x); }
PG_INLINE double verf(double x) { return erf(x); }
#endif
