/* cpu.c: the CPU backend: malloc, kernels/NAME.c, shared memory between ranks.
 * Large blocks lie on 2 MiB borders and ask for huge pages: fewer page faults on first touch. */
#include "backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE (2LL << 20)

static void *take(int64_t bytes) {
    int64_t align = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : PG_ALIGN;
    void *block = NULL;
    if (posix_memalign(&block, (size_t)align, (size_t)bytes)) return NULL;
    if (align == HUGE_PAGE) madvise(block, (size_t)(bytes / HUGE_PAGE * HUGE_PAGE), MADV_HUGEPAGE);
    return block;
}

static void give(void *block, int64_t bytes) {
    (void)bytes;
    free(block);
}

static int copy(void *to, const void *from, int64_t bytes, pg_stream s) {
    (void)s;
    if (bytes > 0) memmove(to, from, (size_t)bytes);
    return PG_OK;
}

static int set(void *block, int byte, int64_t bytes) {
    memset(block, byte, (size_t)bytes);
    return PG_OK;
}

static int sync_device(void) { return PG_OK; }

/* First number in a file after `label` (or at its start), times unit; -1 if there is none. */
static int64_t number_in(const char *path, const char *label, int64_t unit) {
    FILE *f = fopen(path, "re");
    if (!f) return -1;
    char line[256];
    long long found = -1;
    while (found < 0 && fgets(line, sizeof line, f)) {
        size_t n = label ? strlen(label) : 0;
        if (!n || !strncmp(line, label, n))
            if (sscanf(line + n, " %lld", &found) != 1) found = -1;
    }
    fclose(f);
    return found < 0 ? -1 : (int64_t)found * unit;
}

/* What a cgroup leaves, v2 then v1, where we see our own group's files. */
static int64_t cgroup_left(void) {
    int64_t most = number_in("/sys/fs/cgroup/memory.max", NULL, 1);
    int64_t used = number_in("/sys/fs/cgroup/memory.current", NULL, 1);
    if (most < 0) {
        most = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", NULL, 1);
        used = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes", NULL, 1);
    }
    return most < 0 ? INT64_MAX : most - (used > 0 ? used : 0);
}

static int64_t available(void) {
    int64_t host = number_in("/proc/meminfo", "MemAvailable:", 1024);
    if (host < 0) host = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return pg_max64(pg_min64(host, cgroup_left()), 64LL << 20);
}

static const pg_memory_ops memory = {
    .take = take,
    .give = give,
    .upload = copy,
    .download = copy,
    .copy = copy,
    .sync = sync_device,
    .available = available,
    .host_visible = 1,
    .set = set,
};

/* The kernel table is found at run time, so it is filled in by backend.c
 * through pg_kernels_cpu(). */
const pg_backend pg_backend_cpu = {
    .name = "cpu", .memory = &memory, .collectives = &pg_collectives_shm};
const pg_backend pg_backend_shape = {.name = "shape", .memory = &memory};
