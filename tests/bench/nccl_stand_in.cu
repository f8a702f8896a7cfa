/* nccl_stand_in.cu: NCCL for one rank of two, on one card (one_of_two.sh).
 *
 * Each call takes the time, the blocks and the traffic in memory that it would between two cards,
 * and brings numbers of the right size that otherwise mean nothing; the other rank only sleeps.  So
 * the speed of a layout, and what a change to its overlap is worth, is seen where no second card is.
 *   STAND_IN_GB_S        of one direction (300, as NCCL has it by NVLink); 0: calls cost nothing
 *   STAND_IN_BLOCK_GB_S  of it, by one block (21)
 *   STAND_IN_US          before the first byte (15) */
#include <cuda_runtime.h>
#include <nccl.h>
#include <stdlib.h>

struct ncclComm {
    int rank, size, blocks;
};

#define THREADS   512
#define SHARED    (90 << 10)  /* bytes of a block of NCCL's: no product runs beside it */
#define SLICE     (64 << 10)  /* bytes that are worth a block */
#define SOMETHING 0x3c80bc80u /* in bf16 twice 0.016: a row of zeros would make norms explode */

static __device__ unsigned something(unsigned x) { return x ? x : SOMETHING; }

/* n times 16 bytes, to one or two places, in no less than `ns`. */
static __global__ void travel(const uint4 *from, uint4 *to, uint4 *also, size_t n, long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride) {
        uint4 v = from[i];
        v = make_uint4(something(v.x), something(v.y), something(v.z), something(v.w));
        if (to) to[i] = v;
        if (also) also[i] = v;
    }
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while ((long)(now - start) < ns);
}

static double setting(const char *name, double usual) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : usual;
}

static size_t width(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 4;
    }
}

static void copy(void *to, const void *from, size_t bytes, cudaStream_t s) {
    if (to && to != from) cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, s);
}

/* `bytes` from here to one or two places, while `sent` bytes go to the other rank. */
static ncclResult_t move(const void *from, void *to, void *also, size_t bytes, size_t sent,
                         ncclComm_t c, cudaStream_t s) {
    double gb_s = setting("STAND_IN_GB_S", 300);
    double block_gb_s = setting("STAND_IN_BLOCK_GB_S", 21), us = setting("STAND_IN_US", 15);
    size_t all = (size_t)from | (size_t)to | (size_t)also | bytes;
    int blocks = sent / SLICE + 1 < (size_t)c->blocks ? (int)(sent / SLICE) + 1 : c->blocks;
    if (c->size == 1 || gb_s <= 0 || all % 16) {
        copy(to, from, bytes, s);
        copy(also, from, bytes, s);
        bytes = 0;
    }
    if (c->size > 1 && gb_s > 0) {
        double rate = blocks * block_gb_s < gb_s ? blocks * block_gb_s : gb_s;
        cudaFuncSetAttribute(travel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
        travel<<<blocks, THREADS, SHARED, s>>>((const uint4 *)from, (uint4 *)to, (uint4 *)also,
                                               bytes / 16, (long)(us * 1e3 + (double)sent / rate));
    }
    return cudaGetLastError() == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    *id = ncclUniqueId{};
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId, int rank,
                                    ncclConfig_t *wish) {
    const int usual = 32;
    int most = wish->maxCTAs > 0 && wish->maxCTAs < usual ? wish->maxCTAs : usual;
    *out = (ncclComm_t)malloc(sizeof **out);
    if (!*out) return ncclSystemError;
    **out = ncclComm{rank, size, (int)setting("NCCL_MAX_CTAS", most)};
    return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    free(c);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) { return ncclCommDestroy(c); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *r) {
    *r = ncclSuccess;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t) { return "an error of CUDA"; }
const char *ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t c, cudaStream_t s) {
    size_t bytes = n * width(type);
    return move(in, out, NULL, bytes, bytes, c, s);
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t c,
                           cudaStream_t s) {
    size_t bytes = n * width(type);
    char *own = (char *)out + (size_t)c->rank * bytes;
    char *other = c->size > 1 ? (char *)out + (size_t)(1 - c->rank) * bytes : NULL;
    return move(in, own == in ? NULL : own, other, bytes, bytes, c, s);
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t n, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t c, cudaStream_t s) {
    size_t bytes = n * width(type);
    return move((const char *)in + (size_t)c->rank * bytes, out, NULL, bytes, bytes, c, s);
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t n, ncclDataType_t type, int,
                           ncclComm_t c, cudaStream_t s) {
    size_t bytes = n * width(type);
    return move(in, out, NULL, bytes, bytes, c, s);
}

/* What is received is what was last sent, where that was as much: of the same kind, so to speak. */
static const void *last_sent;
static size_t last_bytes;

ncclResult_t ncclSend(const void *in, size_t n, ncclDataType_t type, int, ncclComm_t c,
                      cudaStream_t s) {
    last_sent = in;
    last_bytes = n * width(type);
    return move(NULL, NULL, NULL, 0, last_bytes, c, s);
}
ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t type, int, ncclComm_t c, cudaStream_t s) {
    size_t bytes = n * width(type);
    if (bytes == last_bytes) return move(last_sent, out, NULL, bytes, bytes, c, s);
    cudaMemsetAsync(out, 0, bytes, s);
    return move(NULL, NULL, NULL, 0, bytes, c, s);
}

} /* extern "C" */
