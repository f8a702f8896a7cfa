/* pool.c: see pool.h.  Free blocks wait in bins, eight to each power of two, so that a block is at
 * most an eighth larger than what was asked; from 128 MiB on, where an eighth of a model's states
 * would be gigabytes, there are 64 and it is a 64th.  Bins are plain stacks kept outside the blocks,
 * because a block may be device memory.  One mutex: a progress thread may free too. */
#include "pool.h"

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
    void *scratch;
    int64_t scratch_bytes;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void prepare(void) {
    if (pool.ready) return;
    pool.ready = 1;
    const char *s = getenv("PG_POOL");
    pool.plain = s && !strcmp(s, "0");
    pool.tags[0] = strdup("other");
    pool.tag_count = 1;
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

static void trim(void) {
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

static int take_locked(void **block, int64_t bytes, int tag) {
    int64_t rounded;
    int b = bin_of(bytes, &rounded);
    if (should_fail() || (pool.limit > 0 && pool.in_use + rounded > pool.limit))
        return report_full(bytes);
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
        if (pool.plain) d->memory->set(*block, 0xff, rounded);
    }
    pool.in_use += rounded;
    pool.by_tag[tag] += rounded;
    if (pool.in_use > pool.peak) pool.peak = pool.in_use;
    return PG_OK;
}

int pg_pool_take(void **block, int64_t bytes, int tag) {
    if (bytes < 0 || bytes > ((int64_t)1 << 60))
        return pg_fail(PG_EINVAL, "memory: %lld bytes asked", (long long)bytes);
    pthread_mutex_lock(&pool.lock);
    prepare();
    int rc = take_locked(block, bytes, tag);
    pthread_mutex_unlock(&pool.lock);
    return rc;
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

void pg_pool_give(void *block, int64_t bytes, int tag) {
    int64_t rounded;
    int b = bin_of(bytes, &rounded);
    pthread_mutex_lock(&pool.lock);
    pool.in_use -= rounded;
    pool.by_tag[tag] -= rounded;
    if (pool.plain) {
        pg_backend_device()->memory->set(block, 0xa5, rounded);
        give_back(block, rounded);
    } else if (keep(&pool.bins[b], block)) {
        pool.kept += rounded;
    } else {
        give_back(block, rounded);
    }
    pthread_mutex_unlock(&pool.lock);
}

void *pg_pool_scratch(int64_t bytes) {
    if (bytes <= pool.scratch_bytes && pool.scratch) return pool.scratch;
    if (pool.scratch) pg_pool_give(pool.scratch, pool.scratch_bytes, 0);
    pool.scratch = NULL;
    pool.scratch_bytes = 0;
    if (pg_pool_take(&pool.scratch, bytes, 0) < 0) return pool.scratch = NULL;
    pool.scratch_bytes = bytes;
    return pool.scratch;
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
