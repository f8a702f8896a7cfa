/* folder.h: for the tests of runtime/file: a folder of one's own, files put there and compared. */
#ifndef PG_FOLDER_H
#define PG_FOLDER_H
#include "../check.h"
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

static char folder[256];

/* cmocka's set-up and tear-down of a whole group. */
static inline int folder_make(void **state) {
    (void)state;
    const char *base = getenv("SCRATCH") ? getenv("SCRATCH") : getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/pg-test-XXXXXX", base ? base : P_tmpdir);
    return mkdtemp(folder) ? 0 : -1;
}
static inline int folder_remove(void **state) {
    (void)state;
    return pg_fs_remove(folder) < 0 ? -1 : 0;
}

/* folder/name, in one of a few buffers. */
static inline const char *in_folder(const char *name) {
    static char ring[8][512];
    static int next;
    char *at = ring[next++ % 8];
    snprintf(at, sizeof ring[0], "%s/%s", folder, name);
    return at;
}

static inline void put_file(const char *path, const void *data, int64_t bytes) {
    FILE *f = fopen(path, "wb");
    if (!f || (bytes && fwrite(data, (size_t)bytes, 1, f) != 1) || fclose(f) != 0)
        fail_msg("cannot prepare %s", path);
}

static inline void file_is(const char *path, const void *want, int64_t bytes) {
    int64_t got = -1;
    const char *text = pg_fs_read(path, &got);
    if (!text) fail_msg("%s", pg_errmsg());
    assert_int_equal(got, bytes);
    if (bytes) assert_memory_equal(text, want, (size_t)bytes);
}

/* Files in the folder whose name holds `part`. */
static inline int files_with(const char *part) {
    const char *names = pg_fs_list(folder);
    int n = 0;
    for (const char *p = names; p && (p = strstr(p, part)); p++) n++;
    return n;
}

/* Runs `work` in a child that kills itself with SIGKILL afterwards. */
static inline void in_killed_child(void (*work)(void)) {
    pid_t pid = fork();
    if (pid == 0) {
        work();
        raise(SIGKILL);
    }
    int status;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}
#endif
