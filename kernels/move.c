/* move.c: taking a slice out of a tensor or placing one into it, and changing the order of dims.
 *
 * Nothing is computed, so any dtype moves by its size; only `add` needs floating numbers.  First a
 * permute merges dims that stay neighbours; then either rows lie whole in both tensors, or it walks
 * square tiles over the two dims that are contiguous in one of them, so each cache line is used up
 * while it is there. */
#include "cpu.h"
#include "permute.h"
#include "vecmath.h"

#define TILE 32 /* 32 x 32 doubles: 8 KiB a side */

PG_CLONES static void add_f32(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}
PG_CLONES static void add_f64(double *y, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

static void move_run(char *y, const char *x, int64_t n, int add, int dtype) {
    if (!add) memcpy(y, x, (size_t)(n * pg_dtype_size(dtype)));
    else if (dtype == PG_F32) add_f32((float *)y, (const float *)x, n);
    else add_f64((double *)y, (const double *)x, n);
}

int cpu_move(void *y, const void *x, int64_t outer, int64_t ny, int64_t y0, int64_t nx, int64_t x0,
             int64_t n, int64_t inner, int add, int dtype, pg_stream s) {
    (void)s;
    if (add) PG_TRY(cpu_floating("slice", dtype));
    int64_t length = n * inner, total = outer * length, size = pg_dtype_size(dtype);
#pragma omp parallel for schedule(static) if (total >= CPU_MANY)
    for (int64_t piece = 0; piece < total; piece += CPU_GRAIN) {
        int64_t end = pg_min64(total, piece + CPU_GRAIN);
        for (int64_t i = piece, run; i < end; i += run) {
            int64_t o = i / length, at = i % length;
            run = pg_min64(end - i, length - at);
            move_run((char *)y + ((o * ny + y0) * inner + at) * size,
                     (const char *)x + ((o * nx + x0) * inner + at) * size, run, add, dtype);
        }
    }
    return PG_OK;
}

static int permute_rows(char *y, const char *x, const pg_walk *w, int64_t count, int add,
                        int dtype) {
    int last = w->n - 1;
    int64_t length = w->size[last], rows = count / length, size = pg_dtype_size(dtype);
#pragma omp parallel for schedule(static) if (count >= CPU_MANY)
    for (int64_t row = 0; row < rows; row++) {
        int64_t from, to;
        pg_walk_start(w, row, last, last, &from, &to);
        move_run(y + to * size, x + from * size, length, add, dtype);
    }
    return PG_OK;
}

/* y[i][j] (+)= x[j][i] for a tile; y's rows are step_y apart, x's step_x */
#define TRANSPOSE(name, T, op)                                                                     \
    static void name(void *to, const void *from, int64_t ni, int64_t nj, int64_t step_y,           \
                     int64_t step_x) {                                                             \
        T *y = to;                                                                                 \
        const T *x = from;                                                                         \
        for (int64_t i = 0; i < ni; i++)                                                           \
            for (int64_t j = 0; j < nj; j++) y[i * step_y + j] op x[j * step_x + i];               \
    }
TRANSPOSE(tile_1, uint8_t, =)
TRANSPOSE(tile_2, uint16_t, =)
TRANSPOSE(tile_4, uint32_t, =)
TRANSPOSE(tile_8, uint64_t, =)
TRANSPOSE(tile_add_f32, float, +=)
TRANSPOSE(tile_add_f64, double, +=)

typedef void (*tile_function)(void *, const void *, int64_t, int64_t, int64_t, int64_t);

static tile_function tile_for(int add, int dtype) {
    if (add) return dtype == PG_F32 ? tile_add_f32 : tile_add_f64;
    switch (pg_dtype_size(dtype)) {
    case 1: return tile_1;
    case 2: return tile_2;
    case 4: return tile_4;
    default: return tile_8;
    }
}

/* Dim a is contiguous in x, the last dim b in y. */
static int permute_tiles(char *y, const char *x, const pg_walk *w, int a, int64_t count, int add,
                         int dtype) {
    int b = w->n - 1;
    int64_t size = pg_dtype_size(dtype), na = w->size[a], nb = w->size[b];
    int64_t tiles_a = (na + TILE - 1) / TILE, tiles_b = (nb + TILE - 1) / TILE;
    int64_t jobs = count / (na * nb) * tiles_a * tiles_b;
    tile_function tile = tile_for(add, dtype);
#pragma omp parallel for schedule(static) if (count >= CPU_MANY)
    for (int64_t job = 0; job < jobs; job++) {
        int64_t j = job % tiles_b * TILE, i = job / tiles_b % tiles_a * TILE, from, to;
        pg_walk_start(w, job / (tiles_a * tiles_b), a, b, &from, &to);
        from += i + j * w->x[b];
        to += i * w->y[a] + j;
        tile(y + to * size, x + from * size, pg_min64(TILE, na - i), pg_min64(TILE, nb - j),
             w->y[a], w->x[b]);
    }
    return PG_OK;
}

int cpu_permute(void *y, const void *x, int ndim, const int64_t *dims_x, const int32_t *order,
                int add, int dtype, pg_stream s) {
    (void)s;
    if (add) PG_TRY(cpu_floating("permute", dtype));
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= dims_x[i];
    if (!count) return PG_OK;
    pg_walk w = pg_walk_plan(ndim, dims_x, order);
    if (w.x[w.n - 1] == 1) return permute_rows(y, x, &w, count, add, dtype);
    int a = 0;
    while (w.x[a] != 1) a++;
    return permute_tiles(y, x, &w, a, count, add, dtype);
}
