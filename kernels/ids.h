/* ids.h: reading token ids and class numbers, which come as i32 or i64; on the host and on
 * the device. */
#ifndef PG_IDS_H
#define PG_IDS_H
#include "kernels.h"

#ifdef __CUDACC__
#define ANY_SIDE static inline __host__ __device__
#else
#define ANY_SIDE static inline
#endif

ANY_SIDE int64_t id_at(const void *ids, int64_t i, int dtype_ids) {
    return dtype_ids == PG_I32 ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
}

/* Which of a table's v rows, those of ids first .. first + v, id i names; -1: none. */
ANY_SIDE int64_t row_at(const void *ids, int64_t i, int dtype_ids, int64_t first, int64_t v) {
    int64_t row = id_at(ids, i, dtype_ids) - first;
    return row >= 0 && row < v ? row : -1;
}
#endif
