/* backend.c: which backend is in force.  Chosen once for the process by name (PG_DEVICE names it
 * where nobody else does); libpg_cuda.so, where it lies beside the program, is opened at run time
 * and must carry backend.h's number. */
#include "../base/capture.h"
#include "pool.h"
#include "ranks.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static pg_backend cpu;           /* pg_backend_cpu with its kernels filled in */
static const pg_backend *device; /* the process's one device; NULL until chosen */
static int shapes_alone, closed;

int pg_abi(void) { return PG_BACKEND_ABI; }

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

/* ---- the plug-in ---- */

/* libpg_cuda.so beside the program, one folder up (tests), or where `make install` puts it. */
static int plugin_path(char *path, size_t bytes) {
    static const char *const places[] = {"", "../", "../lib/pgrun/"};
    char self[3840];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n > 0) self[n] = 0;
    char *slash = n > 0 ? strrchr(self, '/') : NULL;
    if (!slash) return pg_fail(PG_EDEVICE, "cuda: cannot find the program's folder");
    slash[1] = 0;
    for (int i = 0; i < 3; i++) {
        snprintf(path, bytes, "%s%slibpg_cuda.so", self, places[i]);
        if (!access(path, R_OK)) return PG_OK;
    }
    return pg_fail(PG_EDEVICE, "cuda: this pgrun was built without CUDA (no %slibpg_cuda.so)",
                   self);
}

/* Does a GPU answer?  Asked of the driver alone: the plug-in's libraries take a while to open. */
static int ask_driver(void) {
    int count = 0;
    const char *text = NULL;
    /* read when CUDA or NCCL start, so set before; a user's own values stand.  Connections: streams
     * that may run side by side.  NVLS: its multicast objects outlive a killed
     * process on some hosts. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver)
        return pg_fail(PG_EDEVICE,
                       "cuda: no NVIDIA driver on this machine (libcuda.so.1 is not found)");
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*ask)(int *) = (int (*)(int *))dlsym(driver, "cuDeviceGetCount");
    int (*name)(int, const char **) = (int (*)(int, const char **))dlsym(driver,
                                                                         "cuGetErrorString");
    int code = init && ask ? init(0) : -1;
    if (!code) code = ask(&count);
    if (!code && count > 0) return PG_OK;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (name && code > 0) name(code, &text);
    return pg_fail(PG_EDEVICE, "cuda: the NVIDIA driver finds no GPU%s%s%s%s%s", text ? ": " : "",
                   text ? text : "", visible ? " (CUDA_VISIBLE_DEVICES=" : "",
                   visible ? visible : "", visible ? ")" : "");
}

static void *load_plugin(void) {
    char path[4096];
    static void *library;
    if (library) return library;
    if (plugin_path(path, sizeof path) < 0) return NULL;
    void *opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!opened)
        return pg_fail(PG_EDEVICE,
                       "cuda: %s; install the library that is missing, or name its folder in "
                       "LD_LIBRARY_PATH",
                       dlerror()),
               NULL;
    int (*abi)(void) = (int (*)(void))dlsym(opened, "pg_cuda_abi");
    if (!abi || abi() != PG_BACKEND_ABI)
        return pg_fail(PG_EDEVICE, "cuda: %s is of another version; build both with make", path),
               NULL;
    return library = opened;
}

/* NULL with the reason in pg_errmsg(). */
static const pg_backend *open_cuda(void) {
    char path[4096];
    if (plugin_path(path, sizeof path) < 0 || ask_driver() < 0) return NULL;
    void *library = load_plugin();
    typedef const pg_backend *(*opener)(int);
    opener open = library ? (opener)dlsym(library, "pg_cuda_open") : NULL;
    return open ? open(PG_BACKEND_ABI) : NULL;
}

void pg_backend_cuda_info(char *text, size_t bytes) {
    void *library = load_plugin();
    typedef void (*teller)(char *, size_t);
    teller versions = library ? (teller)dlsym(library, "pg_cuda_versions") : NULL;
    if (versions) versions(text, bytes);
    else
        snprintf(text, bytes, "CUDA     %s\n",
                 pg_errmsg() + (strncmp(pg_errmsg(), "cuda: ", 6) ? 0 : 6));
}

/* A GPU if one answers.  Where the plug-in is there and none does, rank 0 says
 * so: it was expected. */
static const pg_backend *open_any(void) {
    char path[4096];
    pg_ranks ranks;
    if (plugin_path(path, sizeof path) < 0) return open_cpu();
    const pg_backend *found = open_cuda();
    if (found) return found;
    if (pg_ranks_read(&ranks) == PG_OK && ranks.rank == 0)
        fprintf(stderr, "pgrun: %s; using the CPU\n", pg_errmsg());
    return open_cpu();
}

static const pg_backend *find(const char *name) {
    if (!strcmp(name, "cpu")) return open_cpu();
    if (!strcmp(name, "shape")) return &pg_backend_shape;
    if (!strcmp(name, "cuda")) return open_cuda();
    if (!strcmp(name, "auto")) return open_any();
    pg_fail(PG_EINVAL, "device \"%s\" is unknown; one of auto, cpu, cuda, shape", name);
    return NULL;
}

/* Ranks of a host share its memory, and leave some of it to others.  A GPU is a rank's own; what
 * stays free there is for libraries, their kernels and their workspaces: 4.5 GB of 150. */
static int64_t default_limit(void) {
    int64_t there = device->memory->available();
    if (!device->memory->host_visible) return there / 100 * 97;
    return there / 10 * 9 / pg_ranks_here();
}

int pg_init(const char *name, int64_t memory_limit) {
    if (!name || memory_limit < 0)
        return pg_fail(PG_EINVAL, "init: device name or memory limit is wrong");
    if (device) {
        if (!strcmp(name, "auto") || !strcmp(name, device->name)) return PG_OK;
        return pg_fail(PG_EINVAL, "init: device is %s already; choose before the first tensor",
                       device->name);
    }
    const char *wish = getenv("PG_DEVICE");
    if (wish && *wish && !strcmp(name, "auto")) name = wish;
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
    PG_TRY(pg_capture_bars("sync", "there is nothing to wait for; wait afterwards"));
    const pg_backend *b = pg_backend_now();
    return b ? b->memory->sync() : PG_EDEVICE;
}

void pg_shutdown(void) {
    if (closed) return;
    closed = 1;
    if (device && device->collectives) device->collectives->shutdown();
}

int pg_backend_closed(void) { return closed; }
