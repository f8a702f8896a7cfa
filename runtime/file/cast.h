/* cast.h: numbers of any dtype to any other, in host memory, for tensors on their way to and from
 * files.  As pg_copy: float to integer truncates (here it also stops at the type's limits, and NaN
 * gives 0), bf16 and f16 round to nearest even.  Integers pass through int64, never a double. */
#ifndef PG_CAST_H
#define PG_CAST_H
#include "../base/types.h"

/* dst and src need no alignment and must not overlap. */
void pg_cast(void *dst, int to, const void *src, int from, int64_t n);
#endif
