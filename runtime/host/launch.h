/* launch.h: what launch.c (processes), relay.c (their output) and report.c (the first death) share. */
#ifndef PG_LAUNCH_H
#define PG_LAUNCH_H
#include <stdint.h>
#include <sys/types.h>

#include "../backend/page.h"

typedef struct relay_line { /* what came through a pipe since the last newline */
    char *text;
    size_t used, room;
} relay_line;

typedef struct host_child {
    pid_t pid;
    int rank;     /* of all hosts */
    int pipes[2]; /* read ends of its stdout and stderr; -1: closed, or it writes by itself */
    relay_line lines[2];
    int ended, status; /* status as waitpid gives it */
    int killed;        /* we ended it: SIGTERM or SIGKILL */
    int beside;        /* it shares our process group, and so our terminal */
} host_child;

typedef struct host_world {
    int size;             /* ranks of this host */
    host_child *children; /* by local rank */
    void *pages;          /* the block of page.h */
    int fd;               /* its memfd */
    int signals;          /* signalfd */
    pid_t group;          /* the children's process group */
    int alive;
    int at_terminal;             /* SIGINT came from the terminal: our whole group has it */
    int asked;                   /* the signal by which we were told to stop; 0: none */
    int64_t asked_at, failed_at; /* ns; 0: not yet */
    int escalated;               /* 1: SIGTERM sent, 2: SIGKILL sent */
    int first;                   /* local rank of the first that ended badly, or -1 */
    int code;                    /* of a rank that has told itself why it ends so; 0: none */
    char *story;                 /* the failure report, written at the first death */
} host_world;

/* ---- launch.c ---- */
void launch_tick(host_world *w); /* signals, deaths, deadlines: whatever is due; never waits */

/* ---- relay.c ---- */
/* Read what there is on pipe `which` of c and print the lines that are whole. */
void relay_read(host_world *w, host_child *c, int which);
void relay_finish(host_world *w, host_child *c); /* print what is left, close */

/* ---- report.c ---- */
/* "rank 2 was killed by SIGKILL at step 17", for peers and as the report's first line. */
void report_death(char *text, size_t bytes, const host_world *w, int i);
/* Whose end came first: one of the n children that have just ended badly, or one that is about to. */
int report_first(const host_world *w, const int *ended, int n);
void report_write(host_world *w); /* w->story, from the pages as they are now */
#endif
