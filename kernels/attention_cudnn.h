/* attention_cudnn.h: what the files of cuDNN's fused attention share.
 *
 *   attention_cudnn.c  the table's entries: cuDNN where it serves, else our own kernels
 *   usable_cudnn.c     which calls it serves
 *   plan_cudnn.c       an engine for a graph, its launch, one plan a shape
 *   sdpa_cudnn.c       the two graphs, node by node
 *   graph_cudnn.c      descriptors: tensors and operations of a graph
 *   library_cudnn.c    libcudnn.so.9, opened at the first use
 *   attention_lengths.cu  lengths as cuDNN wants them; samples of length 0
 *
 * cuDNN has no causal attention as such before 9.21: one describes it as a graph of matmuls,
 * pointwise operations and reductions, and an engine that knows the pattern makes one kernel of it.
 * A graph that is nearly right is often accepted and slow or wrong, so the order of nodes, the
 * types of the values between them and the transposed operands are part of the pattern: change
 * nothing without the plans' test. */
#ifndef PG_ATTENTION_CUDNN_H
#define PG_ATTENTION_CUDNN_H
#include <cudnn.h>
#include "cuda.h"

/* Functions of the library, found by name: the plug-in loads where cuDNN is missing. */
typedef struct {
    __typeof__(cudnnGetVersion) *version;
    __typeof__(cudnnCreate) *create;
    __typeof__(cudnnSetStream) *set_stream;
    __typeof__(cudnnGetErrorString) *error_string;
    __typeof__(cudnnGetLastErrorString) *last_error;
    __typeof__(cudnnBackendCreateDescriptor) *descriptor_new;
    __typeof__(cudnnBackendDestroyDescriptor) *descriptor_free;
    __typeof__(cudnnBackendSetAttribute) *set;
    __typeof__(cudnnBackendGetAttribute) *get;
    __typeof__(cudnnBackendFinalize) *finalize;
    __typeof__(cudnnBackendExecute) *execute;
} cudnn_library;

/* NULL + message where it cannot be opened; asked once. */
const cudnn_library *cudnn_open(void);

/* ---- what a plan depends on; strides in elements between rows ---- */
typedef struct {
    int64_t batch, rows, keys, heads, kv_heads, width;
    int64_t q_stride, kv_stride, dq_stride, dkv_stride;
    int64_t dtype, causal, lengths, deterministic, backward; /* yes or no but the first */
} sdpa_shape;

/* Tensors in memory and numbers passed by value, by their number in a graph. */
enum sdpa_tensor {
    SDPA_NONE,
    SDPA_Q,
    SDPA_K,
    SDPA_V,
    SDPA_OUT,
    SDPA_STATS,
    SDPA_DOUT,
    SDPA_DQ,
    SDPA_DK,
    SDPA_DV,
    SDPA_DQ_SUM,
    SDPA_DELTA,
    SDPA_ROWS,
    SDPA_KEYS, /* i32 [B]: rows and keys of each sample */
    SDPA_SCALE,
    SDPA_NEG_INF,
    SDPA_ONE, /* host floats */
    SDPA_TENSORS,
    SDPA_VIRTUAL = 100 /* from here on: values inside the kernel */
};

/* ---- graph_cudnn.c ----
 * A graph owns its descriptors.  The first failure stays in `status`; everything after it does
 * nothing, so one look at the end is enough. */
enum { GRAPH_DESCRIPTORS = 256, GRAPH_OPS = 40, GRAPH_CONFIGS = 32 };

typedef struct {
    const cudnn_library *lib;
    cudnnStatus_t status;
    char failure[256];
    cudnnBackendDescriptor_t owned[GRAPH_DESCRIPTORS], ops[GRAPH_OPS];
    int n_owned, n_ops;
    int64_t next_virtual;
    int64_t bound[SDPA_TENSORS]; /* numbers of the tensors that a launch must give */
    int n_bound;
} sdpa_graph;

typedef struct {
    cudnnBackendDescriptor_t desc;
    int64_t dim[4], stride[4];
} graph_tensor;

void graph_free(sdpa_graph *g);
cudnnBackendDescriptor_t graph_new(sdpa_graph *g, cudnnBackendDescriptorType_t type);
void graph_set(sdpa_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, int64_t n, const void *values);
void graph_set_desc(sdpa_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                    cudnnBackendDescriptor_t value);
/* Remembers the first failure and what was tried; 1 if all went well so far. */
int graph_ok(sdpa_graph *g, cudnnStatus_t status, const char *what);
void graph_finalize(sdpa_graph *g, cudnnBackendDescriptor_t d, const char *what);

typedef struct {
    int64_t at[4];
} dims4;
graph_tensor graph_memory(sdpa_graph *g, int64_t number, cudnnDataType_t type, dims4 dim,
                          dims4 stride);
graph_tensor graph_number(sdpa_graph *g, int64_t number);
graph_tensor graph_virtual(sdpa_graph *g, cudnnDataType_t type, dims4 dim); /* row major */
graph_tensor graph_like(sdpa_graph *g, cudnnDataType_t type, graph_tensor t);
graph_tensor graph_transposed(sdpa_graph *g, cudnnDataType_t type, graph_tensor t);
/* c = a b.  m, n, k: NULL, or the sample's true size in an i32 tensor. */
void graph_matmul(sdpa_graph *g, graph_tensor a, graph_tensor b, graph_tensor c,
                  const graph_tensor *m, const graph_tensor *n, const graph_tensor *k);
/* y = mode(x [, b [, t]]); BINARY_SELECT is t ? x : b; axis for GEN_INDEX alone. */
void graph_pointwise(sdpa_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute,
                     graph_tensor x, const graph_tensor *b, const graph_tensor *t, graph_tensor y,
                     int64_t axis);
void graph_reduce(sdpa_graph *g, cudnnReduceTensorOp_t mode, graph_tensor x, graph_tensor y);
void graph_reshape(sdpa_graph *g, graph_tensor x, graph_tensor y);

/* ---- sdpa_cudnn.c ---- */
void sdpa_forward(sdpa_graph *g, const sdpa_shape *s);
void sdpa_backward(sdpa_graph *g, const sdpa_shape *s);

/* ---- plan_cudnn.c ---- */
typedef struct sdpa_plan {
    sdpa_shape shape;
    sdpa_graph graph;
    cudnnBackendDescriptor_t plan; /* NULL: no engine; graph.failure says why */
    int64_t workspace;             /* bytes */
    int engine;                    /* -1: none */
    int compiled;                  /* a plan for a described device that no driver loads */
    struct sdpa_plan *next;
} sdpa_plan;

/* On a handle, or (device not NULL) for a device description, without any GPU. */
int sdpa_plan_new(sdpa_plan **out, const sdpa_shape *shape, cudnnHandle_t handle,
                  cudnnBackendDescriptor_t device);
void sdpa_plan_free(sdpa_plan *p);
/* 1 if that engine number is the one that makes Hopper's own kernels (cuDNN 9.11 to 9.19). */
int sdpa_engine_is_hopper(const sdpa_plan *p);
/* pointers: by sdpa_tensor. */
int sdpa_launch(sdpa_plan *p, cudnnHandle_t handle, void *const pointers[SDPA_TENSORS],
                void *workspace);

/* ---- usable_cudnn.c ---- */
/* 1 if cuDNN serves this call; else 0 and the reason (one that is known
 * without building a plan). */
int cudnn_attention_usable(const pg_attn_args *a, int backward, size_t version, const char **why);
#endif
