/* tensor.h: what a tensor is, for the core alone: a shape over a run of a shared, counted storage. */
#ifndef PG_TENSOR_H
#define PG_TENSOR_H
#include "../backend/pool.h"

typedef struct {
    void *block;       /* NULL on the shape backend, and while dropped */
    int64_t bytes;
    int32_t handles;   /* tensors that share it */
    int32_t tag;
    int32_t has_data;  /* 0: made under pg_shape_only or by the shape backend */
    char *dropped;     /* name given by pg_storage_drop while empty, else NULL */
} pg_storage;

struct pg_tensor {
    pg_storage *storage;
    int64_t first;     /* elements from the start of the storage */
    int64_t count;
    int64_t dims[PG_MAX_DIMS];
    int32_t ndim, dtype;
};

/* The address of element 0; only after pg_tensor_usable(). */
void *pg_tensor_at(const pg_tensor *t);
/* PG_OK, or why its numbers cannot be touched (freed, dropped, no data): names `op`. */
int pg_tensor_usable(const pg_tensor *t, const char *op);
/* "[32,128] f32" into a small ring of per-thread buffers: safe for a few uses in one message. */
const char *pg_shape_text(const pg_tensor *t);
int pg_same_shape(const pg_tensor *a, const pg_tensor *b);
#endif
