/* half.c: widening the tensors of a call and rounding its outputs; see half.h. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "half.h"

static void *address(const half_part *p) {
    void *tensor;
    memcpy(&tensor, p->slot, sizeof tensor);
    return tensor;
}

/* f32 numbers of a copy, to whole cache lines; 0 where the tensor needs none. */
static int64_t room(const half_part *p) {
    if (!address(p) || p->n <= 0 || !pg_is_half(p->dtype)) return 0;
    return (p->n + 15) / 16 * 16;
}

/* The part before p that is the same tensor in the same use; NULL: there is none.  The two then
 * share a copy, as the kernel would share the tensor: an attention's dq may be its dk. */
static const half_part *twin(const half_part *parts, const half_part *p) {
    for (const half_part *q = parts; q < p; q++)
        if (q->half == address(p) && q->n == p->n && q->read == p->read && q->write == p->write)
            return q;
    return NULL;
}

static void widen(float *to, const void *from, int64_t n, int dtype) {
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN)
        cpu_widen(to + i, (const uint16_t *)from + i, pg_min64(CPU_GRAIN, n - i), dtype);
}

static void narrow(void *to, const float *from, int64_t n, int dtype) {
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN)
        cpu_narrow((uint16_t *)to + i, from + i, pg_min64(CPU_GRAIN, n - i), dtype);
}

/* The block of the last call waits here for the next, unless it is large: fresh pages cost more
 * than the arithmetic (adding 4M numbers on two cores: 57 ms with them, 12 to 20 without).  Its
 * first cache line holds its size. */
#define KEPT (128 << 20)
static _Atomic(void *) kept;

static void *take_block(size_t bytes) {
    size_t *block = atomic_exchange(&kept, NULL);
    if (block && *block >= bytes) return block;
    free(block);
    block = aligned_alloc(PG_ALIGN, bytes);
    if (block) *block = bytes;
    return block;
}

static void give_block(void *block) {
    if (*(size_t *)block <= KEPT) block = atomic_exchange(&kept, block);
    free(block);
}

int half_open(half_part *parts, int count, void **block, const char *door) {
    int64_t numbers = PG_ALIGN / (int64_t)sizeof(float);
    for (int i = 0; i < count; i++) numbers += room(&parts[i]);
    size_t bytes = (size_t)numbers * sizeof(float);
    *block = take_block(bytes);
    if (!*block)
        return pg_fail(
            PG_ENOMEM,
            "%s: no memory for %.1f MiB of f32 copies of its tensors; use a smaller batch",
            door + strlen("half_"), (double)bytes / 0x1p20);
    float *at = (float *)*block + PG_ALIGN / sizeof(float);
    for (int i = 0; i < count; i++) {
        half_part *p = &parts[i];
        int64_t taken = room(p);
        if (!taken) continue;
        const half_part *same = twin(parts, p);
        void *copy = same ? address(same) : at;
        p->half = address(p);
        if (p->read && !same) widen(at, p->half, p->n, p->dtype);
        memcpy(p->slot, &copy, sizeof copy);
        if (!same) at += taken;
    }
    return PG_OK;
}

int half_close(half_part *parts, int count, void *block, int rc) {
    for (int i = 0; i < count; i++) {
        const half_part *p = &parts[i];
        if (p->half && p->write && rc >= 0) narrow(p->half, address(p), p->n, p->dtype);
    }
    give_block(block);
    return rc;
}
