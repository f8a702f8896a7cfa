/* random.c: uniform and normal fills and dropout, all by counter (philox.h).
 *
 * An element's number depends on its index in the whole parameter or batch alone, so a slice is
 * filled the same in every layout.  Blocks of Philox are computed several at a time, as vectors. */
#include "cpu.h"
#include "philox.h"
#include "vecmath.h"

#define LANES 32 /* Philox blocks computed together */

/* words[w][l] = word w of block first + l, for all LANES */
PG_INLINE void blocks(uint32_t words[4][LANES], uint64_t stream, uint64_t first) {
    for (int l = 0; l < LANES; l++) {
        pg_philox b = pg_philox_block(stream, first + (uint64_t)l);
        for (int w = 0; w < 4; w++) words[w][l] = b.word[w];
    }
}

/* The 4 LANES uniform numbers of these blocks, in the order of their indices. */
PG_CLONES static void units_of(float *out, uint64_t stream, uint64_t first) {
    uint32_t words[4][LANES];
    blocks(words, stream, first);
    for (int l = 0; l < LANES; l++)
        for (int w = 0; w < 4; w++) out[4 * l + w] = pg_philox_unit(words[w][l]);
}

/* Their 2 LANES numbers of mean 0 and deviation 1. */
PG_CLONES static void normals_of(double *out, uint64_t stream, uint64_t first) {
    uint32_t words[4][LANES];
    blocks(words, stream, first);
    for (int l = 0; l < LANES; l++) {
        out[2 * l] = pg_philox_gauss(words[0][l], words[1][l]);
        out[2 * l + 1] = pg_philox_gauss(words[2][l], words[3][l]);
    }
}

void cpu_units(float *out, uint64_t stream, int64_t first, int64_t n) {
    float all[4 * LANES];
    for (int64_t i = first, end = first + n, next; i < end; i = next) {
        int64_t start = i & ~(int64_t)3;
        next = pg_min64(end, start + 4 * LANES);
        units_of(all, stream, (uint64_t)start >> 2);
        memcpy(out + (i - first), all + (i - start), (size_t)(next - i) * sizeof *out);
    }
}

/* The same for numbers of mean 0 and deviation 1. */
static void normals(double *out, uint64_t stream, int64_t first, int64_t n) {
    double all[2 * LANES];
    for (int64_t i = first, end = first + n, next; i < end; i = next) {
        int64_t start = i & ~(int64_t)1;
        next = pg_min64(end, start + 2 * LANES);
        normals_of(all, stream, (uint64_t)start >> 1);
        memcpy(out + (i - first), all + (i - start), (size_t)(next - i) * sizeof *out);
    }
}

/* The longest run from element i whose indices follow each other, at most `most` long. */
static int64_t run_at(pg_index_map map, int64_t i, int64_t most, int64_t *index) {
    if (map.cols <= 0) {
        *index = map.first + i;
        return most;
    }
    int64_t column = i % map.cols;
    *index = map.first + i / map.cols * map.stride + column;
    return pg_min64(most, map.cols - column);
}

#define PIECE (16 * LANES) /* numbers drawn into a buffer on the stack at a time */

static int fill_random(void *y, int64_t n, uint64_t stream, int normal, double base, double factor,
                       pg_index_map map, int dtype) {
    int64_t size = pg_dtype_size(dtype);
#pragma omp parallel for schedule(static) if (n >= CPU_GRAIN)
    for (int64_t piece = 0; piece < n; piece += PIECE) {
        float units[PIECE];
        double values[PIECE];
        int64_t end = pg_min64(n, piece + PIECE), index;
        for (int64_t i = piece, length; i < end; i += length) {
            length = run_at(map, i, end - i, &index);
            if (normal) normals(values + (i - piece), stream, index, length);
            else cpu_units(units + (i - piece), stream, index, length);
        }
        for (int64_t i = 0; i < end - piece; i++)
            values[i] = base + factor * (normal ? values[i] : (double)units[i]);
        cpu_cast((char *)y + piece * size, values, end - piece, dtype, PG_F64, NULL);
    }
    return PG_OK;
}

int cpu_random_uniform(void *y, int64_t n, uint64_t seed, uint64_t key, double low, double high,
                       pg_index_map map, int dtype, pg_stream s) {
    (void)s;
    return fill_random(y, n, pg_philox_stream(seed, key), 0, low, high - low, map, dtype);
}

int cpu_random_normal(void *y, int64_t n, uint64_t seed, uint64_t key, double mean, double std,
                      pg_index_map map, int dtype, pg_stream s) {
    (void)s;
    return fill_random(y, n, pg_philox_stream(seed, key), 1, mean, std, map, dtype);
}

/* y (+)= x where kept, scaled by 1 / (1 - p) */
PG_CLONES static void drop_f32(float *y, const float *x, const float *units, int64_t n, float p,
                               float scale, int add) {
    for (int64_t i = 0; i < n; i++) {
        float kept = units[i] >= p ? x[i] * scale : 0;
        y[i] = add ? y[i] + kept : kept;
    }
}
PG_CLONES static void drop_f64(double *y, const double *x, const float *units, int64_t n, float p,
                               double scale, int add) {
    for (int64_t i = 0; i < n; i++) {
        double kept = units[i] >= p ? x[i] * scale : 0;
        y[i] = add ? y[i] + kept : kept;
    }
}

int cpu_dropout(void *y, const void *x, int64_t n, double p, const double *step, uint64_t key,
                pg_index_map map, int add, int dtype, pg_stream s) {
    (void)s;
    PG_TRY(cpu_floating("dropout", dtype));
    uint64_t stream = pg_philox_stream(step ? (uint64_t)step[PG_STEP_RANDOM] : 0, key);
    double scale = p < 1 ? 1 / (1 - p) : 0;
#pragma omp parallel for schedule(static) if (n >= CPU_GRAIN)
    for (int64_t piece = 0; piece < n; piece += PIECE) {
        float units[PIECE];
        int64_t end = pg_min64(n, piece + PIECE), index;
        for (int64_t i = piece, length; i < end; i += length) {
            length = run_at(map, i, end - i, &index);
            cpu_units(units + (i - piece), stream, index, length);
        }
        if (dtype == PG_F32)
            drop_f32((float *)y + piece, (const float *)x + piece, units, end - piece, (float)p,
                     (float)scale, add);
        else
            drop_f64((double *)y + piece, (const double *)x + piece, units, end - piece, (float)p,
                     scale, add);
    }
    return PG_OK;
}
