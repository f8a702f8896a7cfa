/* launch.h: what launch.c (processes), relay.c (their output), report.c (the first death) and
 * hosts.c (the launchers of other hosts) share. */
#ifndef PG_LAUNCH_H
#define PG_LAUNCH_H
#include <stdint.h>
#include <sys/types.h>

#include "../backend/page.h"
#include "host.h"

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

typedef struct host_link host_link; /* to the launchers of other hosts; NULL: there are none */

typedef struct host_world {
    host_link *link;
    int node;             /* this host among all */
    int size;             /* ranks of this host */
    host_child *children; /* by local rank */
    void *pages;          /* the block of page.h */
    int fd;               /* its memfd */
    int signals;          /* signalfd */
    pid_t group;          /* the children's process group */
    int alive;
    int at_terminal;             /* SIGINT came from the terminal: our whole group has it */
    int asked;                   /* the signal by which we were told to stop; 0: none */
    char asked_on[104];          /* "on host 1 (its name)": not here */
    int64_t asked_at, failed_at; /* ns; 0: not yet */
    int escalated;               /* 1: SIGTERM sent, 2: SIGKILL sent */
    int first;                   /* local rank of the first that ended badly, or -1 */
    int code;                    /* of a rank that has told itself why it ends so; 0: none */
    char elsewhere[1024]; /* the first failure, of another host; "" where it is one of ours */
    char *story;          /* the failure report without its first line, from the first death */
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
/* Whose end came first: one of the n children that have just ended badly, or
 * one that is about to. */
int report_first(const host_world *w, const int *ended, int n);
void report_head(char *text, size_t bytes, const host_world *w); /* the report's first line */
void report_write(host_world *w); /* w->story, from the pages as they are now */

/* ---- hosts.c ---- */
typedef struct host_news {
    char failed[1024]; /* the first failure of all: "host 1 (its name): rank 3 was ..." */
    int failed_on;     /* its host */
    int stop, again;   /* a signal, and whether it came twice */
    char stop_on[96];  /* where: "host 1 (its name)" */
    int over;          /* the ranks of all hosts have ended */
    int left;          /* on host 0: all other launchers have ended, or are gone */
    int lost;          /* host 0 is out of reach: nothing more will come */
    int sent;          /* what we told is in the store */
} host_news;
/* Waits for all hosts, PGRUN_TIMEOUT seconds.  On failure *out may have to be left all the same. */
int hosts_meet(host_link **out, const host_options *o);
int hosts_fd(const host_link *l); /* readable when there are news; -1: no other hosts */
/* None of these wait; NULL: they do nothing.  Of failures told on all hosts the first counts. */
void hosts_tell_failure(host_link *l, const char *text);
void hosts_tell_stop(host_link *l, int number, int again);
void hosts_tell_end(host_link *l);            /* our ranks have ended; not for NULL */
int hosts_news(host_link *l, host_news *out); /* 0: no other hosts */
const char *hosts_self(const host_link *l);   /* "host 1 (its name)", as it is told to the others */
void hosts_leave(host_link *l);
#endif
