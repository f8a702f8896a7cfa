/* graph_cudnn.c: descriptors of cuDNN's backend API: the tensors and operations of a graph.
 * Contracts: attention_cudnn.h. */
#include "attention_cudnn.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

int graph_ok(sdpa_graph *g, cudnnStatus_t status, const char *what) {
    if (g->status != CUDNN_STATUS_SUCCESS) return 0;
    if (status == CUDNN_STATUS_SUCCESS) return 1;
    char more[160] = "";
    g->lib->last_error(more, sizeof more);
    g->status = status;
    snprintf(g->failure, sizeof g->failure, "%s: %s%s%.150s", what, g->lib->error_string(status),
             more[0] ? ": " : "", more);
    return 0;
}

void graph_free(sdpa_graph *g) {
    /* newest first: plans before graphs before operations before tensors */
    while (g->n_owned > 0) g->lib->descriptor_free(g->owned[--g->n_owned]);
}

cudnnBackendDescriptor_t graph_new(sdpa_graph *g, cudnnBackendDescriptorType_t type) {
    cudnnBackendDescriptor_t d = NULL;
    if (g->status != CUDNN_STATUS_SUCCESS) return NULL;
    if (g->n_owned == GRAPH_DESCRIPTORS) {
        graph_ok(g, CUDNN_STATUS_INTERNAL_ERROR, "too many descriptors");
        return NULL;
    }
    if (!graph_ok(g, g->lib->descriptor_new(type, &d), "new descriptor")) return NULL;
    return g->owned[g->n_owned++] = d;
}

void graph_set(sdpa_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, int64_t n, const void *values) {
    if (g->status == CUDNN_STATUS_SUCCESS)
        graph_ok(g, g->lib->set(d, name, type, n, values), "describing");
}

void graph_set_desc(sdpa_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                    cudnnBackendDescriptor_t value) {
    graph_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void graph_finalize(sdpa_graph *g, cudnnBackendDescriptor_t d, const char *what) {
    if (g->status == CUDNN_STATUS_SUCCESS) graph_ok(g, g->lib->finalize(d), what);
}

/* ---- tensors ---- */
enum place { IN_MEMORY, INSIDE, BY_VALUE };

static graph_tensor tensor(sdpa_graph *g, enum place place, int64_t number, cudnnDataType_t type,
                           const int64_t dim[4], const int64_t stride[4]) {
    const bool yes = true;
    const int64_t alignment = 16; /* bytes; the least that every engine takes */
    graph_tensor t = {.desc = graph_new(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR)};
    memcpy(t.dim, dim, sizeof t.dim);
    memcpy(t.stride, stride, sizeof t.stride);
    graph_set(g, t.desc, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    graph_set(g, t.desc, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, t.dim);
    graph_set(g, t.desc, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, t.stride);
    graph_set(g, t.desc, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &number);
    graph_set(g, t.desc, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (place == INSIDE)
        graph_set(g, t.desc, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (place == BY_VALUE)
        graph_set(g, t.desc, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    graph_finalize(g, t.desc, "a tensor");
    if (place != INSIDE && g->n_bound < SDPA_TENSORS) g->bound[g->n_bound++] = number;
    return t;
}

graph_tensor graph_memory(sdpa_graph *g, int64_t number, cudnnDataType_t type, dims4 dim,
                          dims4 stride) {
    return tensor(g, IN_MEMORY, number, type, dim.at, stride.at);
}

graph_tensor graph_number(sdpa_graph *g, int64_t number) {
    const int64_t one[4] = {1, 1, 1, 1};
    return tensor(g, BY_VALUE, number, CUDNN_DATA_FLOAT, one, one);
}

graph_tensor graph_virtual(sdpa_graph *g, cudnnDataType_t type, dims4 dim) {
    const int64_t *d = dim.at, stride[4] = {d[1] * d[2] * d[3], d[2] * d[3], d[3], 1};
    return tensor(g, INSIDE, SDPA_VIRTUAL + g->next_virtual++, type, d, stride);
}

graph_tensor graph_like(sdpa_graph *g, cudnnDataType_t type, graph_tensor t) {
    return tensor(g, INSIDE, SDPA_VIRTUAL + g->next_virtual++, type, t.dim, t.stride);
}

/* The same numbers seen with the last two dims exchanged. */
graph_tensor graph_transposed(sdpa_graph *g, cudnnDataType_t type, graph_tensor t) {
    const int64_t dim[4] = {t.dim[0], t.dim[1], t.dim[3], t.dim[2]};
    const int64_t stride[4] = {t.stride[0], t.stride[1], t.stride[3], t.stride[2]};
    return tensor(g, INSIDE, SDPA_VIRTUAL + g->next_virtual++, type, dim, stride);
}

/* ---- operations ---- */
static void add_op(sdpa_graph *g, cudnnBackendDescriptor_t op) {
    graph_finalize(g, op, "an operation");
    if (g->n_ops == GRAPH_OPS) graph_ok(g, CUDNN_STATUS_INTERNAL_ERROR, "too many operations");
    else g->ops[g->n_ops++] = op;
}

void graph_matmul(sdpa_graph *g, graph_tensor a, graph_tensor b, graph_tensor c,
                  const graph_tensor *m, const graph_tensor *n, const graph_tensor *k) {
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t d = graph_new(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    graph_set(g, d, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    graph_finalize(g, d, "a matmul");
    cudnnBackendDescriptor_t op = graph_new(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.desc);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.desc);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.desc);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, d);
    if (m) graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, m->desc);
    if (n) graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, n->desc);
    if (k) graph_set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, k->desc);
    add_op(g, op);
}

void graph_pointwise(sdpa_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute,
                     graph_tensor x, const graph_tensor *b, const graph_tensor *t, graph_tensor y,
                     int64_t axis) {
    cudnnBackendDescriptor_t d = graph_new(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    graph_set(g, d, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    graph_set(g, d, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    if (mode == CUDNN_POINTWISE_GEN_INDEX)
        graph_set(g, d, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    graph_finalize(g, d, "a pointwise operation");
    cudnnBackendDescriptor_t op = graph_new(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, d);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.desc);
    if (b) graph_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b->desc);
    if (t) graph_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t->desc);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.desc);
    add_op(g, op);
}

void graph_reduce(sdpa_graph *g, cudnnReduceTensorOp_t mode, graph_tensor x, graph_tensor y) {
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t d = graph_new(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    graph_set(g, d, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    graph_set(g, d, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    graph_finalize(g, d, "a reduction");
    cudnnBackendDescriptor_t op = graph_new(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, d);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.desc);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.desc);
    add_op(g, op);
}

/* y is x under other dims and strides. */
void graph_reshape(sdpa_graph *g, graph_tensor x, graph_tensor y) {
    cudnnBackendDescriptor_t op = graph_new(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.desc);
    graph_set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.desc);
    add_op(g, op);
}
