/* permute.c: element i of a keyed permutation of [0,n), without a table: the order of an epoch
 * costs no memory and any rank can ask for any place in it.
 *
 * A Feistel network permutes the 2^(2h) numbers of 2h bits whatever its round function; a result
 * outside [0,n) is put through again until it lands inside (cycle walking: Black and Rogaway 2002),
 * which stays a permutation.  As 2^(2h) < 4n, that takes below 4 passes on average. */
#include "../base/status.h"

#define ROUNDS 8 /* more than the 4 that theory asks for, as small n leaves few bits to mix */

/* The finaliser of splitmix64 (Steele, Lea and Flood 2014). */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* x of 2 * half bits; half <= 31. */
static uint64_t feistel(uint64_t x, int half, uint64_t key) {
    uint64_t mask = ((uint64_t)1 << half) - 1, left = x >> half, right = x & mask;
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        uint64_t f = mix(mix(key + round * 0x9e3779b97f4a7c15u) ^ right) >> 32;
        uint64_t next = left ^ (f & mask);
        left = right;
        right = next;
    }
    return left << half | right;
}

int64_t pg_permute_index(int64_t i, int64_t n, uint64_t key) {
    if (n < 1 || n > (int64_t)1 << 62 || i < 0 || i >= n)
        return pg_fail(PG_EINVAL, "permute: index %lld of %lld; n goes from 1 to 2^62",
                       (long long)i, (long long)n);
    int half = 1;
    while ((uint64_t)n > (uint64_t)1 << (2 * half)) half++;
    uint64_t x = (uint64_t)i;
    do x = feistel(x, half, key);
    while (x >= (uint64_t)n);
    return (int64_t)x;
}
