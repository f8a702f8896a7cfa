/* fake_driver.c: a stand-in for libcuda.so.1 on a machine without a GPU, for tests/cuda/plans.c.
 *
 * cuDNN compiles a plan's kernel for a described device without a GPU, but opens a driver
 * and "loads" the kernel into it.  This one says yes to the load, keeps the kernel's name,
 * and refuses all else. */
#include <stdio.h>

enum { OK = 0, STUB = 34 /* CUDA_ERROR_STUB_LIBRARY */ };

#define REFUSE(name)                                                                               \
    int name(void);                                                                                \
    int name(void) { return STUB; }

REFUSE(cuInit)
REFUSE(cuDeviceGet)
REFUSE(cuDeviceGetCount)
REFUSE(cuDriverGetVersion)
REFUSE(cuGetErrorName)
REFUSE(cuGetErrorString)
REFUSE(cuCtxGetCurrent)
REFUSE(cuCtxGetLimit)
REFUSE(cuCtxPopCurrent)
REFUSE(cuCtxPushCurrent)
REFUSE(cuStreamGetCtx)
REFUSE(cuLinkCreate)
REFUSE(cuLinkAddData)
REFUSE(cuLinkComplete)
REFUSE(cuLinkDestroy)
REFUSE(cuLaunchKernel)
REFUSE(cuLaunchKernelEx)
REFUSE(cuLaunchCooperativeKernel)
REFUSE(cuLibraryLoadFromFile)
REFUSE(cuKernelSetAttribute)
REFUSE(cuKernelGetAttribute)
REFUSE(cuOccupancyMaxPotentialClusterSize)

static char kernels[4096];
static unsigned used;

int cuLibraryLoadData(void **library, const void *code);
int cuLibraryUnload(void *library);
int cuLibraryGetKernel(void **kernel, void *library, const char *name);
const char *fake_driver_kernels(void); /* names loaded since the last call, one a line */

int cuLibraryLoadData(void **library, const void *code) {
    (void)code;
    *library = (void *)1;
    return OK;
}

int cuLibraryUnload(void *library) {
    (void)library;
    return OK;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library;
    *kernel = (void *)1;
    if (used < sizeof kernels)
        used += (unsigned)snprintf(kernels + used, sizeof kernels - used, "%s\n", name);
    return OK;
}

const char *fake_driver_kernels(void) {
    if (!used) kernels[0] = '\0';
    used = 0;
    return kernels;
}
