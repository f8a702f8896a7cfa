/* ops_nn.h: small helpers of the ops of a network (ops_matmul.c, ops_norm.c, ops_attention.c,
 * ops_loss.c, ops_ids.c), beside the checks of check.h. */
#ifndef PG_OPS_NN_H
#define PG_OPS_NN_H
#include "check.h"

/* Rows of a tensor whose last dim is one row; none where rows are empty. */
static inline int64_t rows_of(const pg_tensor *t) {
    int64_t last = pg_last_dim(t);
    return last ? t->count / last : 0;
}

/* Numbers kept beside an op (rstd, lse, losses) are f32, or f64 beside f64. */
static inline int kept_dtype(const pg_tensor *x) { return x->dtype == PG_F64 ? PG_F64 : PG_F32; }

#define PG_KEPT(op, t, x, n)                                                                       \
    do {                                                                                           \
        PG_HAS_DTYPE(op, t, kept_dtype(x));                                                        \
        PG_HAS_COUNT(op, t, n);                                                                    \
    } while (0)

/* Scratch for one kernel call; none is taken for 0 bytes. */
static inline int take_scratch(void **scratch, const char *op, int64_t bytes) {
    *scratch = bytes > 0 ? pg_pool_scratch(bytes) : NULL;
    return bytes > 0 && !*scratch ? pg_fail_within(PG_ENOMEM, "%s: ", op) : PG_OK;
}

/* ops_ids.c: ids are i32 or i64; and once the kernels are at hand, every id lies in [0,v) or is
 * *ignore (NULL: none is).  The message names the first that does not, as `what`. */
int pg_ids_dtype(const char *op, const char *what, const pg_tensor *ids);
int pg_ids_check(const pg_backend *b, const char *op, const char *what, const pg_tensor *ids,
                 int64_t v, const int64_t *ignore);
#endif
