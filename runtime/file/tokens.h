/* tokens.h: what reading (tokens.c) and writing (tokens_write.c) of token files share.  llm.c's
 * header is 256 int32 of which the first three count: magic, version, number of tokens. */
#ifndef PG_TOKENS_H
#define PG_TOKENS_H
#include "../base/types.h"
#include "aside.h"

#define TOKENS_HEADER     1024     /* bytes */
#define TOKENS_MAGIC_U16  20240520 /* GPT-2 ids, uint16; version 1 */
#define TOKENS_MAGIC_U32  20240801 /* Llama-3 ids, uint32; version 7 */
#define TOKENS_MAGIC_EVAL 20240522 /* llm.c's multiple-choice file: no run of tokens */

typedef struct {
    char *path;
    const uint8_t *map;
    int64_t bytes;  /* of the whole file */
    int64_t header; /* bytes before the first token: TOKENS_HEADER or 0 */
    int64_t first;  /* tokens in the files before this one */
    int64_t count;
    int width; /* bytes of a token: 1, 2 or 4 */
} tokens_file;

typedef struct {
    pg_aside aside; /* fd -1: this handle reads */
    int64_t count;
    int width;
    uint8_t *buffer;  /* ids on their way to the file */
    int64_t buffered; /* of them */
} tokens_writer;

struct pg_tokens {
    tokens_file *files; /* in reading order */
    int64_t file_count, count, vocab;
    tokens_writer out;
    _Atomic int holders; /* the one who opened it, and prefetch threads that read it */
};

/* pg_tokens_read without a look at the interrupt flag: for a thread that must not lose a batch. */
int tokens_read_span(const pg_tokens *s, int64_t start, int64_t n, int32_t *dst);
/* One more pg_tokens_close is owed. A collector that ends both handles does so in any order. */
void tokens_hold(const pg_tokens *s);
void tokens_close_writer(tokens_writer *w);
#endif
