/* tensor.h: what a tensor is, for the core alone: a shape over a run of a
 * shared, counted storage. */
#ifndef PG_TENSOR_H
#define PG_TENSOR_H
#include "../backend/pool.h"

/* What the host knows of the ids in a whole storage: noted when they are written or copied, so that
 * an op can check them without asking the device.  Unknown at first, and after any other write. */
typedef struct {
    int32_t known;
    int64_t high;     /* no id is larger */
    int64_t negative; /* the one value below 0 among them (an ignore index), or 0: none */
} pg_id_range;

typedef struct {
    void *block; /* NULL on the shape backend, and while dropped */
    int64_t bytes;
    int32_t handles; /* tensors that share it */
    int32_t owners;  /* those, and the graphs that hold it */
    int32_t works;   /* collectives under way, of which somebody has a pg_work, that hold it */
    int32_t tag;
    int32_t has_data; /* 0: made under pg_shape_only or by the shape backend */
    int32_t exposed;  /* 1: pg_tensor_data gave its address away; ids are never known again */
    pg_id_range ids;
    pg_arena *arena;  /* that the block is of, or NULL */
    int64_t recorded; /* number of the recording that has it in its list, */
    int64_t entry;    /* and where */
    char *dropped;    /* name given by pg_storage_drop while empty, else NULL */
} pg_storage;

struct pg_tensor {
    pg_storage *storage;
    int64_t first; /* elements from the start of the storage */
    int64_t count;
    int64_t dims[PG_MAX_DIMS];
    int32_t ndim, dtype;
};

/* One owner less; the last gives the block back. */
void pg_storage_release(pg_storage *s);
/* The address of element 0; only after pg_tensor_usable().  Whoever takes it may write: what was
 * known of the ids is forgotten. */
void *pg_tensor_at(const pg_tensor *t);
/* The same for reading alone: nothing is forgotten. */
const void *pg_tensor_peek(const pg_tensor *t);
/* All of t was just written with ids of range `now`; `before` is what
 * t->storage->ids said earlier. */
void pg_ids_note(const pg_tensor *t, pg_id_range before, pg_id_range now);
/* The range of n ids in host memory; unknown where dtype is no i32 or i64. */
pg_id_range pg_ids_range(const void *ids, int64_t n, int dtype);
/* PG_OK, or why its numbers cannot be touched (freed, dropped, no data): names `op`. */
int pg_tensor_usable(const pg_tensor *t, const char *op);
/* "[32,128] f32" into a small ring of per-thread buffers: safe for a few uses in one message. */
const char *pg_shape_text(const pg_tensor *t);
/* Works that nobody waits for are freed where they are done. */
void pg_works_sweep(void);
int pg_same_shape(const pg_tensor *a, const pg_tensor *b);
#endif
