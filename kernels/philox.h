/* philox.h: random numbers by counter: (seed, key, index) gives one number on any device and in any
 * layout.  Plain C that nvcc also accepts; used by fill, dropout, attention and sampling.
 *
 * The idea: nothing is ever drawn in order.  A stream is a 64-bit key mixed from (seed, key); its
 * number `index` is a word of the Philox block whose counter follows from the index.  Uniform
 * numbers have 24 bits and normals are rounded from double: f32 and f64 tensors hold equal values.
 * Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. */
#ifndef PG_PHILOX_H
#define PG_PHILOX_H
#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define PG_ANYWHERE static inline __host__ __device__
#else
#define PG_ANYWHERE static inline
#endif

typedef struct {
    uint32_t word[4];
} pg_philox;

/* The ten rounds of Philox 4x32; constants from the paper. */
PG_ANYWHERE pg_philox pg_philox_rounds(pg_philox counter, uint32_t key0, uint32_t key1) {
    uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53u * a, q = (uint64_t)0xCD9E8D57u * c;
        uint32_t a2 = (uint32_t)(q >> 32) ^ b ^ key0, c2 = (uint32_t)(p >> 32) ^ d ^ key1;
        a = a2, b = (uint32_t)q, c = c2, d = (uint32_t)p;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    pg_philox out = {{a, b, c, d}};
    return out;
}

/* One step of splitmix64 (Steele, Lea, Flood 2014): spreads any change over all bits. */
PG_ANYWHERE uint64_t pg_splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The stream of (seed, key): work this out once for a whole tensor. */
PG_ANYWHERE uint64_t pg_philox_stream(uint64_t seed, uint64_t key) {
    return pg_splitmix64(seed ^ pg_splitmix64(key));
}

PG_ANYWHERE pg_philox pg_philox_block(uint64_t stream, uint64_t counter) {
    pg_philox c = {{(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0}};
    return pg_philox_rounds(c, (uint32_t)stream, (uint32_t)(stream >> 32));
}

PG_ANYWHERE uint32_t pg_philox_u32(uint64_t stream, int64_t index) {
    return pg_philox_block(stream, (uint64_t)index >> 2).word[index & 3];
}

/* A word as a number in [0,1), 24 bits: exact in f32. */
PG_ANYWHERE float pg_philox_unit(uint32_t word) { return (float)(word >> 8) * 0x1p-24f; }

PG_ANYWHERE float pg_philox_uniform(uint64_t stream, int64_t index) {
    return pg_philox_unit(pg_philox_u32(stream, index));
}

/* log(u) for u in [2^-32, 1].  u = 2^e m with m in [sqrt(1/2), sqrt(2)); log m is the series of
 * 2 atanh(f), f = (m - 1) / (m + 1), whose first dropped term is below 1e-17. */
PG_ANYWHERE double pg_philox_log(double u) {
    union {
        double real;
        uint64_t bits;
    } v = {u};
    uint64_t shifted = v.bits + (0x3FF0000000000000u - 0x3FE6A09E667F3BCDu);
    double e = (double)((int32_t)(shifted >> 52) - 1023);
    v.bits = (shifted & 0x000FFFFFFFFFFFFFu) + 0x3FE6A09E667F3BCDu;
    double f = (v.real - 1) / (v.real + 1), z = f * f, sum = 1.0 / 21;
    for (int k = 19; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
    return 2 * f * sum + e * 0.693147180559945309417;
}

/* cos(2 pi angle / 2^32).  The nearest quarter turn is taken off exactly, in integers; the rest, at
 * most pi/4, goes into the Taylor series of cosine or sine, whose dropped terms are below 1e-17. */
PG_ANYWHERE double pg_philox_cos(uint32_t angle) {
    uint32_t quarter = (angle + 0x20000000u) >> 30;
    double x = (double)(int32_t)(angle - (quarter << 30)) * (6.283185307179586476925 * 0x1p-32);
    double z = -x * x, c = 1, s = 1;
    for (int k = 18; k >= 2; k -= 2) c = c * (z * (1.0 / (k * (k - 1)))) + 1;
    for (int k = 17; k >= 3; k -= 2) s = s * (z * (1.0 / (k * (k - 1)))) + 1;
    double value = quarter & 1 ? x * s : c;
    return quarter == 1 || quarter == 2 ? -value : value;
}

/* Two words as a number of mean 0 and deviation 1: Box and Muller 1958, the cosine branch.  Its
 * logarithm and cosine are written out, so that loops become vector code and devices agree. */
PG_ANYWHERE double pg_philox_gauss(uint32_t radius, uint32_t angle) {
    double u = ((double)radius + 1.0) * 0x1p-32; /* in (0,1]: its logarithm is finite */
    return sqrt(-2.0 * pg_philox_log(u)) * pg_philox_cos(angle);
}

PG_ANYWHERE double pg_philox_normal(uint64_t stream, int64_t index) {
    pg_philox b = pg_philox_block(stream, (uint64_t)index >> 1);
    int at = 2 * (int)(index & 1);
    return pg_philox_gauss(b.word[at], b.word[at + 1]);
}
#endif
