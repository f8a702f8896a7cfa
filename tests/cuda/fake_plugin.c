/* fake_plugin.c: libpg_cuda.so on the host: memory, events, and a table of our gemm and attention;
 * see fake.h. */
#include <cuda_runtime_api.h>
#include "../../runtime/backend/backend.h"
#include "fake.h"

int fake_timing;

/* ---- the CUDA runtime, as far as our C files call it ---- */
cudaError_t cudaMalloc(void **p, size_t bytes) {
    *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (*p) memset(*p, 0xff, bytes);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p) { return free(p), cudaSuccess; }
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t s) {
    (void)s;
    return cudaMalloc(p, bytes);
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) {
    (void)s;
    return cudaFree(p);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    (void)kind, (void)s;
    return memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    (void)device;
    return strcpy(p->name, "no card"), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
    (void)name, (void)device;
    return *value = 9, cudaSuccess;
}

/* An event holds the second it was recorded in.  Runs between two of them are trials. */
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = calloc(1, sizeof(double));
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) { return free(e), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    (void)s;
    *(double *)(void *)e = pg_time();
    fake_timing = !fake_timing;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    (void)e;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(1e3 * (*(double *)(void *)to - *(double *)(void *)from));
    return cudaSuccess;
}

/* ---- the backend ---- */
static void *take(int64_t bytes) {
    void *p;
    return cudaMalloc(&p, (size_t)bytes) == cudaSuccess ? p : NULL;
}
static void give(void *block, int64_t bytes) {
    (void)bytes;
    free(block);
}
static int upload(void *device, const void *host, int64_t bytes, pg_stream s) {
    (void)s;
    return memcpy(device, host, (size_t)bytes), PG_OK;
}

static const pg_memory_ops memory = {.take = take,
                                     .give = give,
                                     .upload = upload,
                                     .download = upload,
                                     .copy = upload,
                                     .host_visible = 1};
static const pg_kernels kernels = {.gemm = cuda_gemm,
                                   .gemm_choices = cuda_gemm_choices,
                                   .gemm_adopt = cuda_gemm_adopt,
                                   .attention_scratch = cuda_attention_scratch,
                                   .attention = cuda_attention,
                                   .attention_grad_scratch = cuda_attention_grad_scratch,
                                   .attention_grad = cuda_attention_grad};
static const pg_backend backend = {.name = "cuda", .memory = &memory, .kernels = &kernels};

int pg_cuda_abi(void);
const pg_backend *pg_cuda_open(int abi);
int pg_cuda_abi(void) { return pg_abi(); }
const pg_backend *pg_cuda_open(int abi) { return abi == pg_abi() ? &backend : NULL; }
