/* half.c: widening the tensors of a call and rounding its outputs; see half.h. */
#include <stdlib.h>
#include <string.h>
#include "half.h"

/* f32 numbers of a copy, to whole cache lines; 0 where the tensor needs none. */
static int64_t room(const half_part *p) {
    void *tensor;
    memcpy(&tensor, p->slot, sizeof tensor);
    if (!tensor || p->n <= 0 || !pg_is_half(p->dtype)) return 0;
    return (p->n + 15) / 16 * 16;
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

int half_open(half_part *parts, int count, void **block, const char *door) {
    int64_t numbers = 16;
    for (int i = 0; i < count; i++) numbers += room(&parts[i]);
    size_t bytes = (size_t)numbers * sizeof(float);
    *block = aligned_alloc(PG_ALIGN, bytes);
    if (!*block)
        return pg_fail(
            PG_ENOMEM,
            "%s: no memory for %.1f MiB of f32 copies of its tensors; use a smaller batch",
            door + strlen("half_"), (double)bytes / 0x1p20);
    float *at = *block;
    for (int i = 0; i < count; i++) {
        half_part *p = &parts[i];
        int64_t taken = room(p);
        if (!taken) continue;
        memcpy(&p->half, p->slot, sizeof p->half);
        if (p->read) widen(at, p->half, p->n, p->dtype);
        memcpy(p->slot, &(void *){at}, sizeof(void *));
        at += taken;
    }
    return PG_OK;
}

int half_close(half_part *parts, int count, void *block, int rc) {
    for (int i = 0; i < count; i++) {
        const half_part *p = &parts[i];
        if (!p->half || !p->write || rc < 0) continue;
        void *copy;
        memcpy(&copy, p->slot, sizeof copy);
        narrow(p->half, copy, p->n, p->dtype);
    }
    free(block);
    return rc;
}
