/* pool.h: cached blocks by size in front of a backend's memory: counting,
 * limits, failing on demand.
 *
 * Freed blocks are kept and handed out again for requests of the same size class.  PG_POOL=0: every
 * block is its own allocation, and a freed one is filled with 0xA5 (sanitizers see misuse).
 * Bytes in use count what callers hold, not what the pool keeps.
 *
 * An arena is what a graph computes in: blocks taken while it is in use are its own, those given
 * back go to the next caller in the arena alone, and all of them count as in use, under the tag
 * "graphs", until it is closed. */
#ifndef PG_POOL_H
#define PG_POOL_H
#include "backend.h"

typedef struct pg_arena pg_arena;
/* bytes may be 0 (gives a valid block).  PG_ENOMEM names bytes asked, in use, limit and the largest
 * holders by tag.  tag: a number from pg_mem_tag.  *from: the arena that the block is of, NULL for
 * none: it is given back with it. */
int pg_pool_take(void **block, int64_t bytes, int tag, pg_arena **from);
void pg_pool_give(void *block, int64_t bytes, int tag, pg_arena *from);
pg_arena *pg_arena_new(void);   /* NULL + message */
void pg_arena_use(pg_arena *a); /* blocks come from it; NULL: from the pool */
int64_t pg_arena_bytes(const pg_arena *a);
/* Its free blocks go back to the pool, the others when they are given back; it ends with the last.
 * spoilt: nobody has computed what lies in those. */
void pg_arena_close(pg_arena *a, int spoilt);
int pg_arena_spoilt(const pg_arena *a); /* 0 for NULL */
/* 1 once bytes in use have passed 1.9 times what lived after the last collection (and 64 MiB). */
int pg_pool_wants_collect(void);
void pg_pool_limit(int64_t bytes);
int pg_pool_tag_now(void);
void pg_pool_count_tensor(int delta);
/* Scratch for one kernel call; grows, is kept, belongs to the core. NULL + message if none. */
void *pg_pool_scratch(int64_t bytes);
#endif
