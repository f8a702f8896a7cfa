/* cuda.c: the CUDA backend: one GPU for the process, its memory, and the door of libpg_cuda.so.
 *
 * Opened by backend.c at the first tensor; nothing here runs before, so a launcher may fork.
 * Numbers between pageable host memory and the device pass through pinned pieces of our own: the
 * caller's memory is free on return, and small writes never wait for the device. */
#include "cuda_device.h"
#include "nccl.h"
#include "ranks.h"

#include <stdlib.h>
#include <string.h>

#define PIECE  (256 << 10) /* bytes; larger pieces gained nothing on paper: 5 us each at 55 GB/s */
#define PIECES 64          /* so many small writes may be on their way */
#define AHEAD  8           /* pieces of a read under way at a time */

cuda_device cuda;

/* The pinned pieces, taken in turns; an event each says when the device has done with it. */
static struct {
    char *base; /* NULL before the first transfer */
    cudaEvent_t done[PIECES];
    int64_t turn;
} staging;

static int stage_open(void) {
    if (staging.base) return PG_OK;
    void *base;
    PG_TRY(cuda_check("pinned memory", cudaMallocHost(&base, (size_t)PIECE * PIECES)));
    for (int i = 0; i < PIECES; i++)
        if (!staging.done[i] && !(staging.done[i] = cuda_event_new())) {
            cudaFreeHost(base);
            return PG_EDEVICE;
        }
    staging.base = base;
    return PG_OK;
}

/* The piece of that turn, once nothing reads or writes it. */
static int stage(char **piece, int64_t turn, const char *op) {
    int i = (int)(turn % PIECES);
    PG_TRY(cuda_wait_event(staging.done[i], op));
    *piece = staging.base + (int64_t)i * PIECE;
    return PG_OK;
}

/* Memory that a script holds is a block of its own, so cudaMalloc; it waits for nothing. */
static void *take(int64_t bytes) {
    void *block;
    if (cudaMalloc(&block, (size_t)bytes) == cudaSuccess) return block;
    (void)cudaGetLastError(); /* the pool says how much was asked, and who holds what */
    return NULL;
}

static void give(void *block, int64_t bytes) {
    (void)bytes;
    (void)cudaFree(block); /* waits for the device itself */
}

static int upload(void *device, const void *host, int64_t bytes, pg_stream s) {
    PG_TRY(stage_open());
    for (int64_t at = 0; at < bytes; at += PIECE) {
        int64_t n = pg_min64(PIECE, bytes - at), turn = staging.turn++;
        char *piece;
        PG_TRY(stage(&piece, turn, "write"));
        memcpy(piece, (const char *)host + at, (size_t)n);
        PG_TRY(cuda_check("write", cudaMemcpyAsync((char *)device + at, piece, (size_t)n,
                                                   cudaMemcpyHostToDevice, s)));
        PG_TRY(cuda_check("write", cudaEventRecord(staging.done[turn % PIECES], s)));
    }
    return PG_OK;
}

/* A few pieces ahead of the host's own copying, so that both move at the same time. */
static int download(void *host, const void *device, int64_t bytes, pg_stream s) {
    PG_TRY(stage_open());
    int64_t asked = 0, first = staging.turn;
    for (int64_t at = 0; at < bytes; at += PIECE) {
        char *piece;
        for (; asked < bytes && asked < at + AHEAD * PIECE; asked += PIECE) {
            int64_t turn = staging.turn++;
            PG_TRY(stage(&piece, turn, "read"));
            PG_TRY(cuda_check("read", cudaMemcpyAsync(piece, (const char *)device + asked,
                                                      (size_t)pg_min64(PIECE, bytes - asked),
                                                      cudaMemcpyDeviceToHost, s)));
            PG_TRY(cuda_check("read", cudaEventRecord(staging.done[turn % PIECES], s)));
        }
        PG_TRY(stage(&piece, first + at / PIECE, "read"));
        memcpy((char *)host + at, piece, (size_t)pg_min64(PIECE, bytes - at));
    }
    return nccl_lost("read");
}

static int copy(void *to, const void *from, int64_t bytes, pg_stream s) {
    if (bytes <= 0 || to == from) return PG_OK;
    return cuda_check("copy",
                      cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, s));
}

static int sync_device(void) {
    PG_TRY(cuda_wait_stream(cuda.stream, "sync"));
    return nccl_lost("sync");
}

static int64_t available(void) {
    size_t left, all;
    if (cudaMemGetInfo(&left, &all) != cudaSuccess) return 0;
    return (int64_t)left / (cuda.shared ? pg_ranks_here() : 1);
}

static int set(void *block, int byte, int64_t bytes) {
    return cuda_check("set", cudaMemsetAsync(block, byte, (size_t)bytes, cuda.stream));
}

const pg_memory_ops cuda_memory = {
    .take = take,
    .give = give,
    .upload = upload,
    .download = download,
    .copy = copy,
    .sync = sync_device,
    .available = available,
    .set = set,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .transfer = cuda_transfer,
    .join = cuda_join,
    .settle = cuda_settle,
    .mark_new = cuda_mark_new,
    .mark_set = cuda_mark_set,
    .mark_read = cuda_mark_read,
    .mark_free = cuda_mark_free,
};

/* ---- opening ---- */

/* A context of its own takes some 500 MiB of the card. */
static int set_device(int number) {
    cudaError_t code = cudaSetDevice(number);
    if (code != cudaErrorMemoryAllocation) return cuda_check("cuda", code);
    (void)cudaGetLastError();
    return pg_fail(PG_ENOMEM,
                   "cuda: GPU %d has no room for one more process; nvidia-smi shows who holds its "
                   "memory: end those, or name another card (CUDA_VISIBLE_DEVICES)",
                   number);
}

/* The local rank picks the GPU.  Ranks beyond the GPUs share one; nccl.c then refuses unless told
 * that they may, since only there the ranks can tell one another what they took. */
static int open_device(void) {
    struct cudaDeviceProp p;
    pg_ranks r;
    PG_TRY(pg_ranks_read(&r));
    PG_TRY(cuda_check("cuda", cudaGetDeviceCount(&cuda.count)));
    if (cuda.count < 1) return pg_fail(PG_EDEVICE, "cuda: the driver shows no GPU");
    const char *text = getenv("PG_SHARE_GPU");
    cuda.shared = text && !strcmp(text, "1");
    cuda.number = r.local_rank % cuda.count;
    PG_TRY(set_device(cuda.number));
    PG_TRY(cuda_check("cuda", cudaGetDeviceProperties(&p, cuda.number)));
    memcpy(cuda.name, p.name, sizeof cuda.name);
    cuda.name[sizeof cuda.name - 1] = 0;
    if (p.major < 8)
        return pg_fail(PG_EDEVICE, "cuda: %s has compute capability %d.%d; 8.0 is the least",
                       cuda.name, p.major, p.minor);
    PG_TRY(cuda_check("cuda", cudaDeviceGetPCIBusId(cuda.bus, sizeof cuda.bus, cuda.number)));
    PG_TRY(cuda_check("cuda", cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking)));
    return cuda_check("cuda", cudaStreamCreateWithFlags(&cuda.copies, cudaStreamNonBlocking));
}

int pg_cuda_abi(void) { return PG_BACKEND_ABI; }

const pg_backend *pg_cuda_open(int abi) {
    static pg_backend backend;
    if (abi != PG_BACKEND_ABI)
        return pg_fail(PG_EDEVICE, "cuda: pgrun is of version %d, libpg_cuda.so of %d", abi,
                       PG_BACKEND_ABI),
               NULL;
    if (!backend.name) {
        if (open_device() < 0) return NULL;
        backend = (pg_backend){.name = "cuda",
                               .memory = &cuda_memory,
                               .kernels = pg_kernels_cuda(),
                               .collectives = &pg_collectives_nccl,
                               .graphs = &cuda_graphs,
                               .stream = (pg_stream)cuda.stream};
    }
    return &backend;
}
