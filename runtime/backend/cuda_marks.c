/* cuda_marks.c: moments on the GPU's own clock (pg_marks of pg.h): timed events on the one stream
 * of kernels.  A record costs the device about a microsecond and the host nothing but the call.
 * The clock ticks in half microseconds (CUDA runtime API, cudaEventElapsedTime). */
#include "cuda_device.h"
#include "nccl.h"

int cuda_mark_new(void **mark) {
    cudaEvent_t e;
    PG_TRY(cuda_check("mark", cudaEventCreate(&e)));
    *mark = e;
    return PG_OK;
}

int cuda_mark_set(void *mark) {
    return cuda_check("mark", cudaEventRecord((cudaEvent_t)mark, cuda.stream));
}

int cuda_mark_read(double *seconds, void *from, void *to) {
    float ms;
    PG_TRY(cuda_wait_event((cudaEvent_t)from, "mark"));
    PG_TRY(cuda_wait_event((cudaEvent_t)to, "mark"));
    PG_TRY(nccl_lost("mark"));
    PG_TRY(cuda_check("mark", cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to)));
    *seconds = ms / 1e3;
    return PG_OK;
}

void cuda_mark_free(void *mark) { (void)cudaEventDestroy((cudaEvent_t)mark); }
