/* loss.c: softmax, log-softmax, and the cross-entropy that never stores probabilities: the forward
 * pass keeps one number a row (lse), the gradient works them out again.  Where ranks hold a part of
 * the columns each, a rank's forward pass is two numbers a row, which join to the loss of the
 * whole.  Sums of losses are in double and in the order of the rows, whatever the threads.
 * Arithmetic: loss_typed.h. */
#include "ids.h"
#define CHUNK      1024 /* exponentials summed before they enter the double */
#define TYPED_BODY "loss_typed.h"
#include "typed_twice.h"

int cpu_softmax(void *y, const void *x, int64_t n, int64_t v, int log, int dtype, pg_stream s) {
    (void)s;
    TYPED_CALL(softmax, dtype, y, x, n, v, log);
}

int cpu_softmax_grad(void *dx, const void *dy, const void *y, int64_t n, int64_t v, int log,
                     int add, int dtype, pg_stream s) {
    (void)s;
    TYPED_CALL(softmax_grad, dtype, dx, dy, y, n, v, log, add);
}

int64_t cpu_check_ids(const void *ids, int64_t n, int64_t v, int64_t ignore, int dtype_ids,
                      pg_stream s) {
    (void)s;
    for (int64_t i = 0; i < n; i++) {
        int64_t id = id_at(ids, i, dtype_ids);
        if ((id < 0 || id >= v) && id != ignore) return i;
    }
    return -1;
}

int64_t cpu_cross_entropy_scratch(int64_t n) { return n * (int64_t)sizeof(double); }

int cpu_cross_entropy(void *out, void *rows, void *lse, const void *logits, const void *targets,
                      int64_t n, int64_t v, int64_t ignore, const double *step, void *scratch,
                      int dtype, int dtype_ids, pg_stream s) {
    (void)s;
    TYPED_CALL(cross_entropy, dtype, out, rows, lse, logits, targets, n, v, ignore, step, scratch,
               dtype_ids);
}

int cpu_cross_entropy_grad(void *dlogits, const void *dloss, int per_row, const void *logits,
                           const void *targets, const void *lse, const void *out, int64_t n,
                           int64_t v, int64_t first, int64_t valid, int64_t ignore,
                           const double *step, int add, int dtype, int dtype_ids, pg_stream s) {
    (void)s;
    TYPED_CALL(cross_entropy_grad, dtype, dlogits, dloss, per_row, logits, targets, lse, out, n, v,
               first, valid, ignore, step, add, dtype_ids);
}

int cpu_vocab_stats(void *stats, const void *logits, const void *targets, int64_t n, int64_t v,
                    int64_t first, int64_t valid, int64_t ignore, int dtype, int dtype_ids,
                    pg_stream s) {
    (void)s;
    TYPED_CALL(vocab_stats, dtype, stats, logits, targets, n, v, first, valid, ignore, dtype_ids);
}

int cpu_vocab_loss(void *out, void *rows, void *lse, const void *parts, const void *targets,
                   int64_t r, int64_t n, int64_t ignore, const double *step, void *scratch,
                   int dtype, int dtype_ids, pg_stream s) {
    (void)s;
    TYPED_CALL(vocab_loss, dtype, out, rows, lse, parts, targets, r, n, ignore, step, scratch,
               dtype_ids);
}
