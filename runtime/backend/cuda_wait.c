/* cuda_wait.c: how the host waits for the device, and what is said of it by `pgrun --version`.
 *
 * The host asks again and again instead of blocking in the driver, which no signal could end: first
 * without a pause, for answers that come within microseconds, then with naps.  A collective whose
 * peer is gone would never end; nccl_watch.c breaks it, and the wait with it. */
#include "cuda_device.h"
#include "nccl.h"
#include "page.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define SPIN 300000ll    /* ns without naps */
#define NAP  20000l      /* ns */
#define TOLD 100000000ll /* ns until the status page says that we wait */

static int wait_for(cudaStream_t s, cudaEvent_t e, const char *op) {
    int64_t start = 0;
    int told = 0, code = PG_OK;
    for (;;) {
        cudaError_t now = e ? cudaEventQuery(e) : cudaStreamQuery(s);
        if (now == cudaSuccess) break;
        if (now != cudaErrorNotReady) {
            code = cuda_check(op, now);
            break;
        }
        if (pg_interrupted()) {
            code = pg_fail(PG_EINTR, "interrupted");
            break;
        }
        int64_t clock = pg_page_clock();
        if (!start) start = clock;
        if (clock - start > TOLD && !told) told = nccl_tell_waiting();
        if (clock - start > SPIN) nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
    }
    if (told) nccl_tell_running();
    return code;
}

int cuda_wait_stream(cudaStream_t s, const char *op) { return wait_for(s, NULL, op); }
int cuda_wait_event(cudaEvent_t e, const char *op) { return wait_for(NULL, e, op); }

cudaEvent_t cuda_event_new(void) {
    cudaEvent_t e;
    if (cuda_check("event", cudaEventCreateWithFlags(&e, cudaEventDisableTiming)) < 0) return NULL;
    return e;
}

int cuda_follow(cudaStream_t to, cudaStream_t from, const char *op) {
    static cudaEvent_t mark; /* a wait keeps the record it was given, so one event serves all */
    if (!mark && !(mark = cuda_event_new())) return PG_EDEVICE;
    PG_TRY(cuda_check(op, cudaEventRecord(mark, from)));
    return cuda_check(op, cudaStreamWaitEvent(to, mark, 0));
}

/* ---- what was found ---- */

static void add(char *text, size_t bytes, const char *name, const char *value) {
    size_t used = strlen(text);
    if (used < bytes) snprintf(text + used, bytes - used, "%-8s %s\n", name, value);
}

static void add_version(char *text, size_t bytes, const char *name, int version, int major,
                        int minor) {
    char value[64] = "not found";
    if (version > 0)
        snprintf(value, sizeof value, "%d.%d.%d", version / major, version % major / minor,
                 minor > 1 ? version % minor : 0);
    add(text, bytes, name, value);
}

static int cudnn_version(void) {
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    size_t (*version)(void) = library ? (size_t(*)(void))dlsym(library, "cudnnGetVersion") : NULL;
    return version ? (int)version() : 0;
}

/* "name value" lines; works without a GPU.  Opens no device. */
void pg_cuda_versions(char *text, size_t bytes) {
    int version = 0, count = 0;
    text[0] = 0;
    if (cudaDriverGetVersion(&version) != cudaSuccess) version = 0;
    add_version(text, bytes, "driver", version, 1000, 10); /* the CUDA version it can serve */
    if (cudaRuntimeGetVersion(&version) != cudaSuccess) version = 0;
    add_version(text, bytes, "CUDA", version, 1000, 10);
    add_version(text, bytes, "cuBLASLt", (int)cublasLtGetVersion(), 10000, 100);
    add_version(text, bytes, "cuDNN", cudnn_version(), 10000, 100);
    add_version(text, bytes, "NCCL", nccl_version(), 10000, 100);
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    for (int i = 0; i < count; i++) {
        struct cudaDeviceProp p;
        char name[16], value[360];
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
        snprintf(name, sizeof name, "GPU %d", i);
        snprintf(value, sizeof value, "%s, %.0f GiB, sm_%d%d", p.name,
                 (double)p.totalGlobalMem / 1073741824.0, p.major, p.minor);
        add(text, bytes, name, value);
    }
    if (!count) add(text, bytes, "GPU", "none answers");
    (void)cudaGetLastError();
}
