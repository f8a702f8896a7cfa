/* attention_cudnn.c: attention on the GPU: cuDNN's fused kernels where they serve, else our own.
 *
 * Both keep lse as the natural logarithm in f32 [B,H,T], so forward and backward of one call may
 * come from different hands.  cuDNN serves f16 and bf16 without dropout; usable_cudnn.c lists what
 * else it is not asked for, and why.  A shape's plan is made when its scratch is
 * asked for, and lives as long as the process.  Scratch: the plan's workspace, then sums, then
 * lengths, each on a 256-byte border. */
#include "attention_cudnn.h"
#include "../runtime/base/settings.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BUCKETS = 256 };

static struct { /* of the process: one device, one stream */
    cudnnHandle_t handle;
    cudaStream_t stream;
    int failed; /* there is no cuDNN here */
    int hopper; /* the card's compute capability is 9.x */
    sdpa_plan *buckets[BUCKETS];
} dnn;

static int aligned(const void *p) { return ((uintptr_t)p & 15) == 0; }

/* cuDNN started on the current device; NULL where it is not there. */
static cudnnHandle_t started(void) {
    int device = 0, major = 0;
    if (dnn.handle || dnn.failed) return dnn.handle;
    const cudnn_library *lib = cudnn_open();
    if (!lib || lib->create(&dnn.handle) != CUDNN_STATUS_SUCCESS) {
        dnn.handle = NULL;
        dnn.failed = 1;
        return NULL;
    }
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    dnn.hopper = major == 9;
    return dnn.handle;
}

/* ---- plans ---- */
static sdpa_shape shape_of(const pg_attn_args *a, int backward, int apart) {
    int64_t H = a->heads * a->width, G = a->kv_heads * a->width;
    return (sdpa_shape){.batch = a->batch,
                        .rows = a->rows,
                        .keys = a->keys,
                        .heads = a->heads,
                        .kv_heads = a->kv_heads,
                        .width = a->width,
                        .q_stride = a->q_stride,
                        .kv_stride = a->kv_stride,
                        .dq_stride = !backward ? 0
                                     : apart   ? H
                                               : a->q_stride,
                        .dkv_stride = !backward ? 0
                                      : apart   ? G
                                                : a->kv_stride,
                        .dtype = a->dtype,
                        .causal = a->causal != 0,
                        .lengths = a->lengths != NULL,
                        .deterministic = backward && pg_wants_deterministic(),
                        .backward = backward};
}

static void warn_if_slow(const sdpa_plan *p) {
    const sdpa_shape *s = &p->shape;
    if (!dnn.hopper || sdpa_engine_is_hopper(p)) return;
    fprintf(stderr,
            "pgrun: attention%s [%lld,%lld] x [%lld], %lld heads of %lld: cuDNN %zu took engine "
            "%d, not its Hopper kernel; expect a fraction of the speed\n",
            s->backward ? "_grad" : "", (long long)s->batch, (long long)s->rows, (long long)s->keys,
            (long long)s->heads, (long long)s->width, p->graph.lib->version(), p->engine);
}

/* The plan of a shape, or NULL where cuDNN has none. */
static sdpa_plan *plan_of(const sdpa_shape *shape) {
    sdpa_plan **bucket = &dnn.buckets[pg_hash(shape, sizeof *shape, 0) % BUCKETS], *p;
    for (p = *bucket; p; p = p->next)
        if (!memcmp(&p->shape, shape, sizeof *shape)) return p->plan ? p : NULL;
    if (sdpa_plan_new(&p, shape, dnn.handle, NULL) < 0) return NULL;
    p->next = *bucket;
    *bucket = p;
    if (p->plan) warn_if_slow(p);
    return p->plan ? p : NULL;
}

/* The plan for a call, or NULL: then our own kernels serve.  apart: gradients go to tensors of
 * their own, without the columns of others between. */
static sdpa_plan *plan_for(const pg_attn_args *a, int backward, int apart) {
    const char *why;
    int half = a->dtype == PG_BF16 || a->dtype == PG_F16; /* others do not start cuDNN */
    if (!half || !started()) return NULL;
    if (!cudnn_attention_usable(a, backward, cudnn_open()->version(), &why)) return NULL;
    sdpa_shape shape = shape_of(a, backward, apart);
    return plan_of(&shape);
}

int cuda_attention_by_cudnn(const pg_attn_args *a, int backward) {
    return plan_for(a, backward != 0, 0) != NULL;
}

int64_t cuda_attention_cudnn_version(void) {
    return started() ? (int64_t)cudnn_open()->version() : 0;
}

/* ---- scratch ---- */
typedef struct { /* bytes from its start */
    int64_t delta, sum, rows, keys, end;
} layout;

static int64_t whole(int64_t bytes) { return (bytes + 255) / 256 * 256; }

static layout layout_of(const sdpa_plan *p) {
    const sdpa_shape *s = &p->shape;
    int64_t per_row = s->batch * s->heads * s->rows * (int64_t)sizeof(float);
    layout l = {.delta = whole(p->workspace)};
    l.sum = l.delta + (s->backward ? whole(per_row) : 0);
    l.rows = l.sum + (s->backward && !s->deterministic ? whole(per_row * s->width) : 0);
    l.keys = l.rows + (s->lengths ? whole(s->batch * (int64_t)sizeof(int32_t)) : 0);
    l.end = l.keys + (s->lengths ? whole(s->batch * (int64_t)sizeof(int32_t)) : 0);
    return l;
}

int64_t cuda_attention_scratch(const pg_attn_args *a) {
    sdpa_plan *p = plan_for(a, 0, 0);
    return pg_max64(p ? layout_of(p).end : 0, cuda_attention_plain_scratch(a));
}

int64_t cuda_attention_grad_scratch(const pg_attn_args *a) {
    sdpa_plan *p = plan_for(a, 1, 0);
    return pg_max64(p ? layout_of(p).end : 0, cuda_attention_plain_grad_scratch(a));
}

/* ---- running ---- */
static int run(sdpa_plan *p, void **tensors, const pg_attn_args *a, void *scratch, pg_stream s) {
    float scale = (float)a->scale, neg_inf = -INFINITY, one = 1;
    layout l = layout_of(p);
    char *at = scratch;
    if (dnn.stream != s || !s) {
        if (p->graph.lib->set_stream(dnn.handle, s) != CUDNN_STATUS_SUCCESS)
            return pg_fail(PG_EDEVICE, "attention: cuDNN refuses the stream");
        dnn.stream = s;
    }
    tensors[SDPA_Q] = (void *)a->q, tensors[SDPA_K] = (void *)a->k, tensors[SDPA_V] = (void *)a->v;
    tensors[SDPA_SCALE] = &scale, tensors[SDPA_NEG_INF] = &neg_inf, tensors[SDPA_ONE] = &one;
    tensors[SDPA_DELTA] = at + l.delta, tensors[SDPA_DQ_SUM] = at + l.sum;
    tensors[SDPA_ROWS] = at + l.rows, tensors[SDPA_KEYS] = at + l.keys;
    if (a->lengths) PG_TRY(cuda_attention_lengths(tensors[SDPA_ROWS], tensors[SDPA_KEYS], a, s));
    return sdpa_launch(p, dnn.handle, tensors, scratch);
}

int cuda_attention(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s) {
    sdpa_plan *p = aligned(out) ? plan_for(a, 0, 0) : NULL;
    if (!p) return cuda_attention_plain(out, lse, a, scratch, s);
    void *tensors[SDPA_TENSORS] = {[SDPA_OUT] = out, [SDPA_STATS] = lse};
    int64_t row = a->heads * a->width;
    PG_TRY(run(p, tensors, a, scratch, s));
    return a->lengths ? cuda_attention_empty(out, a->rows, row, row, lse, a->heads * a->rows, a, s)
                      : PG_OK;
}

static int zero_empty(void *const dx[3], const sdpa_shape *shape, const pg_attn_args *a,
                      pg_stream s) {
    int64_t columns = a->heads * a->width, kv_columns = a->kv_heads * a->width;
    if (!a->lengths) return PG_OK;
    PG_TRY(cuda_attention_empty(dx[0], a->rows, columns, shape->dq_stride, NULL, 0, a, s));
    PG_TRY(cuda_attention_empty(dx[1], a->keys, kv_columns, shape->dkv_stride, NULL, 0, a, s));
    return cuda_attention_empty(dx[2], a->keys, kv_columns, shape->dkv_stride, NULL, 0, a, s);
}

/* Gradients that must be added, or some of which are not wanted: to a block for the moment, then to
 * their places.  A row there has `stride` / K heads. */
static int by_detour(sdpa_plan *p, void **tensors, void *const to[3], const pg_attn_args *a,
                     int add, void *scratch, pg_stream s) {
    int64_t K = a->width, half = pg_dtype_size(a->dtype);
    int64_t rows[3] = {a->batch * a->rows, a->batch * a->keys, a->batch * a->keys};
    int64_t heads[3] = {a->heads, a->kv_heads, a->kv_heads};
    int64_t strides[3] = {a->q_stride / K, a->kv_stride / K, a->kv_stride / K}, bytes = 0;
    char *block = NULL;
    void *from[3];
    for (int i = 0; i < 3; i++) bytes += whole(rows[i] * heads[i] * K * half);
    if (cudaMallocAsync((void **)&block, (size_t)bytes, s) != cudaSuccess) {
        cudaGetLastError();
        return pg_fail(PG_ENOMEM,
                       "attention_grad: %lld bytes for gradients to be added; ask for "
                       "all of dq, dk, dv and do not add",
                       (long long)bytes);
    }
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        from[i] = block + at;
        tensors[SDPA_DQ + i] = from[i];
        at += whole(rows[i] * heads[i] * K * half);
    }
    int rc = run(p, tensors, a, scratch, s);
    if (rc == PG_OK) rc = zero_empty(from, &p->shape, a, s);
    for (int i = 0; i < 3 && rc == PG_OK; i++)
        if (to[i])
            rc = cuda_move(to[i], from[i], rows[i], strides[i], 0, heads[i], 0, heads[i], K, add,
                           a->dtype, s);
    cudaFreeAsync(block, s);
    return rc;
}

int cuda_attention_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                        const void *lse, const pg_attn_args *a, int add, void *scratch,
                        pg_stream s) {
    void *const to[3] = {dq, dk, dv};
    int detour = add || !dq || !dk || !dv;
    int even = aligned(dout) && aligned(out) && aligned(dq) && aligned(dk) && aligned(dv);
    sdpa_plan *direct = even ? plan_for(a, 1, 0) : NULL, *p = direct;
    if (direct && detour) { /* the scratch at hand was measured for the direct one */
        p = plan_for(a, 1, 1);
        if (p && layout_of(p).end > layout_of(direct).end) p = NULL;
    }
    if (!p) return cuda_attention_plain_grad(dq, dk, dv, dout, out, lse, a, add, scratch, s);
    void *tensors[SDPA_TENSORS] = {[SDPA_DOUT] = (void *)dout,
                                   [SDPA_OUT] = (void *)out,
                                   [SDPA_STATS] = (void *)lse,
                                   [SDPA_DQ] = dq,
                                   [SDPA_DK] = dk,
                                   [SDPA_DV] = dv};
    if (detour) return by_detour(p, tensors, to, a, add, scratch, s);
    PG_TRY(run(p, tensors, a, scratch, s));
    return zero_empty(to, &p->shape, a, s);
}
