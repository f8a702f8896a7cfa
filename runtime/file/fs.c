/* fs.c: folders and whole files; writing goes through aside.h.
 *
 * Texts that are handed out (a listing, a file's content) live in one buffer per thread until the
 * next such call, so Lua copies them at once and frees nothing. */
#include "aside.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- the text handed out ---- */
#define KEPT_BYTES 65536 /* a text up to here stays allocated for the next one */
static _Thread_local struct {
    char *at;
    size_t length, room;
} text;

/* Room for `more` bytes and a closing zero. */
static int text_reserve(size_t more) {
    if (text.length + more + 1 <= text.room) return PG_OK;
    size_t room = text.length + more + 1;
    if (room < 2 * text.room) room = 2 * text.room;
    char *grown = realloc(text.at, room);
    if (!grown) return pg_fail(PG_ENOMEM, "file: no memory for a text of %zu bytes", room);
    text.at = grown;
    text.room = room;
    return PG_OK;
}

/* Begin a new text; a large old one is given back. */
static int text_clear(void) {
    if (text.room > KEPT_BYTES) {
        free(text.at);
        text.at = NULL;
        text.room = 0;
    }
    text.length = 0;
    PG_TRY(text_reserve(255));
    text.at[0] = 0;
    return PG_OK;
}

static int by_bytes(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names sorted by bytes (no locale), joined by '\n'; a name that holds one is refused. */
static int text_join(char **names, size_t n) {
    if (n) qsort(names, n, sizeof *names, by_bytes);
    for (size_t i = 0; i < n; i++) {
        if (strchr(names[i], '\n'))
            return pg_fail(PG_EIO, "list: a name holds a line break, which is not supported: %s",
                           names[i]);
        size_t bytes = strlen(names[i]);
        PG_TRY(text_reserve(bytes + 1));
        if (i) text.at[text.length++] = '\n';
        memcpy(text.at + text.length, names[i], bytes + 1);
        text.length += bytes;
    }
    return PG_OK;
}

/* ---- asking ---- */
static int need(const char *op, const char *path) {
    if (!path || !*path) return pg_fail(PG_EINVAL, "%s: the path is empty", op);
    return PG_OK;
}

int pg_fs_stat(const char *path, int64_t *size, double *mtime, int *is_dir) {
    PG_TRY(need("stat", path));
    struct stat st;
    if (stat(path, &st) != 0) return pg_fail(PG_EIO, "stat: %s: %m", path);
    if (size) *size = (int64_t)st.st_size;
    if (mtime) *mtime = (double)st.st_mtim.tv_sec + 1e-9 * (double)st.st_mtim.tv_nsec;
    if (is_dir) *is_dir = S_ISDIR(st.st_mode);
    return PG_OK;
}

const char *pg_fs_list(const char *folder) {
    char **names = NULL;
    size_t n = 0, room = 0;
    DIR *dir = NULL;
    int rc;
    PG_TRY_TO(done, rc, need("list", folder));
    PG_TRY_TO(done, rc, text_clear());
    if (!(dir = opendir(folder))) {
        rc = pg_fail(PG_EIO, "list: %s: %m", folder);
        goto done;
    }
    for (struct dirent *e; (e = readdir(dir));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (n == room) {
            room = room ? 2 * room : 64;
            char **grown = realloc(names, room * sizeof *names);
            if (!grown) goto no_memory;
            names = grown;
        }
        if (!(names[n] = strdup(e->d_name))) goto no_memory;
        n++;
    }
    rc = text_join(names, n);
    goto done;
no_memory:
    rc = pg_fail(PG_ENOMEM, "list: %s: no memory for %zu names", folder, n);
done:
    if (dir) closedir(dir);
    for (size_t i = 0; i < n; i++) free(names[i]);
    free(names);
    return rc < 0 ? NULL : text.at;
}

const char *pg_fs_glob(const char *pattern) {
    if (need("glob", pattern) < 0 || text_clear() < 0) return NULL;
    glob_t found = {0};
    int rc = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (rc == GLOB_NOMATCH) rc = PG_OK;
    else if (rc != 0) rc = pg_fail(PG_ENOMEM, "glob: %s: no memory", pattern);
    else rc = text_join(found.gl_pathv, found.gl_pathc);
    globfree(&found);
    return rc < 0 ? NULL : text.at;
}

const char *pg_fs_read(const char *path, int64_t *bytes) {
    int rc, fd = -1;
    struct stat st;
    PG_TRY_TO(done, rc, need("read", path));
    PG_TRY_TO(done, rc, text_clear());
    rc = PG_EIO;
    if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0 || fstat(fd, &st) != 0) {
        pg_fail(rc, "read: %s: %m", path);
        goto done;
    }
    if (S_ISDIR(st.st_mode)) {
        pg_fail(rc, "read: %s is a folder", path);
        goto done;
    }
    /* The size is a hint: files under /proc say 0, and one may grow meanwhile. */
    PG_TRY_TO(done, rc, text_reserve(st.st_size > 0 ? (size_t)st.st_size + 1 : 4096));
    for (;;) {
        PG_TRY_TO(done, rc, text_reserve(1));
        ssize_t n = read(fd, text.at + text.length, text.room - text.length - 1);
        if (n < 0 && errno == EINTR && !pg_interrupted()) continue;
        if (n < 0) {
            rc = pg_fail(errno == EINTR ? PG_EINTR : PG_EIO, "read: %s: %m", path);
            goto done;
        }
        if (n == 0) break;
        text.length += (size_t)n;
    }
    text.at[text.length] = 0;
    if (bytes) *bytes = (int64_t)text.length;
done:
    if (fd >= 0) close(fd);
    return rc < 0 ? NULL : text.at;
}

/* Read, not mapped: a disk that fails, or a file that is cut meanwhile, gives no signal so. */
#define HASH_BYTES ((size_t)4 << 20) /* at a time; between them Ctrl-C is heard */

static int hash_pieces(int fd, const char *path, void *piece, XXH64_state_t *state) {
    for (;;) {
        PG_POLL();
        ssize_t n = read(fd, piece, HASH_BYTES);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return pg_fail(PG_EIO, "hash: %s: %m", path);
        if (n == 0) return PG_OK;
        XXH64_update(state, piece, (size_t)n);
    }
}

int pg_fs_hash(const char *path, uint64_t *out) {
    PG_TRY(need("hash", path));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return pg_fail(PG_EIO, "hash: %s: %m", path);
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    void *piece = malloc(HASH_BYTES);
    int rc = piece ? hash_pieces(fd, path, piece, &state)
                   : pg_fail(PG_ENOMEM, "hash: %s: no memory for %zu bytes", path, HASH_BYTES);
    if (rc == PG_OK) *out = XXH64_digest(&state);
    free(piece);
    close(fd);
    return rc;
}

const char *pg_fs_hostname(void) {
    static _Thread_local char name[HOST_NAME_MAX + 1];
    if (gethostname(name, sizeof name) != 0 || !*name) return "localhost";
    name[sizeof name - 1] = 0;
    return name;
}

/* ---- changing ---- */
int pg_fs_mkdir(const char *path) {
    PG_TRY(need("mkdir", path));
    char *part = strdup(path);
    if (!part) return pg_fail(PG_ENOMEM, "mkdir: %s: no memory", path);
    int rc = PG_OK;
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p) continue;
        char kept = *p;
        *p = 0;
        if (mkdir(part, 0777) != 0) {
            int reason = errno == EEXIST ? ENOTDIR : errno; /* is there, but may be no folder */
            struct stat st;
            if (stat(part, &st) != 0 || !S_ISDIR(st.st_mode)) {
                errno = reason;
                rc = pg_fail(PG_EIO, "mkdir: %s: %m", part);
                break;
            }
        }
        if (!kept) break;
        *p = kept;
    }
    free(part);
    return rc;
}

int pg_fs_rename(const char *from, const char *to) {
    PG_TRY(need("rename", from));
    PG_TRY(need("rename", to));
    PG_TRY(pg_file_rename(from, to));
    char *folder = pg_file_folder(to);
    if (!folder) return pg_fail(PG_ENOMEM, "rename: %s: no memory", to);
    int rc = pg_file_sync_path(folder);
    free(folder);
    return rc;
}

/* For nftw, contents first; links are removed, not followed.  A folder that could not be emptied
 * ends the walk with its errno. */
static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where) {
    (void)st, (void)kind, (void)where;
    return remove(path) == 0 || errno == ENOENT ? 0 : -1;
}

int pg_fs_remove(const char *path) {
    PG_TRY(need("remove", path));
    char *name = strdup(path);
    if (!name) return pg_fail(PG_ENOMEM, "remove: %s: no memory", path);
    for (size_t n = strlen(name); n > 1 && name[n - 1] == '/';) name[--n] = 0;
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    int rc = PG_OK;
    if (!*last || !strcmp(last, ".") || !strcmp(last, ".."))
        rc = pg_fail(PG_EINVAL, "remove: \"%s\" is refused: name the folder itself", path);
    else if (nftw(name, remove_one, 16, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT)
        rc = pg_fail(PG_EIO, "remove: %s: %m", path);
    free(name);
    return rc;
}

int pg_fs_sync(const char *path) {
    PG_TRY(need("fsync", path));
    return pg_file_sync_path(path);
}

int pg_fs_write(const char *path, const void *data, int64_t bytes) {
    PG_TRY(need("write", path));
    if (bytes < 0 || (bytes > 0 && !data))
        return pg_fail(PG_EINVAL, "write: %s: %lld bytes at %p", path, (long long)bytes, data);
    pg_aside a;
    PG_TRY(pg_aside_open(&a, path));
    int rc = pg_aside_write(&a, data, bytes, 0);
    if (rc == PG_OK) return pg_aside_finish(&a);
    pg_aside_close(&a);
    return rc;
}
