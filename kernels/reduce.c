/* reduce.c: sums, means, maxima and minima over one dim, and what their gradients need.
 *
 * x is [outer,n,inner].  The result is cut into jobs: one outer index and a tile of up to TILE
 * columns.  In a job the n rows are cut into parts by n alone; their results are joined in order.
 * With many jobs threads take jobs, with few they take parts: the bits are the same. */
#include "cpu.h"

#define PARTS 16
#define PART  2048 /* rows in a part, or more once PARTS are reached */
#define TILE                                                                                       \
    1024 /* columns: 4 KiB of a row of f32; narrower ones leave pages too fast for prefetching */
#define MANY 16 /* jobs that keep any usual number of threads busy */

#define TYPED_BODY "reduce_typed.h"
#include "typed_twice.h"

typedef struct {
    void *y;
    const void *x;
    int64_t n, inner, tiles, parts;
    int kind, add, dtype;
} reduction;

static int64_t width_of(const reduction *r, int64_t job) {
    return pg_min64(TILE, r->inner - job % r->tiles * TILE);
}

static void reduce_part(const reduction *r, int64_t job, int64_t part, double *acc) {
    int64_t rows = (r->n + r->parts - 1) / r->parts, k0 = pg_min64(r->n, part * rows);
    int64_t k1 = pg_min64(r->n, k0 + rows);
    int64_t at = (job / r->tiles * r->n + k0) * r->inner + job % r->tiles * TILE;
    const float *x32 = (const float *)r->x + at;
    const double *x64 = (const double *)r->x + at;
    if (r->inner == 1 && r->dtype == PG_F32) run_f32(acc, x32, k1 - k0, r->kind);
    else if (r->inner == 1) run_f64(acc, x64, k1 - k0, r->kind);
    else if (r->dtype == PG_F32)
        columns_f32(acc, x32, k1 - k0, r->inner, width_of(r, job), r->kind);
    else columns_f64(acc, x64, k1 - k0, r->inner, width_of(r, job), r->kind);
}

/* Joins the parts of a job, in order, and writes its columns.  Parts without rows hold 0: they are
 * the last ones, and left out of max and min. */
static void reduce_join(const reduction *r, int64_t job, double acc[][TILE]) {
    int64_t rows = (r->n + r->parts - 1) / r->parts, width = width_of(r, job);
    for (int64_t part = 1; part < r->parts && part * rows < r->n; part++)
        for (int64_t j = 0; j < width; j++) {
            double a = acc[0][j], b = acc[part][j];
            if (r->kind == PG_RMAX) acc[0][j] = b > a || b != b ? b : a;
            else if (r->kind == PG_RMIN) acc[0][j] = b < a || b != b ? b : a;
            else acc[0][j] = a + b;
        }
    double factor = r->kind == PG_MEAN ? 1 / (double)r->n : 1;
    int64_t at = job / r->tiles * r->inner + job % r->tiles * TILE;
    if (r->dtype == PG_F32) store_f32((float *)r->y + at, acc[0], width, factor, r->add);
    else store_f64((double *)r->y + at, acc[0], width, factor, r->add);
}

int cpu_reduce(void *y, const void *x, int kind, int64_t outer, int64_t n, int64_t inner, int add,
               int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("reduce", dtype));
    int64_t tiles = (inner + TILE - 1) / TILE, jobs = outer * tiles;
    int64_t parts = pg_max64(1, pg_min64(PARTS, n / PART));
    reduction r = {y, x, n, inner, tiles, parts, kind, add, dtype};
    int large = outer * n * inner >= CPU_MANY;
    if (jobs < MANY) {
        for (int64_t job = 0; job < jobs; job++) {
            double acc[PARTS][TILE];
#pragma omp parallel for schedule(static) if (large && parts > 1)
            for (int64_t part = 0; part < parts; part++) reduce_part(&r, job, part, acc[part]);
            reduce_join(&r, job, acc);
        }
        return PG_OK;
    }
#pragma omp parallel for schedule(static) if (large)
    for (int64_t job = 0; job < jobs; job++) {
        double acc[PARTS][TILE];
        for (int64_t part = 0; part < parts; part++) reduce_part(&r, job, part, acc[part]);
        reduce_join(&r, job, acc);
    }
    return PG_OK;
}

int cpu_expand(void *y, const void *x, double scale, int64_t outer, int64_t n, int64_t inner,
               int add, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("expand", dtype));
    int64_t total = outer * n * inner;
#pragma omp parallel for schedule(static) if (total >= CPU_MANY)
    for (int64_t piece = 0; piece < total; piece += CPU_GRAIN) {
        int64_t end = pg_min64(total, piece + CPU_GRAIN);
        for (int64_t i = piece, run; i < end; i += run) {
            /* the run that one line of x, or one number of it, covers from here */
            int64_t line = inner == 1 ? n : inner, column = i % line;
            int64_t from = inner == 1 ? i / n : i / (n * inner) * inner + column;
            run = pg_min64(end - i, line - column);
            if (dtype == PG_F32)
                spread_f32((float *)y + i, (const float *)x + from, (float)scale, run, inner == 1,
                           add);
            else spread_f64((double *)y + i, (const double *)x + from, scale, run, inner == 1, add);
        }
    }
    return PG_OK;
}

int cpu_reduce_grad(void *dx, const void *dy, const void *x, const void *y, int kind, int64_t outer,
                    int64_t n, int64_t inner, int add, int dtype, pg_stream s) {
    (void)s;
    (void)kind;
    PG_TRY(cpu_floating("reduce_grad", dtype));
    int64_t tiles = (inner + TILE - 1) / TILE, jobs = outer * tiles;
#pragma omp parallel for schedule(static) if (outer * n * inner >= CPU_MANY)
    for (int64_t job = 0; job < jobs; job++) {
        int64_t column = job % tiles * TILE, width = pg_min64(TILE, inner - column);
        int64_t in = job / tiles * n * inner + column, out = job / tiles * inner + column;
        if (dtype == PG_F32)
            pick_f32((float *)dx + in, (const float *)dy + out, (const float *)x + in,
                     (const float *)y + out, n, inner, width, add);
        else
            pick_f64((double *)dx + in, (const double *)dy + out, (const double *)x + in,
                     (const double *)y + out, n, inner, width, add);
    }
    return PG_OK;
}
