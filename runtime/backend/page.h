/* page.h: the block that the ranks of one host share: a status page a rank, and the word "broken".
 *
 * The launcher makes it before it forks (an anonymous memfd, so no name can be left behind), maps
 * it to read the pages, and tells the survivors who died.  A rank finds it through PG_SHM_FD.
 * Without one (no launcher, a world of one) a rank writes a page of its own that nobody reads.
 * shm.c lays the groups' memory behind these pages; NCCL ranks use the pages alone. */
#ifndef PG_PAGE_H
#define PG_PAGE_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define PG_SHM_RANKS 256 /* most ranks of one host */

enum pg_page_state { PG_PAGE_EMPTY, PG_PAGE_RUNNING, PG_PAGE_WAITING, PG_PAGE_LEFT };

/* Written by its rank alone, except bell.  Texts may be read half written: they always end. */
typedef struct pg_page {
    _Atomic int32_t pid;       /* 0: not there yet */
    _Atomic int32_t state;     /* pg_page_state */
    _Atomic int64_t step;      /* -1 before the first */
    _Atomic int64_t since;     /* ns of CLOCK_MONOTONIC: when this wait began */
    _Atomic uint64_t space;    /* its pid namespace; pids compare only within one */
    _Atomic int64_t failed_at; /* ns of CLOCK_MONOTONIC: when it first wrote a failure; 0: never */
    char op[32], group[48];    /* what it waits in, while WAITING */
    char where[192];           /* Lua line of the last call that could wait */
    char failure[1024];        /* why it is about to end, "" if it is not */
    _Alignas(64) _Atomic uint32_t bell; /* futex: rung when something it waits for has come */
    _Atomic uint32_t asleep;            /* its threads that sleep on the bell */
    /* The board of host/board.c: on the page of the host's first rank, told is each rank's own. */
    _Atomic int64_t meet;     /* the turn between two steps in which all ranks meet; 0: none */
    _Atomic uint32_t calls;   /* futex: how often the first rank has called the others */
    _Atomic uint32_t stopped; /* lines of the prompt up to this number are to stop */
    _Atomic int32_t prompt;   /* 1: the first rank reads lines, Ctrl-C is its own business */
    _Atomic int32_t told;     /* 1: why it ends with its exit code has been said */
} pg_page;

/* ---- for the launcher ---- */
/* A memfd for that many local ranks, inherited over exec.  A file
 * descriptor, or a negative code. */
int pg_shm_create(int ranks);
/* Map the block under fd and check that it is ours.  The launcher and pg_page_mine use it. */
int pg_shm_map(void **map, int fd);
void pg_shm_unmap(void *map);
pg_page *pg_page_of(void *map, int rank); /* NULL if rank is out of range */
int pg_page_ranks(const void *map);
/* From now on every collective of every rank fails with PG_ECOMM and this text (at most 1000 bytes,
 * such as "rank 2 died by SIGKILL at step 7"); wakes all that wait.  The first call counts. */
void pg_shm_mark_dead(void *map, int rank, const char *text);
/* "rank 0 waits in allreduce (dp) at models/x.lua:14 since 3 s" or "rank 1 is at step 7, not
 * waiting, last at y.lua:3". */
void pg_page_describe(char *text, size_t bytes, const pg_page *p, int rank);

/* ---- for a rank ---- */
/* This rank's page; never NULL.  The first call joins the block of PG_SHM_FD if there is one. */
pg_page *pg_page_mine(void);
/* Join the block under fd as that local rank (fd becomes close-on-exec and stays open). */
int pg_page_open(int fd, int rank);
void *pg_page_map(int *fd); /* the block joined and its fd, or NULL */
void pg_page_write(char *field, size_t bytes, const char *text); /* cut at bytes, always ended */
int64_t pg_page_clock(void);   /* ns of CLOCK_MONOTONIC, the same on all ranks */
void pg_page_ring(pg_page *p); /* wake its sleepers */
/* 1 if the process of that page is gone or a zombie. */
int pg_page_dead(const pg_page *p);
#endif
