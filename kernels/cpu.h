/* cpu.h: the CPU kernels by name, for kernels.c, and what they share.  Contracts: kernels.h.
 *
 * Work is cut into pieces whose number follows from the sizes alone, never from the threads, and
 * partial sums are added in the order of the pieces: so any number of threads
 * gives the same bits. */
#ifndef PG_CPU_H
#define PG_CPU_H
#include "kernels.h"

#define CPU_GRAIN 16384 /* elements in one piece of elementwise work: stays in the L1/L2 cache */
#define CPU_MANY  32768 /* from here on a second thread pays for its start */

/* PG_OK for f32 and f64, else a message: the loops know no others.  half.h brings bf16 and f16. */
int cpu_floating(const char *op, int dtype);
/* n numbers of bf16 or f16 to f32, and back to nearest even; by the calling thread alone */
void cpu_widen(float *y, const void *x, int64_t n, int dtype);
void cpu_narrow(void *y, const float *x, int64_t n, int dtype);

/* ---- fill, random, elementwise, norm, reduce, move, adamw ---- */
int cpu_fill(void *y, double value, int64_t n, int dtype, pg_stream s);
int cpu_cast(void *y, const void *x, int64_t n, int dtype_y, int dtype_x, pg_stream s);
/* out[i] = number first + i of the stream, uniform in [0,1) */
void cpu_units(float *out, uint64_t stream, int64_t first, int64_t n);
int cpu_random_uniform(void *y, int64_t n, uint64_t seed, uint64_t key, double low, double high,
                       pg_index_map map, int dtype, pg_stream s);
int cpu_random_normal(void *y, int64_t n, uint64_t seed, uint64_t key, double mean, double std,
                      pg_index_map map, int dtype, pg_stream s);
int cpu_dropout(void *y, const void *x, int64_t n, double p, const double *step, uint64_t key,
                pg_index_map map, int add, int dtype, pg_stream s);
int cpu_unary(void *y, const void *x, int64_t n, int kind, int dtype, pg_stream s);
int cpu_unary_grad(void *dx, const void *dy, const void *x, int64_t n, int kind, int add, int dtype,
                   pg_stream s);
int cpu_binary(void *y, const void *a, const void *b, int64_t n, int64_t nb, int kind, int add,
               int dtype, pg_stream s);
int cpu_axpby(void *y, const void *x, double alpha, double beta, int64_t n, int dtype, pg_stream s);
int cpu_rmsnorm(void *y, void *sum, void *rstd, const void *x, const void *r, const void *w,
                double eps, int64_t n, int64_t d, int dtype, pg_stream s);
int64_t cpu_rmsnorm_grad_scratch(int64_t n, int64_t d);
int cpu_rmsnorm_grad(void *dx, void *dw, const void *dy, const void *x, const void *w,
                     const void *rstd, const void *base, int64_t n, int64_t d, int add_x, int add_w,
                     void *scratch, int dtype, pg_stream s);
int cpu_layernorm(void *y, void *sum, void *mean, void *rstd, const void *x, const void *r,
                  const void *w, const void *b, double eps, int64_t n, int64_t d, int dtype,
                  pg_stream s);
int64_t cpu_layernorm_grad_scratch(int64_t n, int64_t d);
int cpu_layernorm_grad(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w,
                       const void *mean, const void *rstd, const void *base, int64_t n, int64_t d,
                       int add_x, int add_w, int add_b, void *scratch, int dtype, pg_stream s);
int cpu_reduce(void *y, const void *x, int kind, int64_t outer, int64_t n, int64_t inner, int add,
               int dtype, pg_stream s);
int cpu_expand(void *y, const void *x, double scale, int64_t outer, int64_t n, int64_t inner,
               int add, int dtype, pg_stream s);
int cpu_reduce_grad(void *dx, const void *dy, const void *x, const void *y, int kind, int64_t outer,
                    int64_t n, int64_t inner, int add, int dtype, pg_stream s);
int cpu_move(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx, int64_t x0,
             int64_t n, int64_t inner, int add, int dtype, pg_stream s);
int cpu_permute(void *y, const void *x, int ndim, const int64_t *dims_x, const int32_t *order,
                int add, int dtype, pg_stream s);
int cpu_sumsq(double *step, const void *x, int64_t n, const int64_t *ends, const float *weights,
              int64_t runs, int dtype, pg_stream s);
int cpu_clip(double *step, double max_norm, pg_stream s);
int64_t cpu_count_nonfinite(const void *x, int64_t n, int dtype, pg_stream s);
int cpu_adamw(void *value, void *master, const void *grad, void *m, void *v, int64_t n,
              const int64_t *ends, const float *factors, int64_t runs, const double *step,
              double beta1, double beta2, double eps, int dtype, int dtype_master, int dtype_grad,
              int dtype_m, pg_stream s);
int cpu_sgd(void *value, void *master, const void *grad, void *m, int64_t n, const int64_t *ends,
            const float *factors, int64_t runs, const double *step, double momentum,
            double dampening, int nesterov, int first, int dtype, int dtype_master, int dtype_grad,
            int dtype_m, pg_stream s);
int cpu_master_join(float *out, const void *value, const void *master, int64_t n, int dtype,
                    int dtype_master, pg_stream s);
int cpu_master_split(void *value, void *master, const float *in, int64_t n, int dtype,
                     int dtype_master, pg_stream s);

/* ---- matmul, attention, rope, swiglu, embed, loss, sample ---- */
int cpu_gemm(void *c, const void *a, const void *b, const pg_gemm_args *g, pg_stream s);
int cpu_rope_table(void *cos, void *sin, double theta, int64_t first, int64_t t, int64_t half,
                   int dtype, pg_stream s);
int cpu_rope(void *y, const void *x, const void *cos, const void *sin, int64_t b, int64_t t,
             int64_t c, int64_t heads, int64_t half, int64_t start, int sign, int add, int dtype,
             pg_stream s);
int64_t cpu_attention_scratch(const pg_attn_args *a);
int cpu_attention(void *out, void *lse, const pg_attn_args *a, void *scratch, pg_stream s);
int64_t cpu_attention_grad_scratch(const pg_attn_args *a);
int cpu_attention_grad(void *dq, void *dk, void *dv, const void *dout, const void *out,
                       const void *lse, const pg_attn_args *a, int add, void *scratch, pg_stream s);
int cpu_swiglu(void *y, const void *x, int64_t n, int64_t f, int dtype, pg_stream s);
int cpu_swiglu_grad(void *dx, const void *dy, const void *x, int64_t n, int64_t f, int add,
                    int dtype, pg_stream s);
int cpu_softmax(void *y, const void *x, int64_t n, int64_t v, int log, int dtype, pg_stream s);
int cpu_softmax_grad(void *dx, const void *dy, const void *y, int64_t n, int64_t v, int log,
                     int add, int dtype, pg_stream s);
int64_t cpu_check_ids(const void *ids, int64_t n, int64_t v, int64_t ignore, int dtype_ids,
                      pg_stream s);
int cpu_embedding(void *y, const void *table, const void *ids, int64_t n, int64_t d, int64_t v,
                  int64_t first, int dtype, int dtype_ids, pg_stream s);
int64_t cpu_embedding_grad_scratch(int64_t n, int64_t v);
int cpu_embedding_grad(void *dtable, const void *dy, const void *ids, int64_t n, int64_t d,
                       int64_t v, int64_t first, int add, void *scratch, int dtype, int dtype_ids,
                       pg_stream s);
int64_t cpu_cross_entropy_scratch(int64_t n);
int cpu_cross_entropy(void *out, void *rows, void *lse, const void *logits, const void *targets,
                      int64_t n, int64_t v, int64_t ignore, const double *step, void *scratch,
                      int dtype, int dtype_ids, pg_stream s);
int cpu_cross_entropy_grad(void *dlogits, const void *dloss, int per_row, const void *logits,
                           const void *targets, const void *lse, const void *out, int64_t n,
                           int64_t v, int64_t first, int64_t valid, int64_t ignore,
                           const double *step, int add, int dtype, int dtype_ids, pg_stream s);
int cpu_vocab_stats(void *stats, const void *logits, const void *targets, int64_t n, int64_t v,
                    int64_t first, int64_t valid, int64_t ignore, int dtype, int dtype_ids,
                    pg_stream s);
int cpu_vocab_loss(void *out, void *rows, void *lse, const void *parts, const void *targets,
                   int64_t r, int64_t n, int64_t ignore, const double *step, void *scratch,
                   int dtype, int dtype_ids, pg_stream s);
int64_t cpu_sample_scratch(int64_t n, int64_t v);
int cpu_sample(int32_t *ids, const void *logits, int64_t n, int64_t v, double temperature,
               int64_t top_k, double top_p, uint64_t seed, uint64_t key, int64_t first,
               void *scratch, int dtype, pg_stream s);
int cpu_argmax(void *ids, const void *x, int64_t n, int64_t v, int dtype, int dtype_ids,
               pg_stream s);
#endif
