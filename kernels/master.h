/* master.h: half-precision weights with their f32 masters, for the updates of adamw.c.
 *
 * A master is either the f32 number itself, of which the value is the rounding to nearest even; or,
 * beside bf16, the 16 bits that bf16 lacks, as a signed number: bits = (value << 16) + master.  The
 * updates work on short runs in f32, so the masters get the very bits of an update in f32. */
#ifndef PG_MASTER_H
#define PG_MASTER_H
#include "cpu.h"

#define MASTER_RUN 512 /* numbers at a time: four buffers of 2 KiB on the stack, in the L1 cache */

typedef struct { /* a segment; m, v may be NULL */
    void *value, *master, *m, *v;
    const void *grad;
    int dtype, dtype_master, dtype_grad, dtype_m;
} master_state;

typedef struct { /* numbers [first, first + n) of it, in f32 */
    int64_t first, n;
    float *value, *m, *v; /* buffers below, or the segment's own numbers where they are f32 */
    const float *grad;
    float values[MASTER_RUN], ms[MASTER_RUN], vs[MASTER_RUN], grads[MASTER_RUN];
} master_run;

/* The run from `first` on, at most to `end`. */
void master_open(master_run *w, const master_state *t, int64_t first, int64_t end);
void master_close(master_run *w, const master_state *t);
#endif
