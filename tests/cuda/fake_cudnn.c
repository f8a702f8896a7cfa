/* fake_cudnn.c: attention under kernels/attention_cudnn.c on the host; see fake.h.
 *
 * Stands in for plan_cudnn.c (a "plan" computes with the CPU's kernel what its shape
 * says, and fills its workspace with NaN to the last byte), for the kernels around it,
 * and for our own attention. */
#include "../../kernels/attention_cudnn.h"
#include "fake.h"

#include <math.h>

static size_t version(void) { return 91900; }
static cudnnStatus_t create(cudnnHandle_t *h) {
    *h = malloc(1);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t set_stream(cudnnHandle_t h, cudaStream_t s) {
    (void)h, (void)s;
    return CUDNN_STATUS_SUCCESS;
}
static const cudnn_library library = {
    .version = version, .create = create, .set_stream = set_stream};
const cudnn_library *cudnn_open(void) { return &library; }

/* ---- attention in f64 on numbers of any dtype ---- */
typedef struct { /* a tensor of rows: its numbers as doubles */
    void *data;
    double *numbers;
    int64_t rows, columns, stride;
    int dtype;
} rows;

static rows gather(const void *data, int64_t n, int64_t columns, int64_t stride, int dtype,
                   int filled) {
    rows r = {(void *)data, fake_doubles(NULL, n * stride, PG_F64), n, columns, stride, dtype};
    for (int64_t i = 0; i < n && filled && data; i++)
        fake_numbers(r.numbers + i * stride, (const char *)data + i * stride * pg_dtype_size(dtype),
                     columns, dtype);
    return r;
}
static void scatter(rows r) {
    for (int64_t i = 0; i < r.rows && r.data; i++)
        fake_round((char *)r.data + i * r.stride * pg_dtype_size(r.dtype), r.numbers + i * r.stride,
                   r.columns, r.dtype);
}

static int real(int dtype) { return dtype == PG_F64 ? PG_F64 : PG_F32; }

static void attend(void *out, void *lse, const pg_attn_args *a) {
    int64_t H = a->heads * a->width, G = a->kv_heads * a->width, n = a->batch * a->rows;
    int64_t m = a->batch * a->keys;
    rows q = gather(a->q, n, H, a->q_stride, a->dtype, 1), o = gather(out, n, H, H, a->dtype, 0);
    rows k = gather(a->k, m, G, a->kv_stride, a->dtype, 1);
    rows v = gather(a->v, m, G, a->kv_stride, a->dtype, 1);
    rows l = gather(lse, n * a->heads, 1, 1, real(a->dtype), 0);
    pg_attn_args in = *a;
    in.q = q.numbers, in.k = k.numbers, in.v = v.numbers, in.dtype = PG_F64;
    void *scratch = malloc((size_t)pg_kernels_cpu()->attention_scratch(&in) + 1);
    if (!scratch || pg_kernels_cpu()->attention(o.numbers, l.numbers, &in, scratch, NULL)) abort();
    scatter(o), scatter(l);
    free(scratch), free(q.numbers), free(k.numbers), free(v.numbers), free(o.numbers);
    free(l.numbers);
}

/* dx has strides of its own: computed beside each other, then put in place. */
static void slopes(void *const dx[3], int64_t dq_stride, int64_t dkv_stride, const void *dout,
                   const void *out, const void *lse, const pg_attn_args *a, int add) {
    int64_t H = a->heads * a->width, G = a->kv_heads * a->width, n = a->batch * a->rows;
    int64_t m = a->batch * a->keys;
    rows q = gather(a->q, n, H, a->q_stride, a->dtype, 1), o = gather(out, n, H, H, a->dtype, 1);
    rows k = gather(a->k, m, G, a->kv_stride, a->dtype, 1);
    rows v = gather(a->v, m, G, a->kv_stride, a->dtype, 1);
    rows d = gather(dout, n, H, H, a->dtype, 1),
         l = gather(lse, n * a->heads, 1, 1, real(a->dtype), 1);
    pg_attn_args in = *a;
    in.q = q.numbers, in.k = k.numbers, in.v = v.numbers, in.dtype = PG_F64;
    rows to[3] = {gather(dx[0], n, H, dq_stride, a->dtype, add),
                  gather(dx[1], m, G, dkv_stride, a->dtype, add),
                  gather(dx[2], m, G, dkv_stride, a->dtype, add)};
    double *got[3] = {fake_doubles(NULL, n * a->q_stride, PG_F64),
                      fake_doubles(NULL, m * a->kv_stride, PG_F64),
                      fake_doubles(NULL, m * a->kv_stride, PG_F64)};
    void *scratch = malloc((size_t)pg_kernels_cpu()->attention_grad_scratch(&in) + 1);
    if (!scratch || pg_kernels_cpu()->attention_grad(got[0], got[1], got[2], d.numbers, o.numbers,
                                                     l.numbers, &in, 0, scratch, NULL))
        abort();
    for (int i = 0; i < 3; i++) {
        int64_t from = i ? a->kv_stride : a->q_stride;
        for (int64_t r = 0; r < to[i].rows; r++)
            for (int64_t c = 0; c < to[i].columns; c++)
                to[i].numbers[r * to[i].stride + c] += got[i][r * from + c];
        scatter(to[i]);
        free(to[i].numbers), free(got[i]);
    }
    free(scratch), free(q.numbers), free(k.numbers), free(v.numbers), free(o.numbers);
    free(d.numbers), free(l.numbers);
}

/* ---- plan_cudnn.c ---- */
int sdpa_engine_is_hopper(const sdpa_plan *p) { return p->engine == 2; }

int sdpa_plan_new(sdpa_plan **out, const sdpa_shape *shape, cudnnHandle_t handle,
                  cudnnBackendDescriptor_t device) {
    (void)handle, (void)device;
    sdpa_plan *p = *out = calloc(1, sizeof *p);
    p->shape = *shape;
    p->graph.lib = &library;
    p->plan = p;
    p->workspace = 1000;
    p->engine = 2;
    return PG_OK;
}

static void check_lengths(const sdpa_shape *s, const int32_t *rows_of, const int32_t *keys_of) {
    for (int64_t b = 0; b < s->batch; b++)
        if (keys_of[b] < 0 || keys_of[b] > s->keys || rows_of[b] != (keys_of[b] ? s->rows : 0))
            abort();
}

/* What cuDNN leaves in samples without keys is not ours to rely on. */
static void spoil_empty(const sdpa_shape *s, const int32_t *keys_of, void *x, int64_t n,
                        int64_t columns, int64_t stride, int64_t size) {
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t i = 0; i < n && s->lengths && keys_of[b] == 0; i++)
            memset((char *)x + (b * n + i) * stride * size, 0xff, (size_t)(columns * size));
}

int sdpa_launch(sdpa_plan *p, cudnnHandle_t handle, void *const t[SDPA_TENSORS], void *workspace) {
    (void)handle;
    const sdpa_shape *s = &p->shape;
    const int64_t H = s->heads * s->width, G = s->kv_heads * s->width;
    pg_attn_args a = {.batch = s->batch,
                      .rows = s->rows,
                      .keys = s->keys,
                      .heads = s->heads,
                      .kv_heads = s->kv_heads,
                      .width = s->width,
                      .q = t[SDPA_Q],
                      .k = t[SDPA_K],
                      .v = t[SDPA_V],
                      .q_stride = s->q_stride,
                      .kv_stride = s->kv_stride,
                      .scale = (double)*(float *)t[SDPA_SCALE],
                      .causal = (int)s->causal,
                      .dtype = (int)s->dtype,
                      .heads_all = s->heads};
    if (*(float *)t[SDPA_NEG_INF] != -INFINITY || *(float *)t[SDPA_ONE] != 1) abort();
    memset(workspace, 0xff, (size_t)p->workspace);
    if (s->lengths) {
        check_lengths(s, t[SDPA_ROWS], t[SDPA_KEYS]);
        a.lengths = t[SDPA_KEYS];
    }
    if (!s->backward) {
        attend(t[SDPA_OUT], t[SDPA_STATS], &a);
        spoil_empty(s, t[SDPA_KEYS], t[SDPA_OUT], s->rows, H, H, 2);
        spoil_empty(s, t[SDPA_KEYS], t[SDPA_STATS], s->heads * s->rows, 1, 1, 4);
        return PG_OK;
    }
    int64_t per_row = s->batch * s->heads * s->rows * (int64_t)sizeof(float);
    memset(t[SDPA_DELTA], 0xff, (size_t)per_row);
    if (!s->deterministic) memset(t[SDPA_DQ_SUM], 0xff, (size_t)(per_row * s->width));
    if (s->lengths) check_lengths(s, t[SDPA_ROWS], t[SDPA_KEYS]); /* still whole */
    void *const dx[3] = {t[SDPA_DQ], t[SDPA_DK], t[SDPA_DV]};
    slopes(dx, s->dq_stride, s->dkv_stride, t[SDPA_DOUT], t[SDPA_OUT], t[SDPA_STATS], &a, 0);
    spoil_empty(s, t[SDPA_KEYS], dx[0], s->rows, H, s->dq_stride, 2);
    spoil_empty(s, t[SDPA_KEYS], dx[1], s->keys, G, s->dkv_stride, 2);
    spoil_empty(s, t[SDPA_KEYS], dx[2], s->keys, G, s->dkv_stride, 2);
    return PG_OK;
}

/* ---- kernels/attention_lengths.cu, move.cu, attention.cu ---- */
int cuda_attention_lengths(int32_t *rows_of, int32_t *keys_of, const pg_attn_args *a, pg_stream s) {
    (void)s;
    for (int64_t b = 0; b < a->batch; b++) {
        keys_of[b] = (int32_t)pg_max64(0, pg_min64(a->lengths[b], a->keys));
        rows_of[b] = keys_of[b] ? (int32_t)a->rows : 0;
    }
    return PG_OK;
}

int cuda_attention_empty(void *x, int64_t n, int64_t columns, int64_t stride, float *lse,
                         int64_t lse_rows, const pg_attn_args *a, pg_stream s) {
    (void)s;
    for (int64_t b = 0; b < a->batch; b++) {
        if (a->lengths[b] > 0) continue;
        for (int64_t i = 0; i < n; i++)
            memset((char *)x + 2 * (b * n + i) * stride, 0, (size_t)(2 * columns));
        for (int64_t i = 0; i < lse_rows && lse; i++) lse[b * lse_rows + i] = -INFINITY;
    }
    return PG_OK;
}

int cuda_move(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx, int64_t x0,
              int64_t n, int64_t inner, int add, int dtype, pg_stream s) {
    (void)s;
    rows from = gather((const char *)x + x0 * inner * pg_dtype_size(dtype), outer, n * inner,
                       nx * inner, dtype, 1);
    rows to = gather((char *)y + y0 * inner * pg_dtype_size(dtype), outer, n * inner, ny * inner,
                     dtype, add);
    for (int64_t r = 0; r < outer; r++)
        for (int64_t c = 0; c < n * inner; c++)
            to.numbers[r * to.stride + c] += from.numbers[r * from.stride + c];
    scatter(to);
    free(from.numbers), free(to.numbers);
    return PG_OK;
}

int64_t cuda_attention_plain_scratch(const pg_attn_args *a) {
    (void)a;
    return 0;
}
int64_t cuda_attention_plain_grad_scratch(const pg_attn_args *a) { return (void)a, 0; }

int cuda_attention_plain(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s) {
    (void)scratch, (void)s;
    attend(out, lse, a);
    return PG_OK;
}

int cuda_attention_plain_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                              const void *lse, const pg_attn_args *a, int add, void *scratch,
                              pg_stream s) {
    (void)scratch, (void)s;
    void *const dx[3] = {dq, dk, dv};
    slopes(dx, a->q_stride, a->kv_stride, dout, out, lse, a, add);
    return PG_OK;
}
