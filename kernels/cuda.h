/* cuda.h: the CUDA kernels by name, for kernels.cu and between files.  Contracts: kernels.h.
 *
 * Fit for C and C++: the .cu files and the .c files that call cuBLASLt and cuDNN include it.  The
 * one idea: all calls of a process come from one host thread and go to one stream, so blocks kept
 * between calls (cuda_kept) are never used by two kernels at a time. */
#ifndef PG_CUDA_H
#define PG_CUDA_H
#ifdef __cplusplus
extern "C" {
#endif
#include "kernels.h"

const pg_kernels *pg_kernels_cuda(void);

/* PG_OK if the launches since the last call went well, else a message; does not wait. */
int cuda_launched(const char *op);
/* Code of the CUDA runtime to ours: PG_OK for 0, else PG_EDEVICE "op: what CUDA says". */
int cuda_check(const char *op, int cuda_error);
/* Multiprocessors of the current device, asked once. */
int cuda_sm_count(void);
/* A block of at least `bytes` of device memory that lives as long as the process, for sums between
 * two launches of one call.  It grows at need, which waits for the device, so ask for CUDA_KEPT
 * where that is enough.  NULL + message (PG_EDEVICE). */
#define CUDA_KEPT (4ll << 20) /* bytes */
void *cuda_kept(const char *op, int64_t bytes);

/* ---- fill, random, elementwise, norm, reduce, move, sumsq, adamw, master ---- */
int cuda_fill(void *y, double value, int64_t n, int dtype, pg_stream s);
int cuda_cast(void *y, const void *x, int64_t n, int dtype_y, int dtype_x, pg_stream s);
int cuda_random_uniform(void *y, int64_t n, uint64_t seed, uint64_t key, double low, double high,
                        pg_index_map map, int dtype, pg_stream s);
int cuda_random_normal(void *y, int64_t n, uint64_t seed, uint64_t key, double mean, double std,
                       pg_index_map map, int dtype, pg_stream s);
int cuda_dropout(void *y, const void *x, int64_t n, double p, const double *step, uint64_t key,
                 pg_index_map map, int add, int dtype, pg_stream s);
int cuda_unary(void *y, const void *x, int64_t n, int kind, int dtype, pg_stream s);
int cuda_unary_grad(void *dx, const void *dy, const void *x, int64_t n, int kind, int add,
                    int dtype, pg_stream s);
int cuda_binary(void *y, const void *a, const void *b, int64_t n, int64_t nb, int kind, int add,
                int dtype, pg_stream s);
int cuda_axpby(void *y, const void *x, double alpha, double beta, int64_t n, int dtype_y, int dtype,
               pg_stream s);
int cuda_rmsnorm(void *y, void *sum, void *rstd, const void *x, const void *r, const void *w,
                 double eps, int64_t n, int64_t d, int dtype, pg_stream s);
int64_t cuda_rmsnorm_grad_scratch(int64_t n, int64_t d);
int cuda_rmsnorm_grad(void *dx, void *dw, const void *dy, const void *x, const void *w,
                      const void *rstd, const void *base, int64_t n, int64_t d, int add_x,
                      int add_w, void *scratch, int dtype, int dtype_w, pg_stream s);
int cuda_layernorm(void *y, void *sum, void *mean, void *rstd, const void *x, const void *r,
                   const void *w, const void *b, double eps, int64_t n, int64_t d, int dtype,
                   pg_stream s);
int64_t cuda_layernorm_grad_scratch(int64_t n, int64_t d);
int cuda_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w,
                        const void *mean, const void *rstd, const void *base, int64_t n, int64_t d,
                        int add_x, int add_w, int add_b, void *scratch, int dtype, int dtype_w,
                        pg_stream s);
int cuda_reduce(void *y, const void *x, int kind, int64_t outer, int64_t n, int64_t inner, int add,
                int dtype_y, int dtype, pg_stream s);
int cuda_expand(void *y, const void *x, double scale, int64_t outer, int64_t n, int64_t inner,
                int add, int dtype, pg_stream s);
int cuda_reduce_grad(void *dx, const void *dy, const void *x, const void *y, int kind,
                     int64_t outer, int64_t n, int64_t inner, int add, int dtype, pg_stream s);
int cuda_move(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx, int64_t x0,
              int64_t n, int64_t inner, int add, int dtype, pg_stream s);
int cuda_permute(void *y, const void *x, int ndim, const int64_t *dims_x, const int32_t *order,
                 int add, int dtype, pg_stream s);
int cuda_sumsq(double *step, const void *x, int64_t n, const int64_t *ends, const float *weights,
               int64_t runs, int dtype, pg_stream s);
int cuda_clip(double *step, double max_norm, pg_stream s);
int64_t cuda_count_nonfinite(const void *x, int64_t n, int dtype, pg_stream s);
int cuda_adamw(void *value, void *master, const void *grad, void *m, void *v, int64_t n,
               const int64_t *ends, const float *factors, int64_t runs, const double *step,
               double beta1, double beta2, double eps, int dtype, int dtype_master, int dtype_grad,
               int dtype_m, pg_stream s);
int cuda_sgd(void *value, void *master, const void *grad, void *m, int64_t n, const int64_t *ends,
             const float *factors, int64_t runs, const double *step, double momentum,
             double dampening, int nesterov, int first, int dtype, int dtype_master, int dtype_grad,
             int dtype_m, pg_stream s);
int cuda_master_join(float *out, const void *value, const void *master, int64_t n, int dtype,
                     int dtype_master, pg_stream s);
int cuda_master_split(void *value, void *master, const float *in, int64_t n, int dtype,
                      int dtype_master, pg_stream s);

/* ---- matmul, attention, rope, swiglu, embed, loss, sample ---- */
int cuda_gemm(void *c, const void *a, const void *b, const pg_gemm_args *g, pg_stream s);
const char *cuda_gemm_choices(void);
int cuda_gemm_adopt(const char *text);
int cuda_rope_table(void *cos, void *sin, double theta, int64_t first, int64_t t, int64_t half,
                    int dtype, pg_stream s);
int cuda_rope(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
              int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add, int dtype,
              pg_stream s);
int64_t cuda_attention_scratch(const pg_attn_args *a);
int cuda_attention(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s);
int64_t cuda_attention_grad_scratch(const pg_attn_args *a);
int cuda_attention_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                        const void *lse, const pg_attn_args *a, int add, void *scratch,
                        pg_stream s);
/* 1 if cuDNN serves this call, 0 if our own attention does (tests ask). */
int cuda_attention_by_cudnn(const pg_attn_args *a, int backward);
int64_t cuda_attention_cudnn_version(void); /* as cuDNN counts, 91900; 0: there is none */
/* Our own attention, for every dtype and shape that the core lets through (attention.cu,
 * attention_grad.cu); lse is the natural logarithm, [B,H,T]. */
int64_t cuda_attention_plain_scratch(const pg_attn_args *a);
int cuda_attention_plain(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s);
int64_t cuda_attention_plain_grad_scratch(const pg_attn_args *a);
int cuda_attention_plain_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                              const void *lse, const pg_attn_args *a, int add, void *scratch,
                              pg_stream s);
/* For cuDNN (attention_lengths.cu).  rows_of[b] = rows, or 0 for a sample without keys;
 * keys_of[b] = lengths[b] held in [0,keys]. */
int cuda_attention_lengths(int32_t *rows_of, int32_t *keys_of, const pg_attn_args *a, pg_stream s);
/* x [batch,rows,columns], 2 bytes a number, rows `stride` apart, all whole 16 bytes: zeros in
 * samples without keys.  lse [batch,lse_rows] f32 or NULL: -infinity in them. */
int cuda_attention_empty(void *x, int64_t rows, int64_t columns, int64_t stride, float *lse,
                         int64_t lse_rows, const pg_attn_args *a, pg_stream s);
int cuda_swiglu(void *y, const void *x, int64_t n, int64_t f, int dtype, pg_stream s);
int cuda_swiglu_grad(void *dx, const void *dy, const void *x, int64_t n, int64_t f, int add,
                     int dtype, pg_stream s);
int cuda_softmax(void *y, const void *x, int64_t n, int64_t v, int log, int dtype, pg_stream s);
int cuda_softmax_grad(void *dx, const void *dy, const void *y, int64_t n, int64_t v, int log,
                      int add, int dtype, pg_stream s);
int64_t cuda_check_ids(const void *ids, int64_t n, int64_t v, int64_t ignore, int dtype_ids,
                       pg_stream s);
int cuda_embedding(void *y, const void *table, const void *ids, int64_t n, int64_t d, int64_t v,
                   int64_t first, int dtype, int dtype_ids, pg_stream s);
int64_t cuda_embedding_grad_scratch(int64_t n, int64_t v);
int cuda_embedding_grad(void *dtable, const void *dy, const void *ids, int64_t n, int64_t d,
                        int64_t v, int64_t first, int add, void *scratch, int dtype, int dtype_w,
                        int dtype_ids, pg_stream s);
int64_t cuda_cross_entropy_scratch(int64_t n);
int cuda_cross_entropy(void *out, void *rows, void *lse, const void *logits, const void *targets,
                       int64_t n, int64_t v, int64_t ignore, const double *step, void *scratch,
                       int dtype, int dtype_ids, pg_stream s);
int cuda_cross_entropy_grad(void *dlogits, const void *dloss, int per_row, const void *logits,
                            const void *targets, const void *lse, const void *out, int64_t n,
                            int64_t v, int64_t first, int64_t valid, int64_t ignore,
                            const double *step, int add, int dtype, int dtype_ids, pg_stream s);
int cuda_vocab_stats(void *stats, const void *logits, const void *targets, int64_t n, int64_t v,
                     int64_t first, int64_t valid, int64_t ignore, int dtype, int dtype_ids,
                     pg_stream s);
int cuda_vocab_loss(void *out, void *rows, void *lse, const void *parts, const void *targets,
                    int64_t r, int64_t n, int64_t ignore, const double *step, void *scratch,
                    int dtype, int dtype_ids, pg_stream s);
int64_t cuda_sample_scratch(int64_t n, int64_t v);
int cuda_sample(int32_t *ids, const void *logits, int64_t n, int64_t v, double temperature,
                int64_t top_k, double top_p, uint64_t seed, uint64_t key, int64_t first,
                void *scratch, int dtype, pg_stream s);
int cuda_argmax(void *ids, const void *x, int64_t n, int64_t v, int dtype, int dtype_ids,
                pg_stream s);
#ifdef __cplusplus
}
#endif
#endif
