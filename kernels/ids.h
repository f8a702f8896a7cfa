/* ids.h: reading token ids and class numbers, which come as i32 or i64; on the host and on
 * the device. */
#ifndef PG_IDS_H
#define PG_IDS_H
#include "kernels.h"

#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    id_at(const void *ids, int64_t i, int dtype_ids) {
    return dtype_ids == PG_I32 ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
}
#endif
