/* check.h: the argument checks that all ops share.  Each gives PG_OK, or a code with a message that
 * names the op, the tensors as the caller calls them, their shapes and the rule.
 *
 * An op reads: PG_POLL; PG_GIVEN; its rules; PG_OPEN; one call of a kernel.  Rules look at shapes
 * and dtypes alone, so they also hold on the shape backend; only PG_OPEN touches storage. */
#ifndef PG_CHECK_ARGS_H
#define PG_CHECK_ARGS_H
#include "tensor.h"

#define PG_LIST(...)   ((const pg_tensor *const[]){__VA_ARGS__})
#define PG_LIST_N(...) ((int)(sizeof PG_LIST(__VA_ARGS__) / sizeof(const pg_tensor *)))

/* No tensor of the list is NULL. */
#define PG_GIVEN(op, ...)                                                                          \
    PG_TRY(pg_check_given(op, #__VA_ARGS__, PG_LIST(__VA_ARGS__), PG_LIST_N(__VA_ARGS__)))
/* Declares `const pg_backend *b` with kernels to call; leaves the op with PG_OK where shapes are
 * all there is.  Tensors of the list must be usable; NULL ones are skipped. */
#define PG_OPEN(b, op, ...)                                                                        \
    const pg_backend *b = NULL;                                                                    \
    PG_TRY(pg_check_open(&b, op, PG_LIST(__VA_ARGS__), PG_LIST_N(__VA_ARGS__)));                   \
    if (!b->kernels) return PG_OK

/* Two tensors, named by the expressions given: equal dtypes; equal shapes; equal counts. */
#define PG_SAME_DTYPE(op, x, y) PG_TRY(pg_check_dtype(op, #x, x, #y, y))
#define PG_MIXED(op, y, x)      PG_TRY(pg_check_mixed(op, #y, y, #x, x)) /* or y f32 beside half */
#define PG_SAME_SHAPE(op, x, y) PG_TRY(pg_check_shape(op, #x, x, #y, y))
#define PG_SAME_COUNT(op, x, y) PG_TRY(pg_check_count(op, #x, x, #y, y))
#define PG_LIKE(op, x, y)       /* dtype and shape */                                              \
    do {                                                                                           \
        PG_SAME_DTYPE(op, x, y);                                                                   \
        PG_SAME_SHAPE(op, x, y);                                                                   \
    } while (0)
#define PG_FLOATING(op, x)     PG_TRY(pg_check_floating(op, #x, x))
#define PG_HAS_DTYPE(op, x, d) PG_TRY(pg_check_is(op, #x, x, d))
#define PG_HAS_COUNT(op, x, n) PG_TRY(pg_check_holds(op, #x, x, n))
/* y shares no number with x; or at most all of them, in place (for elementwise kernels). */
#define PG_APART(op, y, x)    PG_TRY(pg_check_apart(op, #y, y, #x, x, 0))
#define PG_IN_PLACE(op, y, x) PG_TRY(pg_check_apart(op, #y, y, #x, x, 1))

int pg_check_given(const char *op, const char *names, const pg_tensor *const *list, int n);
int pg_check_open(const pg_backend **b, const char *op, const pg_tensor *const *list, int n);
int pg_check_dtype(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                   const pg_tensor *y);
int pg_check_mixed(const char *op, const char *name_y, const pg_tensor *y, const char *name_x,
                   const pg_tensor *x);
int pg_check_shape(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                   const pg_tensor *y);
int pg_check_count(const char *op, const char *name_x, const pg_tensor *x, const char *name_y,
                   const pg_tensor *y);
int pg_check_floating(const char *op, const char *name, const pg_tensor *x);
int pg_check_is(const char *op, const char *name, const pg_tensor *x, int dtype);
int pg_check_holds(const char *op, const char *name, const pg_tensor *x, int64_t count);
int pg_check_apart(const char *op, const char *name_y, const pg_tensor *y, const char *name_x,
                   const pg_tensor *x, int in_place);
/* 0 <= kind < kinds. */
int pg_check_kind(const char *op, int kind, int kinds);
/* A step block: f64 of PG_STEP_SIZE numbers; NULL passes. */
int pg_check_step(const char *op, const pg_tensor *step);

/* Product of dims [from, to); 1 when empty. */
int64_t pg_dims_product(const pg_tensor *t, int from, int to);
/* The last dim, 1 for a scalar. */
int64_t pg_last_dim(const pg_tensor *t);

static inline void *at_or_null(const pg_tensor *t) { return t ? pg_tensor_at(t) : NULL; }
#endif
