/* sample_typed.h: finding the largest number of a row, and exp of a row; see typed_twice.h. */

/* The first of the largest; NaNs never win, and a row of nothing else gives 0. */
PG_CLONES static int64_t N(argmax_row)(const REAL *x, int64_t v) {
    REAL m = -INFINITY;
#pragma omp simd reduction(max : m)
    for (int64_t i = 0; i < v; i++) m = x[i] > m ? x[i] : m;
    for (int64_t i = 0; i < v; i++)
        if (x[i] == m) return i;
    return 0;
}

static void N(argmax)(void *ids, const REAL *x, int64_t n, int64_t v, int dtype_ids) {
#pragma omp parallel for if (n * v >= CPU_MANY)
    for (int64_t i = 0; i < n; i++) {
        int64_t best = N(argmax_row)(x + i * v, v);
        if (dtype_ids == PG_I32) ((int32_t *)ids)[i] = (int32_t)best;
        else ((int64_t *)ids)[i] = best;
    }
}

/* Candidates of one row with their weights exp((x - max) / temperature); returns their sum. */
static double N(weigh)(candidate *list, const REAL *x, int64_t v, double temperature) {
    double m = (double)x[N(argmax_row)(x, v)], sum = 0;
    for (int64_t i = 0; i < v; i++) {
        double weight = (double)x[i] == m ? 1 : exp(((double)x[i] - m) / temperature);
        list[i] = (candidate){weight > 0 ? weight : 0, (int32_t)i}; /* a NaN weighs nothing */
        sum += list[i].weight;
    }
    return sum;
}

static void N(sample)(int32_t *ids, const REAL *logits, int64_t n, int64_t v, double temperature,
                       int64_t top_k, double top_p, uint64_t stream, int64_t first,
                       candidate *scratch) {
#pragma omp parallel for if (n * v >= CPU_MANY / 4)
    for (int64_t i = 0; i < n; i++) {
        candidate *list = scratch + omp_get_thread_num() * v;
        double sum = N(weigh)(list, logits + i * v, v, temperature);
        ids[i] = draw(list, v, sum, top_k, top_p, unit(stream, first + i));
    }
}
