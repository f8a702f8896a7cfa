/* master.c: joining half-precision values with their masters and splitting them
 * again; see master.h. */
#include "master.h"
#include "vecmath.h"

PG_CLONES static void join_i16(float *y, const uint16_t *value, const int16_t *low, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        y[i] = bits_float(((uint32_t)value[i] << 16) + (uint32_t)(int32_t)low[i]);
}

/* A NaN becomes one that rounding cannot carry over into the sign: the value must show it. */
PG_CLONES static void split_i16(uint16_t *value, int16_t *low, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = float_bits(x[i]);
        bits = (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0x80000000u) | 0x7fc00000u : bits;
        uint32_t high = (bits + 0x8000u) >> 16;
        value[i] = (uint16_t)high;
        low[i] = (int16_t)(uint16_t)(bits - (high << 16));
    }
}

/* Number i of a buffer whose numbers have that dtype. */
static void *place(const void *at, int64_t i, int dtype) {
    return (char *)at + i * pg_dtype_size(dtype);
}

/* The run of `from` as f32: in place, or in the buffer. */
static float *opened(float *buffer, const void *from, int64_t i, int64_t n, int dtype) {
    if (!from) return NULL;
    if (dtype == PG_F32) return place(from, i, dtype);
    cpu_widen(buffer, place(from, i, dtype), n, dtype);
    return buffer;
}

void master_open(master_run *w, const master_state *t, int64_t first, int64_t end) {
    int64_t n = pg_min64(MASTER_RUN, end - first);
    w->first = first, w->n = n;
    w->grad = opened(w->grads, t->grad, first, n, t->dtype_grad);
    w->m = opened(w->ms, t->m, first, n, t->dtype_m);
    w->v = opened(w->vs, t->v, first, n, t->dtype_m);
    if (t->dtype_master == PG_F32) {
        w->value = place(t->master, first, PG_F32);
    } else {
        w->value = w->values;
        join_i16(w->value, place(t->value, first, PG_BF16), place(t->master, first, PG_I16), n);
    }
}

void master_close(master_run *w, const master_state *t) {
    void *value = place(t->value, w->first, t->dtype);
    if (t->dtype_master == PG_F32) cpu_narrow(value, w->value, w->n, t->dtype);
    else split_i16(value, place(t->master, w->first, PG_I16), w->value, w->n);
    if (t->dtype_m == PG_F32) return;
    if (w->m) cpu_narrow(place(t->m, w->first, t->dtype_m), w->m, w->n, t->dtype_m);
    if (w->v) cpu_narrow(place(t->v, w->first, t->dtype_m), w->v, w->n, t->dtype_m);
}

int cpu_master_join(float *out, const void *value, const void *master, int64_t n, int dtype,
                    int dtype_master, pg_stream s) {
    (void)s;
    if (dtype_master == PG_F32) return cpu_cast(out, master, n, PG_F32, PG_F32, s);
    (void)dtype;
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN)
        join_i16(out + i, (const uint16_t *)value + i, (const int16_t *)master + i,
                 pg_min64(CPU_GRAIN, n - i));
    return PG_OK;
}

int cpu_master_split(void *value, void *master, const float *in, int64_t n, int dtype,
                     int dtype_master, pg_stream s) {
    if (dtype_master == PG_F32) {
        PG_TRY(cpu_cast(value, in, n, dtype, PG_F32, s));
        return cpu_cast(master, in, n, PG_F32, PG_F32, s);
    }
#pragma omp parallel for schedule(static) if (n >= CPU_MANY)
    for (int64_t i = 0; i < n; i += CPU_GRAIN)
        split_i16((uint16_t *)value + i, (int16_t *)master + i, in + i, pg_min64(CPU_GRAIN, n - i));
    return PG_OK;
}
