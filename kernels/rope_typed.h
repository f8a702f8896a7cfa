/* rope_typed.h: rotation of half-split pairs (x[i], x[i + half]); see typed_twice.h. */

static void N(rope_table)(REAL *cosine, REAL *sine, double theta, int64_t first, int64_t t,
                           int64_t half) {
#pragma omp parallel for if (t * half >= CPU_MANY / 16)
    for (int64_t row = 0; row < t; row++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)(first + row) * pow(theta, -(double)i / (double)half);
            cosine[row * half + i] = (REAL)cos(angle);
            sine[row * half + i] = (REAL)sin(angle);
        }
    }
}

/* One row of c columns: `heads` heads turn, the rest is copied.  y may be x (then add is 0). */
PG_CLONES static void N(rope_row)(REAL *y, const REAL *x, const REAL *cosine, const REAL *sine,
                                   int64_t c, int64_t heads, int64_t half, REAL sign, int add) {
    for (int64_t h = 0; h < heads; h++) {
        const REAL *low = x + 2 * h * half, *high = low + half;
        REAL *y_low = y + 2 * h * half, *y_high = y_low + half;
        if (add) {
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                REAL a = low[i], b = high[i], s = sign * sine[i];
                y_low[i] += a * cosine[i] - b * s;
                y_high[i] += b * cosine[i] + a * s;
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                REAL a = low[i], b = high[i], s = sign * sine[i];
                y_low[i] = a * cosine[i] - b * s;
                y_high[i] = b * cosine[i] + a * s;
            }
        }
    }
    int64_t turned = 2 * heads * half;
    if (add) {
        for (int64_t i = turned; i < c; i++) y[i] += x[i];
    } else if (y != x) {
        memcpy(y + turned, x + turned, (size_t)(c - turned) * sizeof *y);
    }
}

static void N(rope)(REAL *y, const REAL *x, const REAL *cosine, const REAL *sine, int64_t b,
                     int64_t t, int64_t c, int64_t heads, int64_t half, int64_t start, int sign,
                     int add) {
#pragma omp parallel for if (b * t * c >= CPU_MANY)
    for (int64_t row = 0; row < b * t; row++) {
        int64_t line = (start + row % t) * half;
        N(rope_row)(y + row * c, x + row * c, cosine + line, sine + line, c, heads, half,
                     (REAL)sign, add);
    }
}
