/* backend.c: which backend is in force.  Chosen once for the process by name; libpg_cuda.so, where
 * it lies beside the program, is opened at run time and must carry this header's number. */
#include "pool.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ABI 1 /* raise it with every change of pg.h, kernels.h or backend.h that a plug-in sees */

static pg_backend cpu;             /* pg_backend_cpu with its kernels filled in */
static const pg_backend *device;   /* the process's one device; NULL until chosen */
static int shapes_alone, closed;

int pg_abi(void) { return ABI; }

double pg_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static const pg_backend *open_cpu(void) {
    cpu = pg_backend_cpu;
    cpu.kernels = pg_kernels_cpu();
    return &cpu;
}

/* libpg_cuda.so beside the program; NULL with the reason in pg_errmsg(). */
static const pg_backend *open_cuda(void) {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 32);
    char *slash = n > 0 ? memrchr(path, '/', (size_t)n) : NULL;
    if (!slash) return pg_fail(PG_EDEVICE, "cuda: cannot find the program's folder"), NULL;
    strcpy(slash + 1, "libpg_cuda.so");
    if (access(path, R_OK))
        return pg_fail(PG_EDEVICE, "cuda: this pgrun was built without CUDA (no %s)", path), NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return pg_fail(PG_EDEVICE, "cuda: %s", dlerror()), NULL;
    const pg_backend *(*open)(int) = (const pg_backend *(*)(int))dlsym(library, "pg_cuda_open");
    int (*abi)(void) = (int (*)(void))dlsym(library, "pg_cuda_abi");
    if (!open || !abi || abi() != ABI)
        return pg_fail(PG_EDEVICE, "cuda: %s is of another version; build both with make", path), NULL;
    return open(ABI);
}

static const pg_backend *find(const char *name) {
    if (!strcmp(name, "cpu")) return open_cpu();
    if (!strcmp(name, "shape")) return &pg_backend_shape;
    if (!strcmp(name, "cuda")) return open_cuda();
    if (!strcmp(name, "auto")) {
        const pg_backend *found = open_cuda();
        return found ? found : open_cpu();
    }
    pg_fail(PG_EINVAL, "device \"%s\" is unknown; one of auto, cpu, cuda, shape", name);
    return NULL;
}

static int64_t default_limit(void) {
    const char *ranks = getenv("LOCAL_WORLD_SIZE");
    long long n = ranks ? atoll(ranks) : 1;
    return device->memory->available() / 10 * 9 / (n > 0 ? n : 1);
}

int pg_init(const char *name, int64_t memory_limit) {
    if (!name || memory_limit < 0)
        return pg_fail(PG_EINVAL, "init: device name or memory limit is wrong");
    if (device) {
        if (!strcmp(name, "auto") || !strcmp(name, device->name)) return PG_OK;
        return pg_fail(PG_EINVAL, "init: device is %s already; choose before the first tensor",
                       device->name);
    }
    const pg_backend *found = find(name);
    if (!found) return PG_EDEVICE;
    device = found;
    pg_pool_limit(memory_limit ? memory_limit : default_limit());
    return PG_OK;
}

const pg_backend *pg_backend_device(void) {
    if (!device && pg_init("auto", 0) < 0) return NULL;
    return device;
}

const pg_backend *pg_backend_now(void) {
    return shapes_alone ? &pg_backend_shape : pg_backend_device();
}

int pg_shape_only(int on) {
    int before = shapes_alone;
    shapes_alone = on != 0;
    return before;
}

const char *pg_device(void) { return device ? device->name : ""; }

int pg_sync(void) {
    PG_POLL();
    const pg_backend *b = pg_backend_now();
    return b ? b->memory->sync() : PG_EDEVICE;
}

void pg_shutdown(void) {
    if (closed) return;
    closed = 1;
    if (device && device->collectives) device->collectives->shutdown();
}

int pg_backend_closed(void) { return closed; }
