/* pool.c: see pool.h.  Free blocks wait in bins, eight to each power of two, so that a block is at
 * most an eighth larger than what was asked; from 128 MiB on, where an eighth of a model's states
 * would be gigabytes, there are 64 and it is a 64th.  Bins are plain stacks kept outside the
 * blocks, because a block may be device memory.  One mutex: a progress thread may free too. */
#include "pool.h"
#include "../base/capture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALLEST      64
#define LARGE         27 /* log2 of bytes, from where on bins are finer */
#define FINE          64 /* bins to a power of two there, */
#define COARSE        8  /* and below */
#define BINS          (64 * FINE)
#define TAGS          64
#define COLLECT_SLACK (48LL << 20) /* bytes above the live set that never ask for a collection */

typedef struct {
    void **blocks;
    int64_t count, room;
} bin;

typedef struct { /* scratch for one kernel call */
    void *block;
    int64_t bytes;
} span;

struct pg_arena {
    bin bins[BINS]; /* its free blocks */
    int64_t bytes;  /* of all its blocks */
    int64_t out;    /* blocks that callers hold */
    int closed, spoilt;
    span scratch;
};

static struct {
    pthread_mutex_t lock;
    bin bins[BINS];
    int64_t in_use, peak, kept, limit, blocks, tensors;
    int64_t lived;   /* bytes in use after the last collection */
    int64_t fail_in; /* > 0: the allocation that brings it to 0 fails */
    char *tags[TAGS];
    int64_t by_tag[TAGS];
    int tag_count, tag;
    int plain; /* PG_POOL=0 */
    int ready;
    int graphs; /* the tag of arenas */
    span scratch;
    pg_arena *arena; /* in use, or NULL */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void prepare(void) {
    if (pool.ready) return;
    pool.ready = 1;
    const char *s = getenv("PG_POOL");
    pool.plain = s && !strcmp(s, "0");
    pool.tags[0] = strdup("other");
    pool.tags[pool.graphs = 1] = strdup("graphs");
    pool.tag_count = 2;
}

static int log2_of(int64_t bytes) { return 63 - __builtin_clzll((unsigned long long)bytes); }
static int64_t bins_at(int power) { return power >= LARGE ? FINE : COARSE; }

/* Bin of a size, and the size that all blocks of the bin have. */
static int bin_of(int64_t bytes, int64_t *rounded) {
    if (bytes < SMALLEST) bytes = SMALLEST;
    int power = log2_of(bytes);
    int64_t step = pg_max64(((int64_t)1 << power) / bins_at(power), SMALLEST);
    *rounded = (bytes + step - 1) / step * step;
    power = log2_of(*rounded); /* rounding may reach the next one */
    int64_t part = *rounded - ((int64_t)1 << power);
    return power * FINE + (int)(part / (((int64_t)1 << power) / bins_at(power)));
}

static int64_t size_of_bin(int b) {
    int power = b / FINE;
    return ((int64_t)1 << power) + b % FINE * (((int64_t)1 << power) / bins_at(power));
}

static void give_back(void *block, int64_t bytes) {
    pg_backend_device()->memory->give(block, bytes);
    pool.blocks--;
}

/* Freeing waits for the device, which may not be asked to while it only takes notes. */
static void trim(void) {
    if (pg_capture_on()) return;
    for (int b = 0; b < BINS; b++) {
        bin *f = &pool.bins[b];
        while (f->count) {
            give_back(f->blocks[--f->count], size_of_bin(b));
            pool.kept -= size_of_bin(b);
        }
    }
}

static int report_full(int64_t bytes) {
    char holders[512] = "";
    int64_t held;
    for (int i = 0; i < 3; i++) {
        const char *name = pg_mem_holder(i, &held);
        if (!name) break;
        size_t used = strlen(holders);
        snprintf(holders + used, sizeof holders - used, "%s%s %.1f MiB", i ? ", " : "", name,
                 (double)held / 1048576);
    }
    return pg_fail(PG_ENOMEM,
                   "out of memory: %.1f MiB asked, %.1f MiB in use of %.1f MiB (--memory); largest "
                   "holders: %s; a smaller micro-batch or context, or recompute, needs less",
                   (double)bytes / 1048576, (double)pool.in_use / 1048576,
                   (double)pool.limit / 1048576, *holders ? holders : "none");
}

static int should_fail(void) { return pool.fail_in > 0 && --pool.fail_in == 0; }

/* A block nobody holds, from the pool's bin or the device; counted under `tag`.  A graph's
 * recording would note the filling of PG_POOL=0 down as a part of it, so there is none then. */
static int take_locked(void **block, int64_t bytes, int tag) {
    int64_t rounded;
    int b = bin_of(bytes, &rounded);
    if (pool.limit > 0 && pool.in_use + rounded > pool.limit) return report_full(bytes);
    bin *f = &pool.bins[b];
    if (f->count) {
        *block = f->blocks[--f->count];
        pool.kept -= rounded;
    } else {
        const pg_backend *d = pg_backend_device();
        if (!d) return PG_EDEVICE;
        if (pool.limit > 0 && pool.in_use + pool.kept + rounded > pool.limit) trim();
        *block = d->memory->take(rounded);
        if (!*block) {
            trim();
            *block = d->memory->take(rounded);
        }
        if (!*block) return report_full(bytes);
        pool.blocks++;
        if (pool.plain && !pg_capture_on()) d->memory->set(*block, 0xff, rounded);
    }
    pool.in_use += rounded;
    pool.by_tag[tag] += rounded;
    if (pool.in_use > pool.peak) pool.peak = pool.in_use;
    return PG_OK;
}

static int keep(bin *f, void *block) {
    if (f->count == f->room) {
        int64_t room = f->room ? 2 * f->room : 16;
        void **larger = realloc(f->blocks, (size_t)room * sizeof *larger);
        if (!larger) return 0;
        f->blocks = larger;
        f->room = room;
    }
    f->blocks[f->count++] = block;
    return 1;
}

static void give_locked(void *block, int64_t bytes, int tag) {
    int64_t rounded;
    int b = bin_of(bytes, &rounded), recording = pg_capture_on();
    pool.in_use -= rounded;
    pool.by_tag[tag] -= rounded;
    if (pool.plain && !recording) {
        pg_backend_device()->memory->set(block, 0xa5, rounded);
        give_back(block, rounded);
    } else if (keep(&pool.bins[b], block)) {
        pool.kept += rounded;
    } else if (!recording) {
        give_back(block, rounded);
    } /* else it is lost: no memory for a list, and the device may not be asked */
}

/* ---- arenas ---- */

pg_arena *pg_arena_new(void) {
    pg_arena *a = calloc(1, sizeof *a);
    if (!a) pg_fail(PG_ENOMEM, "graph: no memory for the list of its blocks");
    return a;
}

void pg_arena_use(pg_arena *a) { pool.arena = a; }
int64_t pg_arena_bytes(const pg_arena *a) { return a->bytes; }
int pg_arena_spoilt(const pg_arena *a) { return a && a->spoilt; }

static int arena_take(pg_arena *a, void **block, int64_t bytes) {
    int64_t rounded;
    bin *f = &a->bins[bin_of(bytes, &rounded)];
    if (f->count) *block = f->blocks[--f->count];
    else {
        PG_TRY(take_locked(block, bytes, pool.graphs));
        a->bytes += rounded;
    }
    a->out++;
    return PG_OK;
}

static void arena_give(pg_arena *a, void *block, int64_t bytes) {
    int64_t rounded;
    bin *f = &a->bins[bin_of(bytes, &rounded)];
    a->out--;
    if (a->closed) give_locked(block, bytes, pool.graphs);
    else (void)keep(f, block); /* without memory for the list it stays out of use until the end */
    if (a->closed && !a->out) free(a);
}

void pg_arena_close(pg_arena *a, int spoilt) {
    if (!a) return;
    pthread_mutex_lock(&pool.lock);
    if (a->scratch.block) arena_give(a, a->scratch.block, a->scratch.bytes);
    for (int b = 0; b < BINS; b++) {
        bin *f = &a->bins[b];
        while (f->count) give_locked(f->blocks[--f->count], size_of_bin(b), pool.graphs);
        free(f->blocks);
        *f = (bin){0};
    }
    a->scratch = (span){0};
    a->spoilt = spoilt;
    a->closed = 1;
    if (!a->out) free(a);
    pthread_mutex_unlock(&pool.lock);
}

/* ---- taking and giving ---- */

int pg_pool_take(void **block, int64_t bytes, int tag, pg_arena **from) {
    if (bytes < 0 || bytes > ((int64_t)1 << 60))
        return pg_fail(PG_EINVAL, "memory: %lld bytes asked", (long long)bytes);
    pthread_mutex_lock(&pool.lock);
    prepare();
    *from = pool.arena;
    int rc = should_fail() ? report_full(bytes)
             : pool.arena  ? arena_take(pool.arena, block, bytes)
                           : take_locked(block, bytes, tag);
    pthread_mutex_unlock(&pool.lock);
    return rc;
}

void pg_pool_give(void *block, int64_t bytes, int tag, pg_arena *from) {
    pthread_mutex_lock(&pool.lock);
    if (from) arena_give(from, block, bytes);
    else give_locked(block, bytes, tag);
    pthread_mutex_unlock(&pool.lock);
}

/* An arena has one of its own, since the pool's is given back when a larger one is asked for. */
void *pg_pool_scratch(int64_t bytes) {
    pg_arena *a = pool.arena;
    span *r = a ? &a->scratch : &pool.scratch;
    if (bytes <= r->bytes && r->block) return r->block;
    if (r->block) pg_pool_give(r->block, r->bytes, 0, a);
    *r = (span){0};
    if (pg_pool_take(&r->block, bytes, 0, &a) < 0) return r->block = NULL;
    r->bytes = bytes;
    return r->block;
}

int pg_pool_wants_collect(void) {
    int64_t bound = pool.lived + COLLECT_SLACK, ratio = pool.lived + pool.lived / 10 * 9;
    return pool.in_use > (bound > ratio ? bound : ratio);
}

void pg_pool_limit(int64_t bytes) { pool.limit = bytes; }
int pg_pool_tag_now(void) { return pool.tag; }
void pg_pool_count_tensor(int delta) { __atomic_add_fetch(&pool.tensors, delta, __ATOMIC_RELAXED); }

void pg_mem_stats(pg_mem *out) {
    if (!out) return;
    pthread_mutex_lock(&pool.lock);
    *out = (pg_mem){.in_use = pool.in_use,
                    .peak = pool.peak,
                    .kept = pool.kept,
                    .limit = pool.limit,
                    .tensors = pool.tensors,
                    .blocks = pool.blocks};
    pthread_mutex_unlock(&pool.lock);
}

void pg_mem_reset_peak(void) { pool.peak = pool.in_use; }
void pg_mem_collected(void) { pool.lived = pool.in_use; }
void pg_mem_fail_after(int64_t n) { pool.fail_in = n; }

void pg_mem_trim(void) {
    pthread_mutex_lock(&pool.lock);
    trim();
    pthread_mutex_unlock(&pool.lock);
}

int pg_mem_tag(const char *tag) {
    pthread_mutex_lock(&pool.lock);
    prepare();
    int i = 0;
    while (i < pool.tag_count && tag && strcmp(pool.tags[i], tag)) i++;
    if (!tag || (i == pool.tag_count && i == TAGS)) i = 0; /* a full table counts as "other" */
    if (i == pool.tag_count) pool.tags[pool.tag_count++] = strdup(tag);
    pool.tag = i;
    pthread_mutex_unlock(&pool.lock);
    return i;
}

const char *pg_mem_holder(int i, int64_t *bytes) {
    unsigned char taken[TAGS] = {0};
    int best = -1;
    for (int round = 0; round <= i; round++) {
        best = -1;
        for (int t = 0; t < pool.tag_count; t++)
            if (!taken[t] && pool.by_tag[t] > 0 && (best < 0 || pool.by_tag[t] > pool.by_tag[best]))
                best = t;
        if (best < 0) return NULL;
        taken[best] = 1;
    }
    if (best < 0) return NULL;
    if (bytes) *bytes = pool.by_tag[best];
    return pool.tags[best];
}
