/* hash.c: xxHash64 of a run of bytes: keys of random streams, fingerprints of texts and numbers. */
#include "../pg.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t pg_hash(const void *data, int64_t bytes, uint64_t seed) {
    return XXH64(data, data && bytes > 0 ? (size_t)bytes : 0, seed);
}
