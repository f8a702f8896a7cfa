/* aside.c: checked writes, and files written aside; see aside.h for the idea. */
#include "aside.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define WRITE_BYTES ((int64_t)1 << 30) /* Linux moves at most 2 GiB a call */

static _Atomic int64_t calls_to_failure; /* 0: never */

void pg_fs_fail_after(int64_t n) { atomic_store(&calls_to_failure, n > 0 ? n : 0); }

/* Whether this call is the one that a test wants to fail. */
static int told_to_fail(void) {
    if (atomic_load(&calls_to_failure) <= 0 || atomic_fetch_sub(&calls_to_failure, 1) != 1)
        return 0;
    errno = ENOSPC;
    return 1;
}

int pg_file_write_at(int fd, const char *path, const void *data, int64_t bytes, int64_t at) {
    const char *from = data;
    while (bytes > 0) {
        size_t ask = (size_t)(bytes < WRITE_BYTES ? bytes : WRITE_BYTES);
        ssize_t n = told_to_fail() ? -1 : pwrite(fd, from, ask, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EIO; /* a regular file never takes nothing */
        if (n <= 0) return pg_fail(PG_EIO, "write: %s at byte %lld: %m", path, (long long)at);
        from += n;
        at += n;
        bytes -= n;
    }
    return PG_OK;
}

int pg_file_rename(const char *from, const char *to) {
    if (told_to_fail() || rename(from, to) != 0)
        return pg_fail(PG_EIO, "rename: %s to %s: %m", from, to);
    return PG_OK;
}

/* Some file systems cannot fsync a folder and say EINVAL; there is nothing more to do there. */
static int sync_fd(int fd, const char *path) {
    int rc;
    do rc = told_to_fail() ? -1 : fsync(fd);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno != EINVAL) return pg_fail(PG_EIO, "fsync: %s: %m", path);
    return PG_OK;
}

int pg_file_sync_path(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return pg_fail(PG_EIO, "fsync: %s: %m", path);
    int rc = sync_fd(fd, path);
    close(fd);
    return rc;
}

char *pg_file_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash) return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Whether `name` is ".TARGET.tmp-DIGITS". */
static int is_leftover(const char *name, const char *target) {
    size_t n = strlen(target);
    if (name[0] != '.' || strncmp(name + 1, target, n) != 0) return 0;
    const char *p = name + 1 + n;
    if (strncmp(p, ".tmp-", 5) != 0 || !p[5]) return 0;
    for (p += 5; *p; p++)
        if (!isdigit((unsigned char)*p)) return 0;
    return 1;
}

/* Remove leftovers whose lock is free.  Failing is no error: they only take room. */
static void sweep(const char *folder, const char *target) {
    DIR *dir = opendir(folder);
    if (!dir) return;
    for (struct dirent *e; (e = readdir(dir));) {
        if (!is_leftover(e->d_name, target)) continue;
        int fd = openat(dirfd(dir), e->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0) continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) unlinkat(dirfd(dir), e->d_name, 0);
        close(fd);
    }
    closedir(dir);
}

/* Create and lock the aside file.  Between the two a sweep by another process may take it for a
 * leftover: then the lock is refused or the file has no name any more, and we begin again. */
static int create_locked(pg_aside *a) {
    for (int tries = 0; tries < 100; tries++) {
        a->fd = open(a->aside, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (a->fd < 0 && errno == EEXIST)
            return pg_fail(PG_EIO, "write: %s is being written already (%s is locked)", a->path,
                           a->aside);
        if (a->fd < 0) return pg_fail(PG_EIO, "write: %s: %m", a->aside);
        int locked = flock(a->fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
        struct stat st;
        if (locked && fstat(a->fd, &st) == 0 && st.st_nlink > 0) return PG_OK;
        close(a->fd);
        a->fd = -1;
    }
    return pg_fail(PG_EIO, "write: %s: another process keeps removing %s", a->path, a->aside);
}

int pg_aside_open(pg_aside *a, const char *path) {
    *a = (pg_aside){.fd = -1};
    const char *name = file_name(path);
    if (!*name) return pg_fail(PG_EINVAL, "write: \"%s\" names no file", path);
    int rc = PG_ENOMEM;
    char *folder = pg_file_folder(path);
    a->path = strdup(path);
    if (!folder || !a->path ||
        asprintf(&a->aside, "%s/.%s.tmp-%d", folder, name, (int)getpid()) < 0) {
        a->aside = NULL;
        pg_fail(rc, "write: %s: no memory for its name", path);
        goto done;
    }
    struct stat st; /* a rename would put a file in the place of a device, a pipe or a socket */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        rc = pg_fail(PG_EIO, "write: %s is %s, not a file that can be replaced", path,
                     S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
        goto done;
    }
    sweep(folder, name);
    rc = create_locked(a);
done:
    free(folder);
    if (rc < 0) pg_aside_close(a);
    return rc;
}

int pg_aside_write(pg_aside *a, const void *data, int64_t bytes, int64_t at) {
    return pg_file_write_at(a->fd, a->path, data, bytes, at);
}

int pg_aside_join(pg_aside *a, const char *aside) {
    *a = (pg_aside){.fd = -1, .path = strdup(aside)};
    if (!a->path) return pg_fail(PG_ENOMEM, "write: %s: no memory for its name", aside);
    a->fd = open(aside, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (a->fd >= 0) return PG_OK;
    int rc = pg_fail(PG_EIO, "write: %s: %m", aside);
    pg_aside_close(a);
    return rc;
}

int pg_aside_sync(pg_aside *a) { return sync_fd(a->fd, a->path); }

int pg_aside_reserve(pg_aside *a, int64_t bytes) {
    if (bytes <= 0 || fallocate(a->fd, 0, 0, (off_t)bytes) == 0) return PG_OK;
    int offered = errno == ENOSPC || errno == EFBIG || errno == EDQUOT;
    if (!offered && ftruncate(a->fd, (off_t)bytes) == 0) return PG_OK;
    return pg_fail(PG_EIO, "write: %s needs %lld bytes: %m", a->path, (long long)bytes);
}

int pg_aside_finish(pg_aside *a) {
    int rc = PG_OK;
    char *folder = pg_file_folder(a->path);
    if (!folder) {
        rc = pg_fail(PG_ENOMEM, "write: %s: no memory for its folder's name", a->path);
        goto done;
    }
    PG_TRY_TO(done, rc, sync_fd(a->fd, a->path));
    PG_TRY_TO(done, rc, pg_file_rename(a->aside, a->path));
    close(a->fd);
    a->fd = -1; /* from here on there is nothing to remove */
    rc = pg_file_sync_path(folder);
done:
    free(folder);
    pg_aside_close(a);
    return rc;
}

void pg_aside_close(pg_aside *a) {
    if (a->fd >= 0) {
        if (a->aside) unlink(a->aside);
        close(a->fd);
    }
    free(a->path);
    free(a->aside);
    *a = (pg_aside){.fd = -1};
}
