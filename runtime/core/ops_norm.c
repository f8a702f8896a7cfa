/* ops_norm.c: rmsnorm and layernorm with their gradients: checks, then one kernel call.
 * x is [..,D]; its other dims together are the rows. */
#include "ops_nn.h"

/* w, b, dw, db: D numbers like x; NULL passes. */
#define PER_COLUMN(op, t, x)                                                                       \
    do {                                                                                           \
        if (t) {                                                                                   \
            PG_SAME_DTYPE(op, t, x);                                                               \
            PG_HAS_COUNT(op, t, pg_last_dim(x));                                                   \
        }                                                                                          \
    } while (0)

int pg_rmsnorm(pg_tensor *y, pg_tensor *rstd, const pg_tensor *x, const pg_tensor *w, double eps) {
    PG_POLL();
    PG_GIVEN("rmsnorm", y, rstd, x);
    PG_FLOATING("rmsnorm", x);
    PG_LIKE("rmsnorm", y, x);
    PER_COLUMN("rmsnorm", w, x);
    PG_KEPT("rmsnorm", rstd, x, rows_of(x));
    PG_APART("rmsnorm", y, x);
    PG_OPEN(b, "rmsnorm", y, rstd, x, w);
    return b->kernels->rmsnorm(pg_tensor_at(y), pg_tensor_at(rstd), pg_tensor_at(x), at_or_null(w),
                               eps, rows_of(x), pg_last_dim(x), x->dtype, b->stream);
}

int pg_rmsnorm_grad(pg_tensor *dx, pg_tensor *dw, const pg_tensor *dy, const pg_tensor *x,
                    const pg_tensor *w, const pg_tensor *rstd, int add_x, int add_w) {
    PG_POLL();
    PG_GIVEN("rmsnorm_grad", dy, x, rstd);
    PG_FLOATING("rmsnorm_grad", x);
    PG_LIKE("rmsnorm_grad", dy, x);
    PER_COLUMN("rmsnorm_grad", w, x);
    PER_COLUMN("rmsnorm_grad", dw, x);
    PG_KEPT("rmsnorm_grad", rstd, x, rows_of(x));
    if (dx) {
        PG_LIKE("rmsnorm_grad", dx, x);
        PG_APART("rmsnorm_grad", dx, x);
        PG_APART("rmsnorm_grad", dx, dy);
    }
    if (!dx && !dw) return PG_OK;
    PG_OPEN(b, "rmsnorm_grad", dx, dw, dy, x, w, rstd);
    void *scratch;
    int64_t n = rows_of(x), d = pg_last_dim(x);
    PG_TRY(take_scratch(&scratch, "rmsnorm_grad", b->kernels->rmsnorm_grad_scratch(n, d)));
    return b->kernels->rmsnorm_grad(at_or_null(dx), at_or_null(dw), pg_tensor_at(dy),
                                    pg_tensor_at(x), at_or_null(w), pg_tensor_at(rstd), n, d, add_x,
                                    add_w, scratch, x->dtype, b->stream);
}

int pg_layernorm(pg_tensor *y, pg_tensor *mean, pg_tensor *rstd, const pg_tensor *x,
                 const pg_tensor *w, const pg_tensor *b, double eps) {
    PG_POLL();
    PG_GIVEN("layernorm", y, mean, rstd, x);
    PG_FLOATING("layernorm", x);
    PG_LIKE("layernorm", y, x);
    PER_COLUMN("layernorm", w, x);
    PER_COLUMN("layernorm", b, x);
    PG_KEPT("layernorm", mean, x, rows_of(x));
    PG_KEPT("layernorm", rstd, x, rows_of(x));
    PG_APART("layernorm", y, x);
    PG_OPEN(backend, "layernorm", y, mean, rstd, x, w, b);
    return backend->kernels->layernorm(pg_tensor_at(y), pg_tensor_at(mean), pg_tensor_at(rstd),
                                       pg_tensor_at(x), at_or_null(w), at_or_null(b), eps,
                                       rows_of(x), pg_last_dim(x), x->dtype, backend->stream);
}

int pg_layernorm_grad(pg_tensor *dx, pg_tensor *dw, pg_tensor *db, const pg_tensor *dy,
                      const pg_tensor *x, const pg_tensor *w, const pg_tensor *mean,
                      const pg_tensor *rstd, int add_x, int add_w, int add_b) {
    PG_POLL();
    PG_GIVEN("layernorm_grad", dy, x, mean, rstd);
    PG_FLOATING("layernorm_grad", x);
    PG_LIKE("layernorm_grad", dy, x);
    PER_COLUMN("layernorm_grad", w, x);
    PER_COLUMN("layernorm_grad", dw, x);
    PER_COLUMN("layernorm_grad", db, x);
    PG_KEPT("layernorm_grad", mean, x, rows_of(x));
    PG_KEPT("layernorm_grad", rstd, x, rows_of(x));
    if (dx) {
        PG_LIKE("layernorm_grad", dx, x);
        PG_APART("layernorm_grad", dx, x);
        PG_APART("layernorm_grad", dx, dy);
    }
    if (!dx && !dw && !db) return PG_OK;
    PG_OPEN(b, "layernorm_grad", dx, dw, db, dy, x, w, mean, rstd);
    void *scratch;
    int64_t n = rows_of(x), d = pg_last_dim(x);
    PG_TRY(take_scratch(&scratch, "layernorm_grad", b->kernels->layernorm_grad_scratch(n, d)));
    return b->kernels->layernorm_grad(at_or_null(dx), at_or_null(dw), at_or_null(db),
                                      pg_tensor_at(dy), pg_tensor_at(x), at_or_null(w),
                                      pg_tensor_at(mean), pg_tensor_at(rstd), n, d, add_x, add_w,
                                      add_b, scratch, x->dtype, b->stream);
}
