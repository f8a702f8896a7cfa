/* cuda_device.h: what the files of the CUDA backend share: the one device and the host's waiting.
 *
 *   cuda.c        the table of backend.h; opening the device; memory
 *   cuda_graph.c  graphs: work recorded and launched as a whole
 *   cuda_host.c   pinned buffers that the device reads and writes by itself
 *   cuda_marks.c  moments on the device's clock
 *   cuda_wait.c   how the host waits; what was found, for `pgrun --version`
 *   nccl*.c       collectives between GPUs (nccl.h)
 *
 * The one idea: everything a process computes goes to one stream, in the order in which it was
 * asked for; other streams (copies, each group of ranks) meet it by events.  The host waits only
 * for numbers that it wants to see. */
#ifndef PG_CUDA_DEVICE_H
#define PG_CUDA_DEVICE_H
#include <cuda_runtime_api.h>

#include "../../kernels/cuda.h"
#include "../base/status.h"
#include "backend.h"

/* The process's device; set once by pg_cuda_open. */
typedef struct {
    int number, count;   /* of the visible ones */
    int shared;          /* PG_SHARE_GPU=1: several ranks may take it; for tests */
    cudaStream_t stream; /* all kernels */
    cudaStream_t copies; /* cuda_host.c */
    char name[256];      /* "NVIDIA H200" */
    char bus[32];        /* PCI address: tells two devices of a host apart */
} cuda_device;
extern cuda_device cuda;

/* What backend.c looks for in libpg_cuda.so. */
int pg_cuda_abi(void);
const pg_backend *pg_cuda_open(int abi); /* NULL + message */
void pg_cuda_versions(char *text, size_t bytes);

extern const pg_memory_ops cuda_memory;
extern const pg_graph_ops cuda_graphs; /* cuda_graph.c */
extern const pg_collective_ops pg_collectives_nccl;

/* cuda_host.c: fields of cuda_memory */
int cuda_pin(void **pinned, void **data, int64_t bytes);
void cuda_unpin(void *pinned);
int cuda_transfer(void *pinned, void *device, void *host, int64_t bytes, int to_device);
int cuda_join(void *pinned);
int cuda_settle(void *pinned);

/* cuda_marks.c: more fields of it */
int cuda_mark_new(void **mark);
int cuda_mark_set(void *mark);
int cuda_mark_read(double *seconds, void *from, void *to);
void cuda_mark_free(void *mark);

/* cuda_wait.c.  The host waits; an interrupt or a broken group of ranks ends it. */
int cuda_wait_stream(cudaStream_t s, const char *op);
int cuda_wait_event(cudaEvent_t e, const char *op);
/* `to` waits for what `from` was given so far; the host does not. */
int cuda_follow(cudaStream_t to, cudaStream_t from, const char *op);
cudaEvent_t cuda_event_new(void); /* NULL + message */
#endif
