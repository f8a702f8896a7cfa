/* sha256.h: SHA-256 (FIPS 180-4) and its HMAC (RFC 2104): how hosts prove that they share a secret.
 * Fingerprints of data are pg_hash's business, which is a hundred times as fast. */
#ifndef PG_SHA256_H
#define PG_SHA256_H
#include <stddef.h>
#include <stdint.h>

#define PG_SHA256_BYTES 32

typedef struct {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64]; /* bytes % 64 of it are full */
} pg_sha256;

void pg_sha256_begin(pg_sha256 *h);
void pg_sha256_add(pg_sha256 *h, const void *data, size_t bytes);
void pg_sha256_end(pg_sha256 *h, unsigned char out[PG_SHA256_BYTES]);
/* Of key and message; keys of any length. */
void pg_hmac(unsigned char out[PG_SHA256_BYTES], const void *key, size_t key_bytes,
             const void *message, size_t bytes);
#endif
