/* plan_cudnn.c: an engine for an attention graph: asked of the heuristics, built, launched.
 *
 * Building a plan compiles a kernel: about half a second, once a shape.  The heuristics'
 * list begins with the engine made for the card (mode A; the fallback list would put an
 * older one first), and the first that builds is taken.  A device description can stand in
 * for the GPU: then all happens but the load of the kernel, so a machine without one can
 * test which kernels we get. */
#include "attention_cudnn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Engines of Hopper's kernels for these graphs; the next in the list make those of Ampere. */
enum { HOPPER_FORWARD = 2, HOPPER_BACKWARD = 6 };

int sdpa_engine_is_hopper(const sdpa_plan *p) {
    return p->engine == (p->shape.backward ? HOPPER_BACKWARD : HOPPER_FORWARD);
}

/* The library's number of the engine in a config; -1 if it does not say. */
static int engine_of(sdpa_graph *g, cudnnBackendDescriptor_t config) {
    cudnnBackendDescriptor_t engine = graph_new(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    int64_t n = 0, number = -1;
    if (!engine ||
        g->lib->get(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n,
                    &engine) != CUDNN_STATUS_SUCCESS ||
        g->lib->get(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &n, &number) !=
            CUDNN_STATUS_SUCCESS)
        return -1;
    return (int)number;
}

/* The heuristics' configs for the graph, best first; 0 and a failure where there is none. */
static int64_t configs_of(sdpa_graph *g, cudnnHandle_t handle, cudnnBackendDescriptor_t device,
                          cudnnBackendDescriptor_t configs[GRAPH_CONFIGS]) {
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    cudnnBackendDescriptor_t graph = graph_new(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph_set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops,
              g->ops);
    if (!device)
        graph_set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    graph_finalize(g, graph, "the graph");
    cudnnBackendDescriptor_t search = graph_new(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    graph_set_desc(g, search, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    graph_set(g, search, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (device) graph_set_desc(g, search, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    graph_finalize(g, search, "no engine knows the graph");
    int64_t count = 0, got = 0;
    if (g->status == CUDNN_STATUS_SUCCESS)
        graph_ok(g,
                 g->lib->get(search, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                             0, &count, NULL),
                 "asking for engines");
    count = pg_min64(count, GRAPH_CONFIGS);
    for (int64_t i = 0; i < count; i++)
        configs[i] = graph_new(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->status == CUDNN_STATUS_SUCCESS)
        graph_ok(g,
                 g->lib->get(search, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                             count, &got, configs),
                 "asking for engines");
    if (g->status == CUDNN_STATUS_SUCCESS && got == 0)
        graph_ok(g, CUDNN_STATUS_NOT_SUPPORTED, "no engine knows the graph");
    return g->status == CUDNN_STATUS_SUCCESS ? got : 0;
}

/* The first config whose plan builds.  What an earlier one said is no failure of the graph. */
static void choose(sdpa_plan *p, cudnnHandle_t handle, cudnnBackendDescriptor_t device) {
    sdpa_graph *g = &p->graph;
    cudnnBackendDescriptor_t configs[GRAPH_CONFIGS];
    int64_t n = configs_of(g, handle, device, configs), got = 0;
    for (int64_t i = 0; i < n; i++) {
        cudnnBackendDescriptor_t plan = graph_new(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        graph_set_desc(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        if (g->status != CUDNN_STATUS_SUCCESS) return;
        cudnnStatus_t status = g->lib->finalize(plan); /* compiles and loads */
        if (status == CUDNN_STATUS_SUCCESS)
            status = g->lib->get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                                 1, &got, &p->workspace);
        p->compiled = device && status == CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER;
        if (status == CUDNN_STATUS_SUCCESS || p->compiled) {
            p->engine = engine_of(g, configs[i]);
            if (!p->compiled) p->plan = plan;
            return;
        }
        if (i + 1 == n) graph_ok(g, status, "no engine's plan builds");
    }
}

int sdpa_plan_new(sdpa_plan **out, const sdpa_shape *shape, cudnnHandle_t handle,
                  cudnnBackendDescriptor_t device) {
    const cudnn_library *lib = cudnn_open();
    if (!lib) return PG_EDEVICE;
    sdpa_plan *p = *out = calloc(1, sizeof *p);
    if (!p) return pg_fail(PG_ENOMEM, "attention: no memory for a plan");
    p->shape = *shape;
    p->engine = -1;
    p->graph.lib = lib;
    if (shape->backward) sdpa_backward(&p->graph, shape);
    else sdpa_forward(&p->graph, shape);
    choose(p, handle, device);
    return PG_OK;
}

void sdpa_plan_free(sdpa_plan *p) {
    if (!p) return;
    graph_free(&p->graph);
    free(p);
}

int sdpa_launch(sdpa_plan *p, cudnnHandle_t handle, void *const pointers[SDPA_TENSORS],
                void *workspace) {
    const cudnn_library *lib = p->graph.lib;
    cudnnBackendDescriptor_t pack = NULL;
    void *bound[SDPA_TENSORS];
    for (int i = 0; i < p->graph.n_bound; i++) bound[i] = pointers[p->graph.bound[i]];
    cudnnStatus_t status = lib->descriptor_new(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (status == CUDNN_STATUS_SUCCESS)
        status = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64,
                          p->graph.n_bound, p->graph.bound);
    if (status == CUDNN_STATUS_SUCCESS)
        status = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
                          p->graph.n_bound, bound);
    if (status == CUDNN_STATUS_SUCCESS)
        status = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1,
                          &workspace);
    if (status == CUDNN_STATUS_SUCCESS) status = lib->finalize(pack);
    if (status == CUDNN_STATUS_SUCCESS) status = lib->execute(handle, p->plan, pack);
    char more[512] = "";
    if (status != CUDNN_STATUS_SUCCESS) lib->last_error(more, sizeof more);
    if (pack) lib->descriptor_free(pack);
    if (status == CUDNN_STATUS_SUCCESS) return PG_OK;
    return pg_fail(PG_EDEVICE, "attention: cuDNN %zu: %s: %s", lib->version(),
                   lib->error_string(status), more);
}
