/* cuda_host.c: pinned host buffers (pg_host of pg.h): the device reads and writes them by itself,
 * on a stream of copies beside the kernels.
 *
 * A transfer starts after all work asked for before it, and work asked for after cuda_join sees it.
 * What lies between the two is free to overlap: start the transfer, ask for a step, join. */
#include "cuda_device.h"
#include "nccl.h"

#include <stdlib.h>

typedef struct {
    void *data;
    cudaEvent_t done; /* its last transfer */
} pinned;

int cuda_pin(void **out, void **data, int64_t bytes) {
    pinned *p = calloc(1, sizeof *p);
    if (!p) return pg_fail(PG_ENOMEM, "host buffer: no memory for its handle");
    cudaError_t e = cudaHostAlloc(&p->data, (size_t)pg_max64(bytes, 1), cudaHostAllocDefault);
    if (e != cudaSuccess) (void)cudaGetLastError();
    int rc = e == cudaSuccess ? PG_OK
             : e == cudaErrorMemoryAllocation
                 ? pg_fail(PG_ENOMEM, "host buffer: %lld bytes of pinned memory are not to be had",
                           (long long)bytes)
                 : cuda_check("host buffer", e);
    if (rc == PG_OK && !(p->done = cuda_event_new())) rc = PG_EDEVICE;
    if (rc < 0) {
        if (p->data) cudaFreeHost(p->data);
        free(p);
        return rc;
    }
    *data = p->data;
    *out = p;
    return PG_OK;
}

void cuda_unpin(void *buffer) {
    pinned *p = buffer;
    (void)cudaEventSynchronize(p->done);
    (void)cudaEventDestroy(p->done);
    (void)cudaFreeHost(p->data);
    free(p);
}

int cuda_transfer(void *buffer, void *device, void *host, int64_t bytes, int to_device) {
    pinned *p = buffer;
    PG_TRY(cuda_follow(cuda.copies, cuda.stream, "transfer"));
    PG_TRY(cuda_check(
        "transfer",
        cudaMemcpyAsync(to_device ? device : host, to_device ? host : device, (size_t)bytes,
                        to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, cuda.copies)));
    return cuda_check("transfer", cudaEventRecord(p->done, cuda.copies));
}

int cuda_join(void *buffer) {
    return cuda_check("transfer", cudaStreamWaitEvent(cuda.stream, ((pinned *)buffer)->done, 0));
}

int cuda_settle(void *buffer) {
    PG_TRY(cuda_wait_event(((pinned *)buffer)->done, "transfer"));
    return nccl_lost("transfer");
}
