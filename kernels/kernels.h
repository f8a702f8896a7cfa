/* kernels.h: the contract of every kernel; kernels.c fills the table for the CPU,
 * kernels.cu for CUDA.
 *
 * A kernel sees raw pointers, sizes, a dtype and a stream (void *, NULL on the CPU); never a
 * tensor.  The core has checked shapes, dtypes and pointers before it calls.  Meaning, formulas and
 * sources stand in runtime/pg.h beside the op of the same name.  bf16 and f16 are computed
 * in f32; sums are kept in double on the CPU.  dtype_w, dtype_y: of an output that may be f32
 * beside bf16 or f16 ("mixed").  `add`: 0 write, 1 add.  Scratch is a block of at
 * least the bytes that the matching *_scratch function asks for; 64-byte aligned. */
#ifndef PG_KERNELS_H
#define PG_KERNELS_H
#include "../runtime/base/status.h"
#include "../runtime/base/types.h"

typedef void *pg_stream;

/* Where element i of a slice lies in the whole: first + (i / cols) * stride + i % cols. */
typedef struct {
    int64_t first, cols, stride;
} pg_index_map;

typedef struct { /* one (possibly batched) matrix product, row major */
    int64_t m, n, k, batch;
    int64_t lda, ldb, ldc;                /* elements between rows as stored */
    int64_t stride_a, stride_b, stride_c; /* elements between batches */
    int dtype, dtype_c, transpose_a, transpose_b, epilogue;
    double alpha, beta;
    const void *bias;               /* [n] dtype, or NULL */
    void *aux;                      /* like c, or NULL */
    const float *scale_a, *scale_b; /* one number in device memory, or NULL */
} pg_gemm_args;

/* The activation by whose slope at aux an epilogue multiplies, or -1.  bias is then NULL, beta 0,
 * and c and aux have no gaps between their rows. */
static inline int pg_epilogue_slope(int epilogue) {
    return epilogue == PG_EPILOGUE_GELU_GRAD        ? PG_GELU
           : epilogue == PG_EPILOGUE_GELU_TANH_GRAD ? PG_GELU_TANH
                                                    : -1;
}

typedef struct { /* strides in elements between rows of the same sample */
    int64_t batch, rows, keys, heads, kv_heads, width; /* B, T, Tk, H, G, K */
    const void *q, *k, *v;
    int64_t q_stride,
        kv_stride; /* row strides; samples follow each other: rows * q_stride, keys * kv_stride */
    double scale;
    int causal, dtype;
    const int32_t *lengths;
    double dropout;
    uint64_t key;
    int64_t sample0, head0, heads_all;
    const double *step;
} pg_attn_args;

typedef struct pg_kernels {
    /* fill, copy, random */
    int (*fill)(void *y, double value, int64_t n, int dtype, pg_stream s);
    int (*cast)(void *y, const void *x, int64_t n, int dtype_y, int dtype_x, pg_stream s);
    int (*random_uniform)(void *y, int64_t n, uint64_t seed, uint64_t key, double low, double high,
                          pg_index_map map, int dtype, pg_stream s);
    int (*random_normal)(void *y, int64_t n, uint64_t seed, uint64_t key, double mean, double std,
                         pg_index_map map, int dtype, pg_stream s);
    /* elementwise; nb divides n: b repeats every nb elements */
    int (*unary)(void *y, const void *x, int64_t n, int kind, int dtype, pg_stream s);
    int (*unary_grad)(void *dx, const void *dy, const void *x, int64_t n, int kind, int add,
                      int dtype, pg_stream s);
    int (*binary)(void *y, const void *a, const void *b, int64_t n, int64_t nb, int kind, int add,
                  int dtype, pg_stream s);
    int (*axpby)(void *y, const void *x, double alpha, double beta, int64_t n, int dtype_y,
                 int dtype, pg_stream s);
    int (*dropout)(void *y, const void *x, int64_t n, double p, const double *step, uint64_t key,
                   pg_index_map map, int add, int dtype, pg_stream s);
    /* matmul */
    int (*gemm)(void *c, const void *a, const void *b, const pg_gemm_args *g, pg_stream s);
    const char *(*gemm_choices)(void); /* NULL, as gemm_adopt, where nothing is chosen */
    int (*gemm_adopt)(const char *text);
    /* norms: x [n,d]; dw, db want scratch.  r and sum NULL: y is the norm of x; else of sum = x +
     * r.  base NULL, or added to the gradient of x */
    int (*rmsnorm)(void *y, void *sum, void *rstd, const void *x, const void *r, const void *w,
                   double eps, int64_t n, int64_t d, int dtype, pg_stream s);
    int64_t (*rmsnorm_grad_scratch)(int64_t n, int64_t d);
    int (*rmsnorm_grad)(void *dx, void *dw, const void *dy, const void *x, const void *w,
                        const void *rstd, const void *base, int64_t n, int64_t d, int add_x,
                        int add_w, void *scratch, int dtype, int dtype_w, pg_stream s);
    int (*layernorm)(void *y, void *sum, void *mean, void *rstd, const void *x, const void *r,
                     const void *w, const void *b, double eps, int64_t n, int64_t d, int dtype,
                     pg_stream s);
    int64_t (*layernorm_grad_scratch)(int64_t n, int64_t d);
    int (*layernorm_grad)(void *dx, void *dw, void *db, const void *dy, const void *x,
                          const void *w, const void *mean, const void *rstd, const void *base,
                          int64_t n, int64_t d, int add_x, int add_w, int add_b, void *scratch,
                          int dtype, int dtype_w, pg_stream s);
    /* attention and positions */
    int (*rope_table)(void *cos, void *sin, double theta, int64_t first, int64_t t, int64_t half,
                      int dtype, pg_stream s);
    /* x [b,t,c]; the first heads * 2 * half columns of a row turn by line start + t of cos, sin */
    int (*rope)(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
                int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add, int dtype,
                pg_stream s);
    int64_t (*attention_scratch)(const pg_attn_args *a);
    int (*attention)(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s);
    int64_t (*attention_grad_scratch)(const pg_attn_args *a);
    /* dq, dk, dv have the strides of q, k, v */
    int (*attention_grad)(void *dq, void *dk, void *dv, const void *dout, const void *out,
                          const void *lse, const pg_attn_args *a, int add, void *scratch,
                          pg_stream s);
    int (*swiglu)(void *y, const void *x, int64_t n, int64_t f, int dtype, pg_stream s);
    int (*swiglu_grad)(void *dx, const void *dy, const void *x, int64_t n, int64_t f, int add,
                       int dtype, pg_stream s);
    /* softmax, embedding, loss: n rows of v (or d) */
    int (*softmax)(void *y, const void *x, int64_t n, int64_t v, int log, int dtype, pg_stream s);
    int (*softmax_grad)(void *dx, const void *dy, const void *y, int64_t n, int64_t v, int log,
                        int add, int dtype, pg_stream s);
    /* index of the first id outside [0,v) (and not `ignore`) or -1; ids i32 or i64; synchronises */
    int64_t (*check_ids)(const void *ids, int64_t n, int64_t v, int64_t ignore, int dtype_ids,
                         pg_stream s);
    /* the table's v rows are those of ids first .. first + v; other ids give
     * zeros, and no gradient */
    int (*embedding)(void *y, const void *table, const void *ids, int64_t n, int64_t d, int64_t v,
                     int64_t first, int dtype, int dtype_ids, pg_stream s);
    int64_t (*embedding_grad_scratch)(int64_t n, int64_t v);
    int (*embedding_grad)(void *dtable, const void *dy, const void *ids, int64_t n, int64_t d,
                          int64_t v, int64_t first, int add, void *scratch, int dtype, int dtype_w,
                          int dtype_ids, pg_stream s);
    int64_t (*cross_entropy_scratch)(int64_t n);
    int (*cross_entropy)(void *out, void *rows, void *lse, const void *logits, const void *targets,
                         int64_t n, int64_t v, int64_t ignore, const double *step, void *scratch,
                         int dtype, int dtype_ids, pg_stream s);
    /* per_row: dloss holds n numbers instead of one.  The columns are ids first .. first + valid,
     * those from valid on get 0; first 0 and valid v: the whole vocabulary */
    int (*cross_entropy_grad)(void *dlogits, const void *dloss, int per_row, const void *logits,
                              const void *targets, const void *lse, const void *out, int64_t n,
                              int64_t v, int64_t first, int64_t valid, int64_t ignore,
                              const double *step, int add, int dtype, int dtype_ids, pg_stream s);
    int (*vocab_stats)(void *stats, const void *logits, const void *targets, int64_t n, int64_t v,
                       int64_t first, int64_t valid, int64_t ignore, int dtype, int dtype_ids,
                       pg_stream s);
    /* parts [r,2,n] of dtype f32 or f64; scratch as cross_entropy_scratch says */
    int (*vocab_loss)(void *out, void *rows, void *lse, const void *parts, const void *targets,
                      int64_t r, int64_t n, int64_t ignore, const double *step, void *scratch,
                      int dtype, int dtype_ids, pg_stream s);
    int64_t (*sample_scratch)(int64_t n, int64_t v);
    int (*sample)(int32_t *ids, const void *logits, int64_t n, int64_t v, double temperature,
                  int64_t top_k, double top_p, uint64_t seed, uint64_t key, int64_t first,
                  void *scratch, int dtype, pg_stream s);
    int (*argmax)(void *ids, const void *x, int64_t n, int64_t v, int dtype, int dtype_ids,
                  pg_stream s);
    /* reductions: x [outer,n,inner], y [outer,inner] */
    int (*reduce)(void *y, const void *x, int kind, int64_t outer, int64_t n, int64_t inner,
                  int add, int dtype_y, int dtype, pg_stream s);
    int (*expand)(void *y, const void *x, double scale, int64_t outer, int64_t n, int64_t inner,
                  int add, int dtype, pg_stream s);
    int (*reduce_grad)(void *dx, const void *dy, const void *x, const void *y, int kind,
                       int64_t outer, int64_t n, int64_t inner, int add, int dtype, pg_stream s);
    /* rearranging: y [outer,ny,inner] and x [outer,nx,inner]; n rows of y from y0 = of x from x0 */
    int (*move)(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx,
                int64_t x0, int64_t n, int64_t inner, int add, int dtype, pg_stream s);
    int (*permute)(void *y, const void *x, int ndim, const int64_t *dims_x, const int32_t *order,
                   int add, int dtype, pg_stream s);
    /* updates */
    /* ends and weights NULL: one run of weight 1 */
    int (*sumsq)(double *step, const void *x, int64_t n, const int64_t *ends, const float *weights,
                 int64_t runs, int dtype, pg_stream s);
    int (*clip)(double *step, double max_norm, pg_stream s);
    int64_t (*count_nonfinite)(const void *x, int64_t n, int dtype, pg_stream s);
    /* dtype_master: PG_I16 or PG_F32; -1 without one */
    int (*adamw)(void *value, void *master, const void *grad, void *m, void *v, int64_t n,
                 const int64_t *ends, const float *factors, int64_t runs, const double *step,
                 double beta1, double beta2, double eps, int dtype, int dtype_master,
                 int dtype_grad, int dtype_m, pg_stream s);
    int (*sgd)(void *value, void *master, const void *grad, void *m, int64_t n, const int64_t *ends,
               const float *factors, int64_t runs, const double *step, double momentum,
               double dampening, int nesterov, int first, int dtype, int dtype_master,
               int dtype_grad, int dtype_m, pg_stream s);
    int (*master_join)(float *out, const void *value, const void *master, int64_t n, int dtype,
                       int dtype_master, pg_stream s);
    int (*master_split)(void *value, void *master, const float *in, int64_t n, int dtype,
                        int dtype_master, pg_stream s);
} pg_kernels;

const pg_kernels *pg_kernels_cpu(void);
#endif
