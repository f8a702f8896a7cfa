/* aside.h: the one way this room writes: checked calls, and files that appear whole or not at all.
 *
 * A new file is written beside its target as ".NAME.tmp-PID", held by an exclusive flock, and
 * renamed over it at the end.  The kernel drops the lock with the process, so a leftover is known
 * by its lock being free: more certain than its pid, which may be reused or belong to a zombie. */
#ifndef PG_ASIDE_H
#define PG_ASIDE_H
#include "../base/status.h"

typedef struct {
    int fd;      /* -1: nothing open */
    char *path;  /* the target */
    char *aside; /* where the bytes go until pg_aside_finish; NULL: joined, path is that place */
} pg_aside;

/* Start NAME's new content; removes leftovers of dead writers of the same NAME. */
int pg_aside_open(pg_aside *a, const char *path);
int pg_aside_write(pg_aside *a, const void *data, int64_t bytes, int64_t at);
/* Give the file its size and take its bytes from the disk now, so that a full disk shows before
 * the work. */
int pg_aside_reserve(pg_aside *a, int64_t bytes);
/* fsync, rename, fsync the folder; on failure the old file stands and the new one is removed
 * (unless only the last fsync failed: then the new one stands, and may not outlive a power cut). */
int pg_aside_finish(pg_aside *a);
/* Write, too, into `aside`, a file that another process has opened so and will finish. */
int pg_aside_join(pg_aside *a, const char *aside);
/* Wait until what was written is on the disk. */
int pg_aside_sync(pg_aside *a);
/* Remove what was not finished (not where it was joined), free the names; harmless on {.fd = -1}
 * and when called again. */
void pg_aside_close(pg_aside *a);

/* Checked calls, seen by pg_fs_fail_after(); PG_EIO with path and reason. */
int pg_file_write_at(int fd, const char *path, const void *data, int64_t bytes, int64_t at);
int pg_file_rename(const char *from, const char *to);
int pg_file_sync_path(const char *path);
/* The folder part of a path ("." where there is none), to be freed; NULL without memory. */
char *pg_file_folder(const char *path);
#endif
