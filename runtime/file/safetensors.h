/* safetensors.h: what the reader and the writer of safetensors share: the table of tensors.
 *
 * A file is a u64 length, a JSON header of that length, and the tensors' bytes end to end without
 * gaps.  Format: huggingface/safetensors, README and tensor.rs. */
#ifndef PG_SAFETENSORS_H
#define PG_SAFETENSORS_H
#include "../base/types.h"
#include "aside.h"

#define ST_MAX_HEADER  100000000 /* bytes; the format's own bound */
#define ST_MAX_ENTRIES 131072    /* ours, with the next: they bound memory to about 40 MB, */
#define ST_MAX_TEXT    ((int64_t)16 << 20) /* ... however hostile the header */

typedef struct {
    const char *name; /* in the file: "F32" */
    int size;         /* bytes of an element */
    int dtype;        /* pg_dtype, or -1: no tensor type here */
} st_type;

typedef struct {
    char *name;
    const st_type *type;
    int64_t dims[PG_MAX_DIMS];
    int64_t count, begin, end; /* elements; bytes from the start of the data */
    int64_t written;           /* writer: elements so far */
    int32_t ndim;
} st_entry;

typedef struct {
    char *key, *value;
} st_meta;

struct pg_safetensors {
    char *path;
    st_entry *entries; /* in the order of their data */
    int64_t count, room;
    int32_t *by_name; /* indices of entries, sorted by name */
    st_meta *metas;
    int64_t meta_count, meta_room;
    int64_t text_bytes; /* names and metadata held, against ST_MAX_TEXT */
    int64_t data_start; /* file offset of the data */
    const char *map;    /* reader: the whole file; NULL for a writer */
    int64_t bytes;
    int fd;         /* reader; -1 else */
    pg_aside aside; /* writer */
    char *buffer;   /* writer: st_buffer's */
    int shared;     /* writer: others write too, so that finish cannot count */
};

/* Numbers of an entry: number k of the block is the entry's number
 * first + (k / cols) * stride + k % cols, or first + k where cols is 0. */
typedef struct {
    int64_t first, cols, stride;
} st_block;

pg_safetensors *st_new(const char *path); /* NULL with a message */
const st_type *st_type_named(const char *name);
const st_type *st_type_of(int dtype);
/* Fill type, dims, count and the byte size (as end, begin = 0); refuses what does not fit int64. */
int st_shape(st_entry *e, const st_type *type, int ndim, const int64_t *dims);
/* Both copy their texts. */
int st_add_entry(pg_safetensors *f, const char *name, const st_entry *like);
int st_add_meta(pg_safetensors *f, const char *key, const char *value);
/* Sort entries with `order`, metadata by key, and build by_name; refuses a repeated name. */
int st_sort(pg_safetensors *f, int (*order)(const void *, const void *));
/* Numbers [from, from + count) of the block lie within the entry. */
int st_check_block(const st_entry *e, const st_block *b, int64_t from, int64_t count);
/* Where number k of the block lies; *run becomes how many of `most` from k on have no gap. */
int64_t st_block_at(const st_block *b, int64_t k, int64_t most, int64_t *run);
/* Memory to write through, where there is none yet. */
int st_buffer(pg_safetensors *f);
/* The file is open for writing, and its header is written (begun) or not yet. */
int st_writing(const pg_safetensors *f, int begun, const char *op);
/* A reader gives up its file and keeps the table. */
void st_unmap(pg_safetensors *f);
#endif
