/* page.c: the status pages: finding one's own, describing one in words, bells, and who is dead. */
#include "page.h"
#include "ranks.h"
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* What this process has joined; set once, by the one thread that runs Lua. */
static struct {
    void *map;
    int fd;
    pg_page *page;
    pg_page alone; /* the page of a rank without a block */
} mine;

int64_t pg_page_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

int pg_page_ranks(const void *map) { return (int)((const shm_control *)map)->ranks; }

pg_page *pg_page_of(void *map, int rank) {
    shm_control *c = map;
    return c && rank >= 0 && rank < (int)c->ranks ? &c->pages[rank] : NULL;
}

/* 0 where there is no procfs: then nobody is ever called dead by it. */
static uint64_t pid_space(void) {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

static void claim(pg_page *p) {
    p->space = pid_space();
    if (p->state == PG_PAGE_EMPTY) p->state = PG_PAGE_RUNNING;
    p->pid = (int32_t)getpid();
}

int pg_page_open(int fd, int rank) {
    void *map;
    PG_TRY(pg_shm_map(&map, fd));
    pg_page *p = pg_page_of(map, rank);
    int other = p ? p->pid : 0;
    if (!p || (other && other != getpid())) {
        int ranks = pg_page_ranks(map);
        pg_shm_unmap(map);
        if (!p)
            return pg_fail(PG_EINVAL, "rank %d of this host; its block has %d ranks", rank, ranks);
        return pg_fail(PG_ECOMM, "rank %d is taken by process %d; each rank starts once", rank,
                       other);
    }
    claim(p);
    fcntl(fd, F_SETFD, FD_CLOEXEC); /* programs that a script runs shall not inherit it */
    mine.map = map;
    mine.fd = fd;
    mine.page = p;
    return PG_OK;
}

pg_page *pg_page_mine(void) {
    if (mine.page) return mine.page;
    const char *text = getenv("PG_SHM_FD");
    pg_ranks ranks;
    if (text && *text && pg_ranks_read(&ranks) == PG_OK) {
        char *end;
        long fd = strtol(text, &end, 10);
        if (!*end && fd >= 0 && fd <= INT_MAX && pg_page_open((int)fd, ranks.local_rank) == PG_OK)
            return mine.page;
    }
    mine.alone.step = -1;
    claim(&mine.alone);
    return mine.page = &mine.alone;
}

void *pg_page_map(int *fd) {
    *fd = mine.fd;
    return mine.map;
}

void pg_page_write(char *field, size_t bytes, const char *text) {
    size_t n = text ? strnlen(text, bytes - 1) : 0;
    if (n) memcpy(field, text, n);
    field[n] = 0;
}

void pg_page_describe(char *text, size_t bytes, const pg_page *p, int rank) {
    long long step = (long long)p->step;
    char at[256] = "", when[48] = "at its start";
    if (step >= 0) snprintf(when, sizeof when, "at step %lld", step);
    switch (p->state) {
    case PG_PAGE_EMPTY: snprintf(text, bytes, "rank %d has not joined", rank); break;
    case PG_PAGE_WAITING:
        if (p->where[0]) snprintf(at, sizeof at, " at %.191s", p->where);
        snprintf(text, bytes, "rank %d waits in %.31s (%.47s)%s since %.0f s", rank, p->op,
                 p->group, at, (double)(pg_page_clock() - p->since) * 1e-9);
        break;
    case PG_PAGE_LEFT:
        if (p->failure[0]) snprintf(text, bytes, "rank %d failed: %.700s", rank, p->failure);
        else snprintf(text, bytes, "rank %d has left (%s)", rank, when);
        break;
    default:
        if (p->where[0]) snprintf(at, sizeof at, ", last at %.191s", p->where);
        snprintf(text, bytes, "rank %d is %s, not waiting%s", rank, when, at);
    }
}

void pg_page_ring(pg_page *p) {
    if (!atomic_load(&p->asleep)) return;
    atomic_fetch_add(&p->bell, 1);
    syscall(SYS_futex, &p->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* kill(pid, 0) succeeds on a zombie, so ask procfs for the state, which follows the last ')'. */
int pg_page_dead(const pg_page *p) {
    int pid = p->pid;
    char path[48], line[512];
    if (!pid || !p->space || p->space != pid_space()) return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT;
    ssize_t n = read(fd, line, sizeof line - 1);
    int why = errno;
    close(fd);
    if (n < 0) return why == ESRCH;
    line[n] = 0;
    const char *state = strrchr(line, ')');
    return state && (state[1] == ' ') && (state[2] == 'Z' || state[2] == 'X');
}
