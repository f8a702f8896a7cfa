/* cuda_graph.c: graphs: what the stream is given is recorded, and launched as a whole.
 *
 * In the relaxed mode: the pool may then ask for blocks (cudaMalloc), and a kernel that is met for
 * the first time may be loaded; in the others a thread that records may do neither.  What would
 * wait for the stream, or be done at once and so be missing in the graph, the core refuses.  A
 * recording that something has broken is found out when it ends. */
#include "cuda_device.h"

static int begin(void) {
    return cuda_check("graph", cudaStreamBeginCapture(cuda.stream, cudaStreamCaptureModeRelaxed));
}

static int end(void **graph) {
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t ready = NULL;
    cudaError_t e = cudaStreamEndCapture(cuda.stream, &recorded);
    if (e == cudaSuccess && graph) e = cudaGraphInstantiateWithFlags(&ready, recorded, 0);
    if (recorded) (void)cudaGraphDestroy(recorded);
    (void)cudaGetLastError(); /* told here; the next launch is not to blame */
    if (!graph) return PG_OK;
    *graph = ready;
    return cuda_check("graph", e);
}

static int launch(void *graph) {
    return cuda_check("graph", cudaGraphLaunch((cudaGraphExec_t)graph, cuda.stream));
}

/* One that runs is destroyed when it is through. */
static void release(void *graph) {
    if (graph) (void)cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

const pg_graph_ops cuda_graphs = {.begin = begin, .end = end, .launch = launch, .free = release};
