/* swiglu_typed.h: y = silu(gate) * up and its gradient, row by row; see typed_twice.h. */

PG_CLONES static void N(swiglu_row)(REAL *restrict y, const REAL *restrict gate,
                                     const REAL *restrict up, int64_t f) {
    for (int64_t i = 0; i < f; i++) y[i] = gate[i] * M(vsigmoid)(gate[i]) * up[i];
}

static void N(swiglu)(REAL *y, const REAL *x, int64_t n, int64_t f) {
#pragma omp parallel for if (n * f >= CPU_MANY)
    for (int64_t i = 0; i < n; i++) N(swiglu_row)(y + i * f, x + 2 * i * f, x + (2 * i + 1) * f, f);
}

/* With s = sigmoid(gate): d gate = dy up s (1 + gate (1 - s)), d up = dy gate s.
 * dx may be x: the two halves of a row are read before they are written. */
PG_CLONES static void N(swiglu_grad_row)(REAL *dgate, REAL *dup, const REAL *dy, const REAL *gate,
                                          const REAL *up, int64_t f, int add) {
    if (!add) {
#pragma omp simd
        for (int64_t i = 0; i < f; i++) {
            REAL g = gate[i], s = M(vsigmoid)(g), u = up[i];
            dgate[i] = dy[i] * u * s * (1 + g * (1 - s));
            dup[i] = dy[i] * g * s;
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < f; i++) {
        REAL g = gate[i], s = M(vsigmoid)(g), u = up[i];
        dgate[i] += dy[i] * u * s * (1 + g * (1 - s));
        dup[i] += dy[i] * g * s;
    }
}

static void N(swiglu_grad)(REAL *dx, const REAL *dy, const REAL *x, int64_t n, int64_t f, int add) {
#pragma omp parallel for if (n * f >= CPU_MANY)
    for (int64_t i = 0; i < n; i++) {
        int64_t gate = 2 * i * f, up = gate + f;
        N(swiglu_grad_row)(dx + gate, dx + up, dy + i * f, x + gate, x + up, f, add);
    }
}
