/* nccl_api.c: libnccl.so.2, opened when the first rank joins others; and its errors in words. */
#include "nccl.h"

#include <dlfcn.h>
#include <stdio.h>

static void *library(void) {
    static void *opened;
    if (!opened) opened = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    return opened;
}

int nccl_load(void) {
    void *from = library();
    if (!from)
        return pg_fail(PG_EDEVICE,
                       "nccl: ranks on GPUs need NCCL: %s; install it, put libnccl.so.2 beside "
                       "libpg_cuda.so, or use --device cpu",
                       dlerror());
#define LOAD(name)                                                                                 \
    if (!(nccl.call.name = (__typeof__(nccl##name) *)dlsym(from, "nccl" #name)))                   \
        return pg_fail(PG_EDEVICE,                                                                 \
                       "nccl: libnccl.so.2 has no nccl" #name "; 2.18 or later is needed");
    NCCL_FUNCTIONS(LOAD)
#undef LOAD
    return PG_OK;
}

int nccl_version(void) {
    int version = 0;
    void *from = library();
    __typeof__(ncclGetVersion) *get =
        from ? (__typeof__(ncclGetVersion) *)dlsym(from, "ncclGetVersion") : NULL;
    return get && get(&version) == ncclSuccess ? version : 0;
}

int nccl_error(const char *op, const char *group, ncclResult_t r, ncclComm_t comm) {
    const char *last = nccl.call.GetLastError(comm);
    return pg_fail(PG_ECOMM, "%s (%s): NCCL: %s%s%s%s", op, group, nccl.call.GetErrorString(r),
                   last && *last ? "; " : "", last ? last : "",
                   r == ncclRemoteError || r == ncclSystemError ? "; NCCL_DEBUG=WARN tells more"
                                                                : "");
}
