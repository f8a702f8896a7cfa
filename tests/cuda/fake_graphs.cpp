// fake_graphs.cpp: libpg_cuda.so of the host's own kernels, with graphs that are real: while one is
// recorded a kernel does nothing but note its arguments, and a launch runs what was noted, with the
// addresses and scalars of then.  So what pg_graph_* and pg.graph promise is tested without a GPU: memory
// that is handed on, ids, gradients that are added, numbers the host brought (tests/journey/graphs.sh).
// What may not happen while recording ends the process.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
extern "C" {
#include "../../runtime/backend/backend.h"
#include "../../runtime/pg.h"
}

using work = std::vector<std::function<void()>>;
static work *notes; // being recorded, or NULL
static const pg_kernels *host;

[[noreturn]] static void caught(const char *what) {
    fprintf(stderr, "fake_graphs: %s while a graph is recorded\n", what);
    abort();
}

// What a call is given, as it must be kept until it is done: structs of the caller's are copied.
template <class A> struct kept {
    A value;
    explicit kept(A a) : value(a) {}
    A get() const { return value; }
};
template <> struct kept<const pg_gemm_args *> {
    pg_gemm_args value;
    explicit kept(const pg_gemm_args *a) : value(*a) {}
    const pg_gemm_args *get() const { return &value; }
};
template <> struct kept<const pg_attn_args *> {
    pg_attn_args value;
    explicit kept(const pg_attn_args *a) : value(*a) {}
    const pg_attn_args *get() const { return &value; }
};

template <auto M> struct noted;
template <class... A, int (*pg_kernels::*M)(A...)> struct noted<M> {
    template <class... K> static std::function<void()> later(K... k) {
        return [=] { (host->*M)(k.get()...); };
    }
    static int call(A... a) {
        if (!notes) return (host->*M)(a...);
        notes->push_back(later(kept<A>(a)...));
        return PG_OK;
    }
};

// dims and order lie in the caller's memory.
static int permute(void *y, const void *x, int n, const int64_t *dims, const int32_t *order, int add, int dtype,
                   pg_stream s) {
    if (!notes) return host->permute(y, x, n, dims, order, add, dtype, s);
    std::vector<int64_t> d(dims, dims + n);
    std::vector<int32_t> o(order, order + n);
    notes->push_back([=] { host->permute(y, x, n, d.data(), o.data(), add, dtype, s); });
    return PG_OK;
}

static int64_t check_ids(const void *ids, int64_t n, int64_t v, int64_t ignore, int dtype, pg_stream s) {
    if (notes) caught("ids are checked");
    return host->check_ids(ids, n, v, ignore, dtype, s);
}

static int64_t count_nonfinite(const void *x, int64_t n, int dtype, pg_stream s) {
    if (notes) caught("numbers are counted");
    return host->count_nonfinite(x, n, dtype, s);
}

// ---- memory ----
static void *take(int64_t bytes) {
    void *p = aligned_alloc(256, ((size_t)bytes + 255) / 256 * 256);
    if (p) memset(p, 0xff, (size_t)bytes); // numbers that nobody wrote are NaN
    return p;
}
static void give(void *p, int64_t) {
    if (notes) caught("a block is given back");
    free(p);
}
static int upload(void *to, const void *from, int64_t bytes, pg_stream) {
    if (notes) caught("something is written");
    return memcpy(to, from, (size_t)bytes), PG_OK;
}
static int download(void *to, const void *from, int64_t bytes, pg_stream) {
    if (notes) caught("something is read");
    return memcpy(to, from, (size_t)bytes), PG_OK;
}
static int copy(void *to, const void *from, int64_t bytes, pg_stream) {
    if (bytes <= 0) return PG_OK;
    if (notes) notes->push_back([=] { memmove(to, from, (size_t)bytes); });
    else memmove(to, from, (size_t)bytes);
    return PG_OK;
}
static int sync_device() {
    if (notes) caught("the device is waited for");
    return PG_OK;
}
static int64_t available() { return (int64_t)1 << 32; }
static int set(void *p, int byte, int64_t bytes) {
    if (notes) caught("a block is filled");
    return memset(p, byte, (size_t)bytes), PG_OK;
}

// ---- marks: on a clock of its own, so that they count from the first, as a device's do ----
static int mark_new(void **mark) { return *mark = new double(0), PG_OK; }
static int mark_set(void *mark) {
    if (notes) caught("a moment is marked");
    return *(double *)mark = pg_time(), PG_OK;
}
static int mark_read(double *seconds, void *from, void *to) {
    return *seconds = *(double *)to - *(double *)from, PG_OK;
}
static void mark_free(void *mark) { delete (double *)mark; }

// ---- graphs ----
static int begin() {
    if (notes) caught("another begins");
    notes = new work;
    return PG_OK;
}
static int end(void **graph) {
    if (graph) *graph = notes;
    else delete notes;
    notes = NULL;
    return PG_OK;
}
static int launch(void *graph) {
    for (auto &f : *(work *)graph) f();
    return PG_OK;
}
static void release(void *graph) {
    if (notes) caught("a graph is freed");
    delete (work *)graph;
}

#define NOTED(name) table.name = noted<&pg_kernels::name>::call
static const pg_kernels *kernels() {
    static pg_kernels table;
    table = *(host = pg_kernels_cpu());
    NOTED(fill), NOTED(cast), NOTED(random_uniform), NOTED(random_normal), NOTED(unary), NOTED(unary_grad);
    NOTED(binary), NOTED(axpby), NOTED(dropout), NOTED(gemm), NOTED(rmsnorm), NOTED(rmsnorm_grad);
    NOTED(layernorm), NOTED(layernorm_grad), NOTED(rope_table), NOTED(rope), NOTED(attention);
    NOTED(attention_grad), NOTED(swiglu), NOTED(swiglu_grad), NOTED(softmax), NOTED(softmax_grad);
    NOTED(embedding), NOTED(embedding_grad), NOTED(cross_entropy), NOTED(cross_entropy_grad);
    NOTED(vocab_stats), NOTED(vocab_loss), NOTED(sample), NOTED(argmax), NOTED(reduce), NOTED(expand);
    NOTED(reduce_grad), NOTED(move), NOTED(sumsq), NOTED(clip), NOTED(adamw), NOTED(sgd);
    NOTED(master_join), NOTED(master_split);
    table.permute = permute, table.check_ids = check_ids, table.count_nonfinite = count_nonfinite;
    return &table;
}

extern "C" {
int pg_cuda_abi(void);
const pg_backend *pg_cuda_open(int abi);
int pg_cuda_abi(void) { return pg_abi(); }
const pg_backend *pg_cuda_open(int abi) {
    static const pg_memory_ops memory = [] {
        pg_memory_ops m = {};
        m.take = take, m.give = give, m.upload = upload, m.download = download, m.copy = copy;
        m.sync = sync_device, m.available = available, m.set = set;
        m.mark_new = mark_new, m.mark_set = mark_set, m.mark_read = mark_read, m.mark_free = mark_free;
        return m;
    }();
    static const pg_graph_ops graphs = {begin, end, launch, release};
    static pg_backend backend;
    backend.name = "cuda", backend.memory = &memory, backend.kernels = kernels(), backend.graphs = &graphs;
    return abi == pg_abi() ? &backend : NULL;
}
// The driver that says a GPU is there; this file is also libcuda.so.1.
int cuInit(unsigned);
int cuDeviceGetCount(int *);
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
}
