/* pg.h: the door between C and Lua, and the whole C API of pgrun.
 *
 * C includes this file; Lua's FFI reads its text with the '#' lines taken out, so it holds no
 * macros and no conditionals but the guard.  Below this line nobody knows Lua; above it nobody
 * knows which backend (cpu, cuda or shape) runs.
 *
 * Conventions.  Every function that can fail returns PG_OK (0), or a negative code whose text waits
 * in pg_errmsg(), one per thread.  Outputs come first, then inputs, then scalars.  Ops never
 * allocate: the caller brings the outputs.  Tensors are contiguous.  Letters: B batch, T time,
 * D width, H heads, G key/value heads, K head width, F hidden width, V vocabulary, N rows.
 * "add": 0 writes the output, 1 adds to it; an output of a _grad op may be NULL: not wanted.
 * "floating" means f32, f64, bf16 or f16, the same for all tensors of a call unless said; with bf16
 * and f16 the arithmetic is in f32 and each output is rounded once.  "mixed": this output may be
 * f32 where the inputs are bf16 or f16, as gradients of weights are.  Sizes are int64_t, strings
 * are UTF-8 and borrowed for the call. */
#ifndef PG_H
#define PG_H
#include <stddef.h>
#include <stdint.h>

/* ---- status ---- */
enum pg_code {
    PG_OK = 0,
    PG_COLLECT = 1,   /* done, and the caller should now collect garbage (pg_tensor_new only) */
    PG_EINVAL = -1,   /* a wrong value */
    PG_ESHAPE = -2,   /* shapes or dtypes that do not fit */
    PG_ENOMEM = -3,   /* out of memory; collecting garbage may help */
    PG_EDEVICE = -4,  /* the device or its library failed */
    PG_ECOMM = -5,    /* a collective failed, timed out or was refused */
    PG_EIO = -6,      /* a file */
    PG_EINTR = -7,    /* interrupted by the user */
    PG_ECANCEL = -8,  /* a collective was cancelled by pg_comm_cancel */
    PG_ENODATA = -9,  /* the shape backend holds no numbers */
    PG_ENONFINITE = -10, /* PG_NAN=1 met a number that is not finite */
    PG_EGRAPH = -11   /* not while a graph is recorded; or this device has no graphs */
};
enum pg_dtype { PG_F32, PG_F64, PG_BF16, PG_F16, PG_I32, PG_I64, PG_U8, PG_I16, PG_NDTYPES };

typedef struct pg_tensor pg_tensor;
typedef struct pg_comm pg_comm;
typedef struct pg_work pg_work;

const char *pg_errmsg(void);
int pg_abi(void);                 /* number of this header, checked by the CUDA plug-in */
const char *pg_dtype_name(int dtype);
int64_t pg_dtype_size(int dtype); /* bytes */

/* ---- process ---- */
/* Choose the device: "auto", "cpu", "cuda" or "shape".  memory_limit in bytes, 0 = 90 % of what is
 * available, shared by the local ranks, or 97 % of a rank's own GPU.  Called by the first tensor; a
 * second call is an error unless it names the same device. */
int pg_init(const char *device, int64_t memory_limit);
void pg_shutdown(void);           /* afterwards every _free is harmless */
const char *pg_device(void);      /* "cpu", "cuda", "shape"; "" before pg_init */
const char *pg_version_info(void);/* what was found, one "name value" per line */
int pg_sync(void);                /* wait for the device */
double pg_time(void);             /* seconds, monotonic */
void pg_interrupt(int raise);     /* set (1) or clear (0) the flag that every C entry polls */
int pg_interrupted(void);
/* 1: the same bits in every run, also where that costs time and memory (attention's gradient on the
 * GPU: 2 B H T^2 bytes).  Off at start; the CPU always is.  Returns what it was. */
int pg_deterministic(int on);
/* Run another table for a while: 1 = every op works on shapes alone and new
 * tensors hold no data. */
int pg_shape_only(int on);
uint64_t pg_hash(const void *data, int64_t bytes, uint64_t seed); /* xxHash64 */

/* ---- memory ---- */
typedef struct pg_mem {
    int64_t in_use, peak, kept, limit; /* bytes; kept = free blocks the pool holds */
    int64_t tensors, blocks;           /* live handles, live blocks */
} pg_mem;
void pg_mem_stats(pg_mem *out);
void pg_mem_reset_peak(void);
void pg_mem_collected(void);      /* Lua has run a full collection: note what still lives */
void pg_mem_trim(void);           /* give the pool's free blocks back to the system */
void pg_mem_fail_after(int64_t n);/* tests: the n-th allocation from now fails, once; 0 = never */
int pg_mem_tag(const char *tag);  /* new blocks are counted under it; returns its number */
/* Bytes in use under the i-th largest tag (0-based); NULL when there is none. */
const char *pg_mem_holder(int i, int64_t *bytes);

/* ---- tensors ---- */
int pg_tensor_new(pg_tensor **out, int dtype, int ndim, const int64_t *dims); /* PG_OK|PG_COLLECT */
/* A reshape of a run of elements: starts at element `first`, dims given; shares storage. */
int pg_tensor_view(pg_tensor **out, pg_tensor *t, int64_t first, int ndim, const int64_t *dims);
void pg_tensor_free(pg_tensor *t);
int pg_tensor_write(pg_tensor *t, int64_t first, const void *src, int64_t bytes); /* host -> t */
int pg_tensor_read(const pg_tensor *t, int64_t first, void *dst, int64_t bytes);  /* t -> host */
void *pg_tensor_data(pg_tensor *t);       /* cpu: the numbers; NULL elsewhere */
int64_t pg_tensor_count(const pg_tensor *t);
int pg_tensor_dtype(const pg_tensor *t);
int pg_tensor_handles(const pg_tensor *t); /* tensors that share this storage, itself included */
/* Drop the block under a whole storage (its views become empty; touching one is an error that
 * carries `name`), and give it a new one.  ZeRO-3 and offload live on this.  PG_EINVAL while a
 * collective works on it that nobody has waited for. */
int pg_storage_drop(pg_tensor *t, const char *name);
int pg_storage_fill(pg_tensor *t);

/* Host memory that the device reads and writes by itself (pinned; plain memory on the CPU), for
 * batches and offloaded states.  A move returns at once and starts after all ops asked for
 * before it.  pg_host_join: ops asked for from now on see the moves; the host does not
 * wait.  pg_host_wait: the host does, and may then touch the memory.  Touch or free neither
 * side of a move before that. */
typedef struct pg_host pg_host;
int pg_host_new(pg_host **out, int64_t bytes);
void *pg_host_data(pg_host *h);
/* upload: h to t */
int pg_host_upload(pg_host *h, int64_t offset, pg_tensor *t, int64_t first, int64_t bytes);
int pg_host_download(pg_host *h, int64_t offset, const pg_tensor *t, int64_t first, int64_t bytes);
int pg_host_join(pg_host *h);
int pg_host_wait(pg_host *h);
void pg_host_free(pg_host *h);    /* waits for its moves */

/* Marks: moments on the device's own clock.  A mark is reached when all ops asked for before it are
 * done and those asked for after it have not begun; setting one makes neither host nor device wait.
 * pg_marks_read waits for them: seconds [n], NaN for a mark that was never set; on the CPU of
 * pg_time's clock, which the ranks of a host share, on a GPU since the mark that was set first. */
typedef struct pg_marks pg_marks;
int pg_marks_new(pg_marks **out, int n);
int pg_marks_set(pg_marks *m, int i); /* 0 <= i < n; set again, the later moment counts */
int pg_marks_read(pg_marks *m, double *seconds);
void pg_marks_free(pg_marks *m);

int pg_fill(pg_tensor *y, double value);
int pg_copy(pg_tensor *y, const pg_tensor *x);    /* same count; casts between any two dtypes,
                                                     float to integer truncates, to bf16/f16 rounds
                                                     to nearest even */
/* Random numbers by counter (Philox 4x32-10): element i of y takes the number of global index
 * first + (i / cols) * stride + i % cols of the stream (seed, key); so a slice of a parameter gets
 * the same values in every layout.  cols = stride = 0 means plain first + i. */
int pg_random_uniform(pg_tensor *y, uint64_t seed, uint64_t key, double low, double high,
                      int64_t first, int64_t cols, int64_t stride);
int pg_random_normal(pg_tensor *y, uint64_t seed, uint64_t key, double mean, double std,
                     int64_t first, int64_t cols, int64_t stride);

/* ---- the step block: an f64 [PG_STEP_SIZE] tensor in device memory that kernels read ---- */
enum pg_step_slot {
    PG_STEP_RATE,       /* learning rate */
    PG_STEP_BIAS1,      /* 1 - beta1^t */
    PG_STEP_BIAS2,      /* 1 - beta2^t */
    PG_STEP_CLIP,       /* factor on gradients, written by pg_clip */
    PG_STEP_SCALE,      /* loss scale; gradients are divided by it */
    PG_STEP_FINITE,     /* 1 if the gradient norm is finite; 0: update kernels do nothing */
    PG_STEP_RANDOM,     /* random base of this step, an integer in [0, 2^53) */
    PG_STEP_INV_TOKENS, /* 1 / valid tokens of the global batch */
    PG_STEP_NORM,       /* gradient norm before clipping, written by pg_clip */
    PG_STEP_SUMSQ,      /* sum of squares of gradients, added to by pg_sumsq */
    PG_STEP_SIZE = 16
};

/* ---- elementwise ---- */
enum pg_unary_kind { PG_RELU, PG_SILU, PG_GELU, PG_GELU_TANH, PG_TANH, PG_SIGMOID, PG_EXP, PG_LOG,
                     PG_SQRT, PG_SQUARE, PG_NEG, PG_ABS };
enum pg_binary_kind { PG_ADD, PG_SUB, PG_MUL, PG_DIV, PG_MAX, PG_MIN };
int pg_unary(pg_tensor *y, const pg_tensor *x, int kind);
int pg_unary_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x, int kind, int add);
/* y = a op b.  b: the shape of a, or a suffix of it (a bias), or one element. */
int pg_binary(pg_tensor *y, const pg_tensor *a, const pg_tensor *b, int kind, int add);
/* y = alpha x + beta y; y mixed; beta 0 does not read y. */
int pg_axpby(pg_tensor *y, const pg_tensor *x, double alpha, double beta);
/* y = x * mask / (1 - p); mask by counter: stream (step[RANDOM] or seed 0, key), index as in
 * pg_random_uniform.  The gradient is the same call on dy. step may be NULL. */
int pg_dropout(pg_tensor *y, const pg_tensor *x, double p, const pg_tensor *step, uint64_t key,
               int64_t first, int64_t cols, int64_t stride, int add);

/* ---- matmul ---- */
enum pg_epilogue { PG_EPILOGUE_NONE, PG_EPILOGUE_GELU, PG_EPILOGUE_GELU_TANH,
                   PG_EPILOGUE_GELU_GRAD, PG_EPILOGUE_GELU_TANH_GRAD };
typedef struct pg_gemm {
    int32_t transpose_a, transpose_b; /* a is [..,K,M], b is [..,N,K] */
    double alpha, beta; /* out = epilogue(alpha a b scale_a scale_b + bias) + beta out */
    const pg_tensor *bias;            /* [N] or NULL */
    int32_t epilogue;
    pg_tensor *aux;                   /* like out: the value before the epilogue, or NULL.  Of a
                                         gradient's epilogue, which multiplies by the slope of GELU
                                         at aux, it is read and must be given; bias is NULL, beta
                                         0 */
    const pg_tensor *scale_a, *scale_b; /* f32 [1] in device memory, or NULL = 1 */
} pg_gemm;
/* out [..,M,N] = a [..,M,K] b [..,K,N].  a and b have equal leading dims; or b is 2-D and a's
 * leading dims fold into M (transpose_a = 0); or out is 2-D, transpose_a = 1, transpose_b = 0 and
 * equal leading dims of a and b fold into the summed dim (a weight gradient).
 * opts NULL: defaults. */
int pg_matmul(pg_tensor *out, const pg_tensor *a, const pg_tensor *b, const pg_gemm *opts);

/* Let f32 products use tf32 (10 bits of mantissa) where the device has it; off at start.  Returns
 * what it was. */
int pg_allow_tf32(int on);
/* On the GPU large products are timed once per shape and the fastest of the library's algorithms is
 * kept (PG_GEMM_TUNE=0: the library's first).  Choices live in the process, and in this file if one
 * is given (NULL or "": none): lines of text by library version, card and shape. */
int pg_gemm_cache(const char *path);
const char *pg_gemm_choices(void);   /* all choices made or adopted; lives until the next call */
int pg_gemm_adopt(const char *text); /* take another rank's choices instead of own ones */

/* ---- norms, over the last dim D ---- */
/* y = x / sqrt(mean(x^2) + eps) * w.  rstd [N] f32 (f64 for f64), kept for the gradient.
 * w may be NULL (all ones).  Source: Zhang and Sennrich 2019, eq. 4. */
int pg_rmsnorm(pg_tensor *y, pg_tensor *rstd, const pg_tensor *x, const pg_tensor *w, double eps);
/* dw mixed.  base, like dx, or NULL: dx = base + the gradient (add_x must be 0 then), so that the
 * gradient that came past the norm is added on the way. */
int pg_rmsnorm_grad(pg_tensor *dx, pg_tensor *dw, const pg_tensor *dy, const pg_tensor *x,
                    const pg_tensor *w, const pg_tensor *rstd, const pg_tensor *base, int add_x,
                    int add_w);
/* sum = x + r, rounded to its dtype; y and rstd = the norm of it.  One pass. */
int pg_add_rmsnorm(pg_tensor *y, pg_tensor *sum, pg_tensor *rstd, const pg_tensor *x,
                   const pg_tensor *r, const pg_tensor *w, double eps);
/* y = (x - mean) / sqrt(var + eps) * w + b, biased variance.  Source: Ba et al. 2016. */
int pg_layernorm(pg_tensor *y, pg_tensor *mean, pg_tensor *rstd, const pg_tensor *x,
                 const pg_tensor *w, const pg_tensor *b, double eps);
int pg_layernorm_grad(pg_tensor *dx, pg_tensor *dw, pg_tensor *db, const pg_tensor *dy,
                      const pg_tensor *x, const pg_tensor *w, const pg_tensor *mean,
                      const pg_tensor *rstd, const pg_tensor *base, int add_x, int add_w,
                      int add_b);
int pg_add_layernorm(pg_tensor *y, pg_tensor *sum, pg_tensor *mean, pg_tensor *rstd,
                     const pg_tensor *x, const pg_tensor *r, const pg_tensor *w, const pg_tensor *b,
                     double eps);

/* ---- attention and positions ---- */
/* cos, sin [T,K/2]: angle(t,i) = (first + t) * theta^(-2i/K), in double, rounded at the end. */
int pg_rope_table(pg_tensor *cos, pg_tensor *sin, double theta, int64_t first);
/* Half-split rotation (Hugging Face) of the first `heads` heads of K columns in each row of x
 * [B,T,C]; other columns are copied.  K = 2 * last dim of cos.  sign +1 forward, -1 gradient.
 * y may be x (add must be 0 then).  Row t uses line start + t of the tables. */
int pg_rope(pg_tensor *y, const pg_tensor *x, const pg_tensor *cos, const pg_tensor *sin,
            int64_t heads, int64_t start, int sign, int add);
typedef struct pg_attn {
    int64_t heads, kv_heads;     /* H, G; H % G == 0; query head h reads key head h / (H/G) */
    double scale;                /* on scores; 0 = 1 / sqrt(K) */
    int32_t causal;              /* row t sees keys <= t + Tk - T */
    const pg_tensor *lengths;    /* i32 [B]: keys >= lengths[b] are masked, or NULL */
    double dropout;              /* on probabilities */
    uint64_t key;                /* dropout stream, keyed by (sample, head, row, column) ... */
    int64_t sample0, head0, heads_all; /* ... of the global batch and the whole model */
    const pg_tensor *step;       /* random base, or NULL */
} pg_attn;
/* out [B,T,H*K]; lse [B,H,T] f32 (f64 for f64), kept for the gradient.  Either q is packed
 * [B,T,(H+2G)*K] with k = v = NULL, or q [B,T,H*K], k and v [B,Tk,G*K].  A row with no key allowed
 * gives 0.  Never holds [T,T] for more than one head a thread. */
int pg_attention(pg_tensor *out, pg_tensor *lse, const pg_tensor *q, const pg_tensor *k,
                 const pg_tensor *v, const pg_attn *opts);
int pg_attention_grad(pg_tensor *dq, pg_tensor *dk, pg_tensor *dv, const pg_tensor *dout,
                      const pg_tensor *q, const pg_tensor *k, const pg_tensor *v,
                      const pg_tensor *out, const pg_tensor *lse, const pg_attn *opts, int add);
/* y [..,F] = silu(x[..,:F]) * x[..,F:], x [..,2F].  Source: Shazeer 2020. */
int pg_swiglu(pg_tensor *y, const pg_tensor *x);
int pg_swiglu_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x, int add);

/* ---- softmax, embedding, loss ---- */
/* over the last dim; log = 1: log-softmax */
int pg_softmax(pg_tensor *y, const pg_tensor *x, int log);
int pg_softmax_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *y, int log, int add);
/* y [..,D] = rows of table [R,D] at ids [..] (i32 or i64).  The rows are those of ids
 * [first, first + R) in a vocabulary of `vocab` ids (0: of R); ids of other rows give zeros, rows
 * past the vocabulary are padding.  An id outside [0,vocab) is an error naming it. */
int pg_embedding(pg_tensor *y, const pg_tensor *table, const pg_tensor *ids, int64_t first,
                 int64_t vocab);
/* dtable mixed; ids of other rows add nothing. */
int pg_embedding_grad(pg_tensor *dtable, const pg_tensor *dy, const pg_tensor *ids, int64_t first,
                      int64_t vocab, int add);
/* out [2]: out[0] = sum of losses over valid rows, times step[INV_TOKENS] (step given) or divided
 * by the valid rows (0 if none); out[1] = valid rows.  rows [N] (or NULL): each row's loss, 0 where
 * ignored.  lse [N] kept.  logits [..,V]; targets [..] i32|i64, checked
 * against V. Sums in double. */
int pg_cross_entropy(pg_tensor *out, pg_tensor *rows, pg_tensor *lse, const pg_tensor *logits,
                     const pg_tensor *targets, int64_t ignore, const pg_tensor *step);
/* dloss: one element (gradient of out[0]) or [N] (of rows; where N is 1, out = NULL says so).
 * dlogits may be logits (add = 0). */
int pg_cross_entropy_grad(pg_tensor *dlogits, const pg_tensor *dloss, const pg_tensor *logits,
                          const pg_tensor *targets, const pg_tensor *lse, const pg_tensor *out,
                          int64_t ignore, const pg_tensor *step, int add);
/* The same loss where the vocabulary of V ids is cut over R ranks: this one's logits [..,Vl]
 * are those of ids [first, first + valid), columns from valid on are padding.  Targets are ids
 * of the whole.  stats [2,N] (f32, or f64): the log of the sum of exponentials over this rank's
 * columns (-inf where it has none), and the target's logit where it is here, else 0.  Both are
 * 0 for an ignored row. */
int pg_vocab_stats(pg_tensor *stats, const pg_tensor *logits, const pg_tensor *targets,
                   int64_t first, int64_t valid, int64_t vocab, int64_t ignore);
/* parts [R,2,N]: the stats of all ranks.  out, rows, lse as in pg_cross_entropy. */
int pg_vocab_loss(pg_tensor *out, pg_tensor *rows, pg_tensor *lse, const pg_tensor *parts,
                  const pg_tensor *targets, int64_t ignore, const pg_tensor *step);
/* As pg_cross_entropy_grad, for this rank's columns; padding gets 0.  lse is that of the whole. */
int pg_vocab_grad(pg_tensor *dlogits, const pg_tensor *dloss, const pg_tensor *logits,
                  const pg_tensor *targets, const pg_tensor *lse, const pg_tensor *out,
                  int64_t first, int64_t valid, int64_t ignore, const pg_tensor *step, int add);
/* ids [N] i32 drawn from softmax(logits [N,V] / temperature) cut to the top_k most likely (0 = all)
 * and the smallest set of mass >= top_p (1 = all).  temperature 0: argmax.  Stream (seed, key),
 * index first + row. */
int pg_sample(pg_tensor *ids, const pg_tensor *logits, double temperature, int64_t top_k,
              double top_p, uint64_t seed, uint64_t key, int64_t first);
int pg_argmax(pg_tensor *ids, const pg_tensor *x); /* last dim; first of equals; ids i32|i64 */

/* ---- reductions and rearranging ---- */
enum pg_reduce_kind { PG_SUM, PG_MEAN, PG_RMAX, PG_RMIN };
/* Over dim (0-based) of x; dim = -1: over all.  y has the other dims (count is what is checked),
 * and is mixed for sums and means. */
int pg_reduce(pg_tensor *y, const pg_tensor *x, int kind, int dim, int add);
/* Gradient of sum: y[outer,n,inner] (+)= scale * x[outer,inner]; dim as above. */
int pg_expand(pg_tensor *y, const pg_tensor *x, int dim, double scale, int add);
/* Gradient of max and min: dy goes to the first element equal to y. */
int pg_reduce_grad(pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x, const pg_tensor *y,
                   int kind, int dim, int add);
/* y = x[start..], y[start..] = x, and: dim i of y is dim order[i] of x. */
int pg_slice(pg_tensor *y, const pg_tensor *x, int dim, int64_t start, int add);
int pg_place(pg_tensor *y, const pg_tensor *x, int dim, int64_t start, int add);
int pg_permute(pg_tensor *y, const pg_tensor *x, const int32_t *order, int add);

/* ---- norms of gradients, updates ---- */
/* step[SUMSQ] += sum of weight * x^2, in double.  ends i64 [R] and weights f32 [R]:
 * where each run of x ends, and its weight (a parameter that k ranks hold counts 1/k on
 * each); both NULL: all 1. */
int pg_sumsq(pg_tensor *step, const pg_tensor *x, const pg_tensor *ends, const pg_tensor *weights);
/* norm = sqrt(step[SUMSQ]) / scale -> NORM; FINITE; CLIP = min(1, max_norm / norm) / scale
 * (max_norm 0: only / scale). */
int pg_clip(pg_tensor *step, double max_norm);
int pg_count_nonfinite(int64_t *count, const pg_tensor *x);
/* One call for a segment, or a slice of one.  ends i64 [R]: where each run of parameters ends;
 * factors f32 [R,2]: decay and rate multiplier of each run.  Does nothing if step[FINITE] is 0.
 * dtypes: all f32 or all f64 with master NULL; or value bf16 with master i16, the 16 bits that bf16
 * lacks (the f32 master has the bits (value << 16) + master, so value = (bits + 0x8000) >> 16); or
 * value bf16 or f16 with master f32, the master itself, whose rounding the value is.  With a
 * master, grad is f32 or like value, and m and v are f32, or both bf16.
 * Decoupled decay: value -= rate * (m^ / (sqrt(v^) + eps) + decay * value).
 * Loshchilov and Hutter 2019. */
int pg_adamw(pg_tensor *value, pg_tensor *master, const pg_tensor *grad, pg_tensor *m, pg_tensor *v,
             const pg_tensor *ends, const pg_tensor *factors, const pg_tensor *step,
             double beta1, double beta2, double eps);
/* momentum buffer m may be NULL: m = mu m + (1 - dampening) (g + decay w), as torch.optim.SGD. */
int pg_sgd(pg_tensor *value, pg_tensor *master, const pg_tensor *grad, pg_tensor *m,
           const pg_tensor *ends, const pg_tensor *factors, const pg_tensor *step, double momentum,
           double dampening, int nesterov, int first);
/* The f32 numbers that value and master stand for, and back.  out, in f32; counts equal.  A NaN
 * becomes the quiet one of its sign, which keeps one beside i16 masters. */
int pg_master_join(pg_tensor *out, const pg_tensor *value, const pg_tensor *master);
int pg_master_split(pg_tensor *value, pg_tensor *master, const pg_tensor *in);

/* ---- ranks and collectives ---- */
enum pg_reduce_op { PG_OP_SUM, PG_OP_MAX, PG_OP_MIN };
/* Join the ranks named by the environment (RANK, WORLD_SIZE, ...; see launch.c).
 * Without it a world of one. */
int pg_comm_init(void);
pg_comm *pg_comm_world(void);
int pg_comm_rank(const pg_comm *c);
int pg_comm_size(const pg_comm *c);
/* A group of the listed ranks of parent, in that order; all of them call it, in one order of
 * groups; name for messages ("dp", "tp"). */
int pg_comm_split(pg_comm **out, pg_comm *parent, const int32_t *ranks, int n, const char *name);
void pg_comm_free(pg_comm *c);
/* work NULL: wait here.  Otherwise the tensors are held until pg_work_wait.  Sums are the same bits
 * on every rank; on the CPU bf16 and f16 are added in f32, in rank order.  Ops, dtypes and counts
 * are compared before data is touched (on GPUs: of small collectives; of others while they run, see
 * nccl_check.c); a mismatch is PG_ECOMM on all, naming both ranks.  On GPUs a wait is the device's:
 * the host goes on, and a failure comes with the next call that needs numbers.  There, groups that
 * overlap must be used in one order on all ranks. */
int pg_allreduce(pg_comm *c, pg_tensor *t, int op, pg_work **work);
int pg_allgather(pg_comm *c, pg_tensor *out, const pg_tensor *in, pg_work **work);
int pg_reducescatter(pg_comm *c, pg_tensor *out, const pg_tensor *in, int op, pg_work **work);
int pg_broadcast(pg_comm *c, pg_tensor *t, int root, pg_work **work);
int pg_send(pg_comm *c, const pg_tensor *t, int peer, pg_work **work);
int pg_recv(pg_comm *c, pg_tensor *t, int peer, pg_work **work);
int pg_barrier(pg_comm *c);
int pg_work_wait(pg_work *w);     /* waits and frees */
int pg_work_done(pg_work *w);     /* 1 done, 0 not yet, negative failed; does not free */
void pg_work_drop(pg_work *w);    /* nobody will wait: freed once it is done; never blocks */
/* Seconds that ranks wait for each other, set where above 0; returns what held before: at first
 * PGRUN_TIMEOUT, else 600. */
double pg_comm_timeout(double seconds);
/* Break every waiting and future call on c, on all its ranks, with PG_ECANCEL; then all its ranks
 * call pg_comm_reform to use it again.  One rank's cancel is enough. */
int pg_comm_cancel(pg_comm *c, const char *reason);
int pg_comm_reform(pg_comm *c);
/* The status page that the launcher and the other ranks read. */
void pg_status_step(int64_t step);
void pg_status_where(const char *file_line); /* Lua line of the next waiting call */
void pg_status_fail(const char *message);    /* why this rank is about to end */

/* ---- graphs: work recorded once, then done again as a whole ---- */
/* A GPU that is given small ops one by one waits for the host between them; a graph of them starts
 * at once.  From begin to end ops check their arguments as always and are recorded, not done:
 * pg_graph_launch does all of them, as often as it is called, with the same tensors and scalars, in
 * the stream's order.  What changes from one time to the next lies in device memory: the step
 * block, tensors written or copied into between.
 * Refused meanwhile with PG_EGRAPH, and the recording is then spoilt: what the host would see or
 * bring (reads, writes, moves of pg_host, pg_sync, pg_count_nonfinite), collectives of several
 * ranks, products that would be timed, a second begin.
 * Memory: tensors made meanwhile lie in blocks of the graph's own, which nobody else gets while it
 * lives; storages made before are held as long as it does, whoever frees them.  Ids that recorded
 * ops read are checked at each launch.  All calls come from the thread that computes. */
typedef struct pg_graph pg_graph;
int pg_graph_begin(void); /* PG_EGRAPH where the device has none: the CPU has nothing to gain */
/* Recording ends whatever happened.  out NULL gives it up.  Where it was spoilt or given up nothing
 * was done, and tensors made meanwhile that are still there may not be touched. */
int pg_graph_end(pg_graph **out);
int pg_graph_launch(pg_graph *g); /* returns at once */
int64_t pg_graph_bytes(const pg_graph *g); /* of the blocks that are its own */
void pg_graph_free(pg_graph *g);  /* tensors made in it keep their numbers */

/* ---- files: folders and whole files ---- */
int pg_fs_stat(const char *path, int64_t *size, double *mtime, int *is_dir); /* PG_EIO if absent */
int pg_fs_mkdir(const char *path);            /* with parents; fine if there */
int pg_fs_rename(const char *from, const char *to); /* and fsync of the folder */
int pg_fs_remove(const char *path);           /* a file or a whole folder; fine if absent */
int pg_fs_sync(const char *path);             /* fsync of a file or folder */
/* Names joined by '\n', sorted; the text lives until the next call on this thread. */
const char *pg_fs_list(const char *folder);   /* names inside; NULL on error */
const char *pg_fs_glob(const char *pattern);  /* paths; "" when nothing matches */
/* Written aside, fsynced, renamed: the old file or the new one, never a part. */
int pg_fs_write(const char *path, const void *data, int64_t bytes);
const char *pg_fs_read(const char *path, int64_t *bytes); /* as pg_fs_list; NULL on error */
int pg_fs_hash(const char *path, uint64_t *out); /* of its bytes, seed 0; PG_EINTR on Ctrl-C */
const char *pg_fs_hostname(void);
/* Tests: the n-th write, fsync or rename of a file from now fails with "disk
 * full", once; 0 = never. */
void pg_fs_fail_after(int64_t n);

/* ---- files: safetensors ---- */
typedef struct pg_safetensors pg_safetensors;
int pg_safetensors_open(pg_safetensors **out, const char *path);  /* mapped and fully checked */
int64_t pg_safetensors_count(const pg_safetensors *f);
const char *pg_safetensors_name(const pg_safetensors *f, int64_t i);
int64_t pg_safetensors_find(const pg_safetensors *f, const char *name); /* index or -1 */
/* dims has room for 8; dtype is a pg_dtype or -1 where the file's has no tensor type here. */
int pg_safetensors_info(const pg_safetensors *f, int64_t i, int *dtype, int *ndim, int64_t *dims);
const char *pg_safetensors_meta(const pg_safetensors *f, const char *key); /* NULL if absent */
/* t (+any dtype, cast) = elements [first, first + count(t)) of entry i. */
int pg_safetensors_read(const pg_safetensors *f, int64_t i, int64_t first, pg_tensor *t);
/* The same of a block of columns, whose number k is the entry's element first + (k / cols) * stride
 * + k % cols (cols = stride = 0: first + k): t = its numbers [from, from + count(t)). */
int pg_safetensors_read_block(const pg_safetensors *f, int64_t i, int64_t first, int64_t cols,
                              int64_t stride, int64_t from, pg_tensor *t);
void pg_safetensors_close(pg_safetensors *f);
/* Writing: declare all, begin, write each in any order, finish (fsync and rename); close without
 * finish removes what was written aside. */
int pg_safetensors_create(pg_safetensors **out, const char *path);
int pg_safetensors_set_meta(pg_safetensors *f, const char *key, const char *value);
int pg_safetensors_declare(pg_safetensors *f, const char *name, int dtype, int ndim,
                           const int64_t *dims);
int pg_safetensors_begin(pg_safetensors *f);
int pg_safetensors_write(pg_safetensors *f, const char *name, int64_t first, const pg_tensor *t);
int pg_safetensors_write_block(pg_safetensors *f, const char *name, int64_t first, int64_t cols,
                               int64_t stride, int64_t from, const pg_tensor *t);
int pg_safetensors_finish(pg_safetensors *f);
/* Several processes write one file: after begin its creator shares it, the others join the
 * path that share returns (NULL: an error), write their numbers, sync (on disk when it
 * returns) and close; then its creator finishes.  That every element was written is theirs to
 * know: finish does not count. */
const char *pg_safetensors_share(pg_safetensors *f);
int pg_safetensors_join(pg_safetensors **out, const char *path);
int pg_safetensors_sync(pg_safetensors *f);

/* ---- files: tokens (llm.c and nanoGPT shards) ---- */
typedef struct pg_tokens pg_tokens;
/* pattern: a glob, or several separated by '\n'.  dtype for headerless files: PG_U8, PG_I32, or
 * -1 = uint16 as nanoGPT.  vocab > 0: ids are checked when they are read. */
int pg_tokens_open(pg_tokens **out, const char *pattern, int dtype, int64_t vocab);
int64_t pg_tokens_count(const pg_tokens *s);       /* tokens over all files */
/* Copy [start, start + n) to dst (host).  An id >= vocab is PG_EINVAL naming file, offset, id. */
int pg_tokens_read(const pg_tokens *s, int64_t start, int64_t n, int32_t *dst);
void pg_tokens_close(pg_tokens *s);
/* Writing, llm.c format (magic 20240520, uint16; 20240801, uint32 when vocab > 65536). */
int pg_tokens_create(pg_tokens **out, const char *path, int64_t vocab);
int pg_tokens_append(pg_tokens *s, const int32_t *ids, int64_t n);
int pg_tokens_finish(pg_tokens *s);                /* header, fsync, rename; then close */
/* Background prefetch: a thread reads spans ahead.  Each request fills batch [n_rows, span] i32
 * from the starts given; results come back in order.  Holds s open until it is freed. */
typedef struct pg_prefetch pg_prefetch;
int pg_prefetch_new(pg_prefetch **out, const pg_tokens *s, int64_t rows, int64_t span, int depth);
/* never waits; refused when depth are out */
int pg_prefetch_ask(pg_prefetch *p, const int64_t *starts);
int pg_prefetch_take(pg_prefetch *p, int32_t *dst); /* rows * span, the oldest request */
void pg_prefetch_free(pg_prefetch *p);
/* Element i of a keyed permutation of [0,n): a Feistel network with cycle walking, no table. */
int64_t pg_permute_index(int64_t i, int64_t n, uint64_t key);

/* ---- files: JSON (jansson; duplicate keys refused) ---- */
typedef struct pg_json pg_json;
enum pg_json_kind { PG_JSON_NULL, PG_JSON_FALSE, PG_JSON_TRUE, PG_JSON_INT, PG_JSON_REAL,
                    PG_JSON_STRING, PG_JSON_ARRAY, PG_JSON_OBJECT };
int pg_json_parse(pg_json **out, const char *text, int64_t bytes); /* error: line and column */
/* A walk in document order: each call gives the next value.  key is set inside an object (else
 * NULL); size is the count of an array or object, whose members come next, or a string's bytes. */
int pg_json_next(pg_json *j, int *kind, const char **key, const char **text, int64_t *size,
                 double *real, int64_t *integer);
void pg_json_free(pg_json *j);

/* ---- files: TensorBoard events ---- */
typedef struct pg_events pg_events;
int pg_events_open(pg_events **out, const char *folder);
int pg_events_scalar(pg_events *e, const char *tag, int64_t step, double value);
int pg_events_text(pg_events *e, const char *tag, int64_t step, const char *text);
int pg_events_flush(pg_events *e);
void pg_events_close(pg_events *e);
#endif
