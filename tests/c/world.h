/* world.h: for tests of ranks: fork a world inside the test program and see how each rank ended.
 *
 * A rank is a child: cmocka's macros would jump back into the test runner there, so a rank uses
 * must(), which prints and ends it.  Each has 60 s to live. */
#ifndef PG_TEST_WORLD_H
#define PG_TEST_WORLD_H
#include "../check.h"
#include "../../runtime/backend/backend.h"
#include "../../runtime/backend/page.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORLD_MOST 32 /* ranks of a test */

/* What a rank knows. */
typedef struct {
    int rank, size;
    void *group; /* the world's, for the backend's table */
    const pg_collective_ops *ops;
} world;

#define must(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "[rank %s] %s:%d: %s is false; last message: %s\n", getenv("RANK"),    \
                    __FILE__, __LINE__, #condition, pg_errmsg());                                  \
            _exit(9);                                                                              \
        }                                                                                          \
    } while (0)
#define must_ok(call)                                                                              \
    do {                                                                                           \
        int must_code = (call);                                                                    \
        if (must_code < 0) {                                                                       \
            fprintf(stderr, "[rank %s] %s:%d: %s gave %d: %s\n", getenv("RANK"), __FILE__,         \
                    __LINE__, #call, must_code, pg_errmsg());                                      \
            _exit(9);                                                                              \
        }                                                                                          \
    } while (0)
/* The call fails with that code, and its message holds `part`. */
#define must_refuse(code, part, call)                                                              \
    do {                                                                                           \
        int must_code = (call);                                                                    \
        if (must_code != (code) || !strstr(pg_errmsg(), (part))) {                                 \
            fprintf(stderr, "[rank %s] %s:%d: %s gave %d \"%s\", not %d with \"%s\"\n",            \
                    getenv("RANK"), __FILE__, __LINE__, #call, must_code, pg_errmsg(), (code),     \
                    (part));                                                                       \
            _exit(9);                                                                              \
        }                                                                                          \
    } while (0)

static inline void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static inline void rank_environment(int rank, int size, int fd) {
    set_number("RANK", rank);
    set_number("WORLD_SIZE", size);
    set_number("LOCAL_RANK", rank);
    set_number("LOCAL_WORLD_SIZE", size);
    if (fd >= 0) set_number("PG_SHM_FD", fd);
}

/* In the child: join, run the body, leave. */
static inline void be_rank(int rank, int size, int fd, void (*body)(world *)) {
    world w = {.ops = &pg_collectives_shm};
    static const int caught[] = {SIGFPE, SIGSEGV, SIGBUS, SIGILL, SIGSYS}; /* by cmocka's runner */
    for (int i = 0; i < 5; i++) signal(caught[i], SIG_DFL);
    alarm(60);
    rank_environment(rank, size, fd);
    must_ok(w.ops->world(&w.group, &w.rank, &w.size));
    must(w.rank == rank && w.size == size);
    body(&w);
    w.ops->shutdown();
    exit(0);
}

/* Start the ranks of a world; fd from pg_shm_create, or -1: they find each other. */
static inline void start_world(pid_t *pids, int size, int fd, void (*body)(world *)) {
    fflush(NULL);
    for (int r = 0; r < size; r++) {
        pids[r] = fork();
        if (pids[r] == 0) be_rank(r, size, fd, body);
    }
}

/* Wait for all; killed: the rank that must have died by SIGKILL, or -1. */
static inline void end_world(const pid_t *pids, int size, int killed) {
    int bad = 0;
    for (int r = 0; r < size; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        int right = r == killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!right) {
            fprintf(stderr, "rank %d ended with status 0x%x\n", r, status);
            bad++;
        }
    }
    if (bad) fail_msg("%d of %d ranks failed", bad, size);
}

static inline void run_world(int size, void (*body)(world *)) {
    pid_t pids[WORLD_MOST];
    int fd = pg_shm_create(size);
    if (fd < 0) fail_msg("%s", pg_errmsg());
    start_world(pids, size, fd, body);
    close(fd);
    end_world(pids, size, -1);
}

/* Wait for a ticket of a call that must have been accepted. */
#define must_end(w, ticket) must_ok((w)->ops->wait(ticket))
#endif
