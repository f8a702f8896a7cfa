/* typed_twice.h: compiles the loops of a kernel for both number types.
 *
 * A kernel NAME.c keeps its loops in NAME_typed.h, written with REAL the number type, N(name) the
 * name of a function for it, M(name) a function of vecmath.h, BLAS(name) one of cblas, and says
 *     #define TYPED_BODY "NAME_typed.h"
 *     #include "typed_twice.h"
 * which yields name_f32 and name_f64.  TYPED_CALL then picks by dtype.  This file has no guard. */
#include "cpu.h"
#include "vecmath.h"

#define REAL       float
#define N(name)    name##_f32
#define M(name)    name##f
#define BLAS(name) cblas_s##name
#include TYPED_BODY
#undef REAL
#undef N
#undef M
#undef BLAS

#define REAL       double
#define N(name)    name##_f64
#define M(name)    name
#define BLAS(name) cblas_d##name
#include TYPED_BODY
#undef REAL
#undef N
#undef M
#undef BLAS

/* Run name_f32 or name_f64 and return PG_OK from the kernel; or refuse the dtype. */
#define TYPED_CALL(name, dtype, ...)                                                               \
    do {                                                                                           \
        PG_TRY(cpu_floating(#name, dtype));                                                        \
        if ((dtype) == PG_F32) name##_f32(__VA_ARGS__);                                            \
        else name##_f64(__VA_ARGS__);                                                              \
        return PG_OK;                                                                              \
    } while (0)
