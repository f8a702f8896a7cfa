/* elementwise_typed.h: the loops of elementwise.c over a piece of numbers; see typed_twice.h. */

/* The value of kind at x.  kind is a constant wherever this is inlined, so no test is left.  A NaN
 * passes through each of them; relu and max are written so that it does. */
PG_INLINE REAL N(value)(REAL x, int kind) {
    const REAL root_half = (REAL)0.70710678118654752440, a = (REAL)0.044715;
    const REAL root_2_pi = (REAL)0.79788456080286535588; /* sqrt(2 / pi) */
    switch (kind) {
    case PG_RELU: return x < 0 ? 0 : x;
    case PG_SILU: return x * M(vsigmoid)(x);
    case PG_GELU: return x * ((REAL)0.5 + (REAL)0.5 * M(verf)(x * root_half));
    case PG_GELU_TANH:
        return x * ((REAL)0.5 + (REAL)0.5 * M(vtanh)(root_2_pi * (x + a * x * x * x)));
    case PG_TANH: return M(vtanh)(x);
    case PG_SIGMOID: return M(vsigmoid)(x);
    case PG_EXP: return M(vexp)(x);
    case PG_LOG: return M(vlog)(x);
    case PG_SQRT: return M(sqrt)(x);
    case PG_SQUARE: return x * x;
    case PG_NEG: return -x;
    default: return M(fabs)(x);
    }
}

/* Its derivative at x; at the corner of relu and abs it is 0. */
PG_INLINE REAL N(slope)(REAL x, int kind) {
    const REAL root_half = (REAL)0.70710678118654752440, a = (REAL)0.044715;
    const REAL root_2_pi = (REAL)0.79788456080286535588;
    const REAL density = (REAL)0.39894228040143267794; /* 1 / sqrt(2 pi) */
    REAL s, inner, phi;
    switch (kind) {
    case PG_RELU: return x > 0 ? 1 : 0;
    case PG_SILU: s = M(vsigmoid)(x); return s + x * s * (1 - s);
    case PG_GELU:
        phi = (REAL)0.5 + (REAL)0.5 * M(verf)(x * root_half);
        return phi + x * density * M(vexp)((REAL)-0.5 * x * x);
    case PG_GELU_TANH:
        s = M(vtanh)(root_2_pi * (x + a * x * x * x));
        inner = root_2_pi * (1 + 3 * a * x * x);
        return (REAL)0.5 * (1 + s) + (REAL)0.5 * x * (1 - s * s) * inner;
    case PG_TANH: s = M(vtanh)(x); return 1 - s * s;
    case PG_SIGMOID: s = M(vsigmoid)(x); return s * (1 - s);
    case PG_EXP: return M(vexp)(x);
    case PG_LOG: return 1 / x;
    case PG_SQRT: return (REAL)0.5 / M(sqrt)(x);
    case PG_SQUARE: return 2 * x;
    case PG_NEG: return -1;
    default: return x > 0 ? 1 : x < 0 ? -1 : 0;
    }
}

#define ALL_UNARY(DO)                                                                              \
    DO(PG_RELU)                                                                                    \
    DO(PG_SILU)                                                                                    \
    DO(PG_GELU)                                                                                    \
    DO(PG_GELU_TANH)                                                                               \
    DO(PG_TANH) DO(PG_SIGMOID) DO(PG_EXP) DO(PG_LOG) DO(PG_SQRT) DO(PG_SQUARE) DO(PG_NEG) DO(PG_ABS)

PG_CLONES static void N(unary)(REAL *y, const REAL *x, int64_t n, int kind) {
#define ONE(K)                                                                                     \
    case K:                                                                                        \
        for (int64_t i = 0; i < n; i++) y[i] = N(value)(x[i], K);                                  \
        break;
    switch (kind) { ALL_UNARY(ONE) }
#undef ONE
}

PG_CLONES static void N(unary_grad)(REAL *dx, const REAL *dy, const REAL *x, int64_t n, int kind,
                                    int add) {
#define ONE(K)                                                                                     \
    case K:                                                                                        \
        if (add)                                                                                   \
            for (int64_t i = 0; i < n; i++) dx[i] += dy[i] * N(slope)(x[i], K);                    \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) dx[i] = dy[i] * N(slope)(x[i], K);                     \
        break;
    switch (kind) { ALL_UNARY(ONE) }
#undef ONE
}
#undef ALL_UNARY

PG_INLINE REAL N(combine)(REAL a, REAL b, int kind) {
    switch (kind) {
    case PG_ADD: return a + b;
    case PG_SUB: return a - b;
    case PG_MUL: return a * b;
    case PG_DIV: return a / b;
    case PG_MAX: return a > b || a != a ? a : b;
    default: return a < b || a != a ? a : b;
    }
}

/* step_b 1: b runs beside a; 0: b is one number */
PG_INLINE void N(pairs)(REAL *y, const REAL *a, const REAL *b, int64_t n, int step_b, int kind,
                        int add) {
    if (!step_b) {
        const REAL c = *b; /* y may be where b is */
        if (add)
            for (int64_t i = 0; i < n; i++) y[i] += N(combine)(a[i], c, kind);
        else
            for (int64_t i = 0; i < n; i++) y[i] = N(combine)(a[i], c, kind);
    } else if (add) {
        for (int64_t i = 0; i < n; i++) y[i] += N(combine)(a[i], b[i], kind);
    } else {
        for (int64_t i = 0; i < n; i++) y[i] = N(combine)(a[i], b[i], kind);
    }
}

PG_CLONES static void N(binary)(REAL *y, const REAL *a, const REAL *b, int64_t n, int step_b,
                                int kind, int add) {
#define ONE(K)                                                                                     \
    case K: N(pairs)(y, a, b, n, step_b, K, add); break;
    switch (kind) { ONE(PG_ADD) ONE(PG_SUB) ONE(PG_MUL) ONE(PG_DIV) ONE(PG_MAX) ONE(PG_MIN) }
#undef ONE
}

/* beta 0 writes: what y held, a NaN too, is gone */
PG_CLONES static void N(axpby)(REAL *y, const REAL *x, REAL alpha, REAL beta, int64_t n) {
    if (beta == 0)
        for (int64_t i = 0; i < n; i++) y[i] = alpha * x[i];
    else if (beta == 1)
        for (int64_t i = 0; i < n; i++) y[i] += alpha * x[i];
    else
        for (int64_t i = 0; i < n; i++) y[i] = alpha * x[i] + beta * y[i];
}
