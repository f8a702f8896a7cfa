/* ops_norm.c: rmsnorm and layernorm with their gradients: checks, then one kernel call.
 * x is [..,D]; its other dims together are the rows. */
#include "ops_nn.h"

/* w, b: D numbers like x; NULL passes. */
#define PER_COLUMN(op, t, x)                                                                       \
    do {                                                                                           \
        if (t) {                                                                                   \
            PG_SAME_DTYPE(op, t, x);                                                               \
            PG_HAS_COUNT(op, t, pg_last_dim(x));                                                   \
        }                                                                                          \
    } while (0)
/* dw, db: the same, mixed. */
#define GRAD_PER_COLUMN(op, t, x)                                                                  \
    do {                                                                                           \
        if (t) {                                                                                   \
            PG_MIXED(op, t, x);                                                                    \
            PG_HAS_COUNT(op, t, pg_last_dim(x));                                                   \
        }                                                                                          \
    } while (0)

/* y and sum = x + r, all alike and apart. */
static int check_sum(const char *op, const pg_tensor *y, const pg_tensor *sum, const pg_tensor *x,
                     const pg_tensor *r) {
    PG_GIVEN(op, sum, r);
    PG_LIKE(op, r, x);
    PG_LIKE(op, sum, x);
    PG_APART(op, sum, x);
    PG_APART(op, sum, r);
    PG_APART(op, y, sum);
    PG_APART(op, y, r);
    return PG_OK;
}

/* r and sum: both NULL for the plain norm. */
static int rmsnorm(const char *op, pg_tensor *y, pg_tensor *sum, pg_tensor *rstd,
                   const pg_tensor *x, const pg_tensor *r, const pg_tensor *w, double eps) {
    PG_FLOATING(op, x);
    PG_LIKE(op, y, x);
    PER_COLUMN(op, w, x);
    PG_KEPT(op, rstd, x, rows_of(x));
    PG_APART(op, y, x);
    PG_OPEN(b, op, y, sum, rstd, x, r, w);
    return b->kernels->rmsnorm(pg_tensor_at(y), at_or_null(sum), pg_tensor_at(rstd),
                               pg_tensor_at(x), at_or_null(r), at_or_null(w), eps, rows_of(x),
                               pg_last_dim(x), x->dtype, b->stream);
}

int pg_rmsnorm(pg_tensor *y, pg_tensor *rstd, const pg_tensor *x, const pg_tensor *w, double eps) {
    PG_POLL();
    PG_GIVEN("rmsnorm", y, rstd, x);
    return rmsnorm("rmsnorm", y, NULL, rstd, x, NULL, w, eps);
}

int pg_add_rmsnorm(pg_tensor *y, pg_tensor *sum, pg_tensor *rstd, const pg_tensor *x,
                   const pg_tensor *r, const pg_tensor *w, double eps) {
    PG_POLL();
    PG_GIVEN("add_rmsnorm", y, rstd, x);
    PG_TRY(check_sum("add_rmsnorm", y, sum, x, r));
    return rmsnorm("add_rmsnorm", y, sum, rstd, x, r, w, eps);
}

/* dx and base: like x and apart from what is read. */
static int check_dx(const char *op, const pg_tensor *dx, const pg_tensor *dy, const pg_tensor *x,
                    const pg_tensor *base, int add_x) {
    if (base && (!dx || add_x))
        return pg_fail(PG_EINVAL, "%s: base %s; give base with a dx to write, or dx with add_x 1",
                       op, dx ? "and add_x 1" : "without dx");
    if (!dx) return PG_OK;
    PG_LIKE(op, dx, x);
    PG_APART(op, dx, x);
    PG_APART(op, dx, dy);
    if (!base) return PG_OK;
    PG_LIKE(op, base, x);
    PG_APART(op, dx, base);
    return PG_OK;
}

int pg_rmsnorm_grad(pg_tensor *dx, pg_tensor *dw, const pg_tensor *dy, const pg_tensor *x,
                    const pg_tensor *w, const pg_tensor *rstd, const pg_tensor *base, int add_x,
                    int add_w) {
    PG_POLL();
    PG_GIVEN("rmsnorm_grad", dy, x, rstd);
    PG_FLOATING("rmsnorm_grad", x);
    PG_LIKE("rmsnorm_grad", dy, x);
    PER_COLUMN("rmsnorm_grad", w, x);
    GRAD_PER_COLUMN("rmsnorm_grad", dw, x);
    PG_KEPT("rmsnorm_grad", rstd, x, rows_of(x));
    PG_TRY(check_dx("rmsnorm_grad", dx, dy, x, base, add_x));
    if (!dx && !dw) return PG_OK;
    PG_OPEN(b, "rmsnorm_grad", dx, dw, dy, x, w, rstd, base);
    void *scratch;
    int64_t n = rows_of(x), d = pg_last_dim(x);
    PG_TRY(take_scratch(&scratch, "rmsnorm_grad", b->kernels->rmsnorm_grad_scratch(n, d)));
    return b->kernels->rmsnorm_grad(at_or_null(dx), at_or_null(dw), pg_tensor_at(dy),
                                    pg_tensor_at(x), at_or_null(w), pg_tensor_at(rstd),
                                    at_or_null(base), n, d, add_x, add_w, scratch, x->dtype,
                                    dw ? dw->dtype : x->dtype, b->stream);
}

static int layernorm(const char *op, pg_tensor *y, pg_tensor *sum, pg_tensor *mean, pg_tensor *rstd,
                     const pg_tensor *x, const pg_tensor *r, const pg_tensor *w, const pg_tensor *b,
                     double eps) {
    PG_FLOATING(op, x);
    PG_LIKE(op, y, x);
    PER_COLUMN(op, w, x);
    PER_COLUMN(op, b, x);
    PG_KEPT(op, mean, x, rows_of(x));
    PG_KEPT(op, rstd, x, rows_of(x));
    PG_APART(op, y, x);
    PG_OPEN(backend, op, y, sum, mean, rstd, x, r, w, b);
    return backend->kernels->layernorm(pg_tensor_at(y), at_or_null(sum), pg_tensor_at(mean),
                                       pg_tensor_at(rstd), pg_tensor_at(x), at_or_null(r),
                                       at_or_null(w), at_or_null(b), eps, rows_of(x),
                                       pg_last_dim(x), x->dtype, backend->stream);
}

int pg_layernorm(pg_tensor *y, pg_tensor *mean, pg_tensor *rstd, const pg_tensor *x,
                 const pg_tensor *w, const pg_tensor *b, double eps) {
    PG_POLL();
    PG_GIVEN("layernorm", y, mean, rstd, x);
    return layernorm("layernorm", y, NULL, mean, rstd, x, NULL, w, b, eps);
}

int pg_add_layernorm(pg_tensor *y, pg_tensor *sum, pg_tensor *mean, pg_tensor *rstd,
                     const pg_tensor *x, const pg_tensor *r, const pg_tensor *w, const pg_tensor *b,
                     double eps) {
    PG_POLL();
    PG_GIVEN("add_layernorm", y, mean, rstd, x);
    PG_TRY(check_sum("add_layernorm", y, sum, x, r));
    return layernorm("add_layernorm", y, sum, mean, rstd, x, r, w, b, eps);
}

int pg_layernorm_grad(pg_tensor *dx, pg_tensor *dw, pg_tensor *db, const pg_tensor *dy,
                      const pg_tensor *x, const pg_tensor *w, const pg_tensor *mean,
                      const pg_tensor *rstd, const pg_tensor *base, int add_x, int add_w,
                      int add_b) {
    PG_POLL();
    PG_GIVEN("layernorm_grad", dy, x, mean, rstd);
    PG_FLOATING("layernorm_grad", x);
    PG_LIKE("layernorm_grad", dy, x);
    PER_COLUMN("layernorm_grad", w, x);
    GRAD_PER_COLUMN("layernorm_grad", dw, x);
    GRAD_PER_COLUMN("layernorm_grad", db, x);
    if (dw && db) PG_SAME_DTYPE("layernorm_grad", dw, db);
    PG_KEPT("layernorm_grad", mean, x, rows_of(x));
    PG_KEPT("layernorm_grad", rstd, x, rows_of(x));
    PG_TRY(check_dx("layernorm_grad", dx, dy, x, base, add_x));
    if (!dx && !dw && !db) return PG_OK;
    PG_OPEN(b, "layernorm_grad", dx, dw, db, dy, x, w, mean, rstd, base);
    void *scratch;
    int64_t n = rows_of(x), d = pg_last_dim(x);
    int dtype_w = dw ? dw->dtype : db ? db->dtype : x->dtype;
    PG_TRY(take_scratch(&scratch, "layernorm_grad", b->kernels->layernorm_grad_scratch(n, d)));
    return b->kernels->layernorm_grad(
        at_or_null(dx), at_or_null(dw), at_or_null(db), pg_tensor_at(dy), pg_tensor_at(x),
        at_or_null(w), pg_tensor_at(mean), pg_tensor_at(rstd), at_or_null(base), n, d, add_x, add_w,
        add_b, scratch, x->dtype, dtype_w, b->stream);
}
