/* safetensors_share.c: one safetensors file written by several processes.
 *
 * Its creator writes the header and gives the file its size, so whoever joins finds the whole table
 * there, checked as for reading, and writes its numbers to their places.  No two write the same
 * element.  All see one file system, and each syncs what it wrote before the creator renames. */
#include "safetensors.h"

#include <unistd.h>

const char *pg_safetensors_share(pg_safetensors *f) {
    if (st_writing(f, 1, "share") < 0) return NULL;
    f->shared = 1;
    return f->aside.aside ? f->aside.aside : f->path;
}

int pg_safetensors_join(pg_safetensors **out, const char *path) {
    pg_safetensors *f = NULL;
    PG_TRY(pg_safetensors_open(&f, path));
    st_unmap(f);
    int rc = pg_aside_join(&f->aside, path);
    if (rc >= 0) rc = st_buffer(f);
    if (rc < 0) {
        pg_safetensors_close(f);
        return pg_fail_within(rc, "safetensors: ");
    }
    f->shared = 1;
    *out = f;
    return PG_OK;
}

int pg_safetensors_sync(pg_safetensors *f) {
    PG_TRY(st_writing(f, 1, "sync"));
    int rc = pg_aside_sync(&f->aside);
    return rc < 0 ? pg_fail_within(rc, "safetensors: ") : rc;
}
