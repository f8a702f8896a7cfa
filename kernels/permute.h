/* permute.h: how a permute walks: the dims of y with their steps in x and in y, those that stay
 * neighbours merged.  Shared by move.c and move.cu.
 *
 * Then either the last dim is contiguous in both tensors, and rows move whole; or one dim, the
 * first whose x step is 1, is contiguous in x and the last one in y: a pile of transposes. */
#ifndef PG_PERMUTE_H
#define PG_PERMUTE_H
#include "../runtime/base/types.h"

#ifdef __CUDACC__
#define PG_WALK static inline __host__ __device__
#else
#define PG_WALK static inline
#endif

/* The dims of y, slowest first, with the steps that one of each makes in x and in y. */
typedef struct {
    int n;
    int64_t size[PG_MAX_DIMS], x[PG_MAX_DIMS], y[PG_MAX_DIMS];
} pg_walk;

static inline pg_walk pg_walk_plan(int ndim, const int64_t *dims_x, const int32_t *order) {
    pg_walk w;
    int64_t steps_x[PG_MAX_DIMS], step = 1;
    w.n = 0;
    for (int i = ndim - 1; i >= 0; step *= dims_x[i--]) steps_x[i] = step;
    for (int i = 0; i < ndim; i++) {
        int64_t size = dims_x[order[i]], in_x = steps_x[order[i]];
        if (size == 1) continue;
        if (w.n && w.x[w.n - 1] == size * in_x) { /* still neighbours: one dim */
            w.size[w.n - 1] *= size;
            w.x[w.n - 1] = in_x;
        } else {
            w.size[w.n] = size;
            w.x[w.n++] = in_x;
        }
    }
    if (!w.n) w.size[0] = w.x[0] = w.n = 1;
    step = 1;
    for (int i = w.n - 1; i >= 0; step *= w.size[i--]) w.y[i] = step;
    return w;
}

/* Where job `index` of the dims other than a and b starts. */
PG_WALK void pg_walk_start(const pg_walk *w, int64_t index, int a, int b, int64_t *x, int64_t *y) {
    *x = *y = 0;
    for (int i = w->n - 1; i >= 0; i--) {
        if (i == a || i == b) continue;
        *x += index % w->size[i] * w->x[i];
        *y += index % w->size[i] * w->y[i];
        index /= w->size[i];
    }
}
#endif
