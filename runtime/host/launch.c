/* launch.c: pgrun -n N: start the ranks of this host, watch them, and end them all together.
 *
 * A rank is this program again, with the same arguments less -n and its number in the environment
 * (the names torchrun uses, plus PG_SHM_FD).  The ranks die with the launcher (PR_SET_PDEATHSIG),
 * their shared memory has no name (a memfd), so nothing can be left behind.  They form one process
 * group of their own: Ctrl-C reaches the launcher alone, which passes it on.  With a prompt on a
 * terminal the first rank stays in our group, since only that may read there. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../base/status.h"
#include "host.h"
#include "launch.h"

#define SECOND     1000000000ll
#define TERM_AFTER (2 * SECOND)  /* after a death: the others may end by themselves until then */
#define KILL_AFTER (6 * SECOND)  /* 10 s are promised; a machine may be slow */
#define ASKED_KILL (32 * SECOND) /* after SIGINT or SIGTERM: a rank may save for 30 s */
#define DRAIN      (1 * SECOND)  /* for output that a rank's own children still hold */

/* ---- starting ---- */

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void set_environment(const host_options *o, const host_world *w, int local) {
    int cores = host_cores();
    set_number("RANK", w->children[local].rank);
    set_number("WORLD_SIZE", w->size * o->nnodes);
    set_number("LOCAL_RANK", local);
    set_number("LOCAL_WORLD_SIZE", w->size);
    set_number("PG_SHM_FD", w->fd);
    setenv("MASTER_ADDR", o->master ? o->master_host : "127.0.0.1", 1);
    if (o->master) set_number("MASTER_PORT", o->master_port);
    else unsetenv("MASTER_PORT");
    if (w->link) setenv("PG_STORE_SERVED", "1", 1);
    else unsetenv("PG_STORE_SERVED");
    if (!getenv("OMP_NUM_THREADS")) /* offloaded optimisers need them, too */
        set_number("OMP_NUM_THREADS", cores > w->size ? cores / w->size : 1);
    setenv("OMP_WAIT_POLICY", "passive", 0); /* spinning threads would starve the other ranks */
}

/* In the new process: become the rank.  Ends the process if it cannot. */
static void become_rank(const host_options *o, const host_world *w, int local, char **argv,
                        pid_t launcher, const int write_ends[2]) {
    if (!w->children[local].beside) setpgid(0, w->group);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(HOST_FAILED); /* it died before prctl */
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int i = 0; i < 2; i++)
        if (write_ends[i] >= 0) dup2(write_ends[i], i ? STDERR_FILENO : STDOUT_FILENO);
    if (local ||
        (isatty(STDIN_FILENO) &&
         !w->children[local].beside)) { /* a group in the background must not read the terminal */
        int null = open("/dev/null", O_RDONLY);
        if (null >= 0) dup2(null, STDIN_FILENO);
        if (null > STDERR_FILENO) close(null);
    }
    set_environment(o, w, local);
    execv("/proc/self/exe", argv);
    fprintf(stderr, "pgrun: cannot start a rank: %s\n", strerror(errno));
    _exit(HOST_FAILED);
}

static int start(const host_options *o, host_world *w, int local, char **argv) {
    host_child *c = &w->children[local];
    pid_t launcher = getpid();
    int write_ends[2] = {-1, -1};
    for (int i = 0; i < 2; i++) {
        int ends[2];
        if (!c->rank && isatty(i ? STDERR_FILENO : STDOUT_FILENO)) continue; /* the live line */
        if (pipe2(ends, O_CLOEXEC) < 0) return -1;
        c->pipes[i] = ends[0];
        write_ends[i] = ends[1];
    }
    fflush(NULL);
    c->pid = fork();
    if (c->pid == 0) become_rank(o, w, local, argv, launcher, write_ends);
    for (int i = 0; i < 2; i++)
        if (write_ends[i] >= 0) close(write_ends[i]);
    if (c->pid < 0) return -1;
    w->alive++;
    if (c->beside) return 0;
    if (!w->group) w->group = c->pid;
    setpgid(c->pid, w->group); /* here too, so that it holds before either goes on */
    return 0;
}

/* ---- ending ---- */

static void send_all(host_world *w, int number) {
    for (int i = 0; i < w->size; i++) {
        host_child *c = &w->children[i];
        if (c->pid <= 0 || c->ended) continue;
        int has_it = number == SIGINT && c->beside && w->at_terminal;
        if (!has_it) kill(c->pid, number);
        kill(c->pid, SIGCONT);
        if (!w->asked) c->killed = number;
    }
}

static void first_death(host_world *w, int i) {
    char text[1000];
    w->first = i;
    w->failed_at = pg_page_clock();
    report_write(w);
    report_death(text, sizeof text, w, i);
    pg_shm_mark_dead(w->pages, i, text);
    if (!w->asked) hosts_tell_failure(w->link, text);
}

/* What other hosts tell.  Of our own ranks' failures first_death tells, better than the store. */
static void take_news(host_world *w) {
    host_news n;
    if (!hosts_news(w->link, &n)) return;
    if (n.stop && !w->asked) {
        w->asked = n.stop;
        w->asked_at = pg_page_clock();
        snprintf(w->asked_on, sizeof w->asked_on, " on %s", n.stop_on);
        send_all(w, n.stop == SIGINT ? SIGINT : SIGTERM);
    }
    if (n.again && w->escalated < 2) {
        w->escalated = 2;
        send_all(w, SIGKILL);
    }
    if (!n.failed[0] || n.failed_on == w->node || w->elsewhere[0] || w->asked) return;
    snprintf(w->elsewhere, sizeof w->elsewhere, "%s", n.failed);
    if (w->failed_at) return;
    w->failed_at = pg_page_clock();
    report_write(w);
    pg_shm_mark_dead(w->pages, 0, w->elsewhere);
}

/* Collect the dead; the first that ended badly starts the end of all. */
static void collect(host_world *w) {
    int bad[PG_SHM_RANKS], n = 0;
    for (int i = 0; i < w->size; i++) {
        host_child *c = &w->children[i];
        if (c->pid <= 0 || c->ended || waitpid(c->pid, &c->status, WNOHANG) != c->pid) continue;
        c->ended = 1;
        w->alive--;
        if (WIFEXITED(c->status) && pg_page_of(w->pages, i)->told) {
            if (!w->code) w->code = WEXITSTATUS(c->status);
        } else if (!WIFEXITED(c->status) || WEXITSTATUS(c->status)) bad[n++] = i;
    }
    if (n && w->first < 0 && !w->elsewhere[0]) first_death(w, report_first(w, bad, n));
}

/* While the prompt is open Ctrl-C is the first rank's business; 1: it has it,
 * or has been given it. */
static int prompt_takes(host_world *w, const struct signalfd_siginfo *s) {
    host_child *c = &w->children[0];
    if (s->ssi_signo != SIGINT || !pg_page_of(w->pages, 0)->prompt || c->ended || w->failed_at)
        return 0;
    if (!(c->beside && s->ssi_code == SI_KERNEL)) kill(c->pid, SIGINT);
    return 1;
}

static void take_signals(host_world *w) {
    struct signalfd_siginfo s;
    while (read(w->signals, &s, sizeof s) == (ssize_t)sizeof s) {
        int number = (int)s.ssi_signo;
        if (number == SIGCHLD || prompt_takes(w, &s)) continue; /* collect() follows */
        int again = w->asked && number == SIGINT;
        if (again) w->escalated = 2;
        if (!w->asked) w->asked = number, w->asked_at = pg_page_clock();
        hosts_tell_stop(w->link, w->asked, again);
        w->at_terminal = number == SIGINT && s.ssi_code == SI_KERNEL;
        send_all(w, again ? SIGKILL : number == SIGINT ? SIGINT : SIGTERM);
    }
}

/* The clock's part: those who do not end by themselves are ended. */
static void escalate(host_world *w) {
    int64_t now = pg_page_clock();
    int kill_now = (w->asked && now - w->asked_at > ASKED_KILL) ||
                   (w->failed_at && !w->asked && now - w->failed_at > KILL_AFTER);
    if (kill_now && w->escalated < 2) {
        w->escalated = 2;
        send_all(w, SIGKILL);
    } else if (!w->escalated && !w->asked && w->failed_at && now - w->failed_at > TERM_AFTER) {
        w->escalated = 1;
        send_all(w, SIGTERM);
    }
}

void launch_tick(host_world *w) {
    take_signals(w);
    take_news(w);
    collect(w);
    escalate(w);
}

static int turn(host_world *w, struct pollfd *polls) {
    int n = 0, open_pipes = 0;
    polls[n++] = (struct pollfd){.fd = w->signals, .events = POLLIN};
    polls[n++] = (struct pollfd){.fd = hosts_fd(w->link), .events = POLLIN};
    for (int i = 0; i < w->size; i++)
        for (int k = 0; k < 2; k++, n++) {
            polls[n] = (struct pollfd){.fd = w->children[i].pipes[k], .events = POLLIN};
            open_pipes += polls[n].fd >= 0;
        }
    int tick = w->asked || w->failed_at || !w->alive ? 100 : -1;
    if (poll(polls, (nfds_t)n, tick) < 0) return open_pipes;
    for (int i = 0, p = 2; i < w->size; i++)
        for (int k = 0; k < 2; k++, p++)
            if (polls[p].revents) relay_read(w, &w->children[i], k);
    launch_tick(w);
    return open_pipes;
}

static void watch(host_world *w) {
    struct pollfd *polls = calloc(2 + 2 * (size_t)w->size, sizeof *polls);
    if (!polls) {
        send_all(w, SIGKILL);
        return;
    }
    while (w->alive) turn(w, polls);
    if (w->group) kill(-w->group, SIGKILL); /* what the ranks themselves started */
    for (int64_t end = pg_page_clock() + DRAIN; pg_page_clock() < end && turn(w, polls);) {}
    free(polls);
}

/* Until the ranks of all hosts have ended: who ends first may still be told of a death.  After one,
 * or a signal, host 0 alone waits, since the others' words go by its store. */
static void watch_others(host_world *w) {
    host_news n;
    if (!w->link) return;
    hosts_tell_end(w->link);
    for (int64_t since = 0;;) {
        struct pollfd polls[] = {{.fd = w->signals, .events = POLLIN},
                                 {.fd = hosts_fd(w->link), .events = POLLIN}};
        poll(polls, 2, 100);
        launch_tick(w);
        hosts_news(w->link, &n);
        if (n.over || n.lost) return;
        if (!w->asked && !w->failed_at && !w->code) continue;
        if (n.sent && (w->node || n.left)) return;
        if (!since) since = pg_page_clock();
        if (pg_page_clock() - since > (w->asked ? ASKED_KILL : KILL_AFTER) + DRAIN) return;
    }
}

/* ---- the whole ---- */

static int open_world(host_world *w, const host_options *o) {
    sigset_t watched;
    int watch_for[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
    w->size = o->ranks > 0 ? o->ranks : 1;
    w->node = o->node_rank;
    w->first = w->fd = w->signals = -1;
    w->children = calloc((size_t)w->size, sizeof *w->children);
    if (!w->children) return pg_fail(PG_ENOMEM, "no memory for %d ranks", w->size);
    for (int i = 0; i < w->size; i++) {
        w->children[i].rank = o->node_rank * w->size + i;
        w->children[i].pipes[0] = w->children[i].pipes[1] = -1;
    }
    PG_TRY(w->fd = pg_shm_create(w->size));
    PG_TRY(pg_shm_map(&w->pages, w->fd));
    sigemptyset(&watched);
    for (int i = 0; i < 4; i++) sigaddset(&watched, watch_for[i]);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    signal(SIGPIPE, SIG_IGN); /* relay.c hands it on to the rank */
    w->signals = signalfd(-1, &watched, SFD_NONBLOCK | SFD_CLOEXEC);
    return w->signals < 0 ? pg_fail(PG_EIO, "signalfd: %s", strerror(errno)) : PG_OK;
}

static int exit_code(const host_world *w) {
    if (w->asked) return 128 + (w->asked == SIGHUP ? SIGTERM : w->asked);
    if (w->first < 0) return w->elsewhere[0] ? HOST_FAILED : w->code;
    int status = w->children[w->first].status;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static void tell(const host_world *w) {
    char head[1400];
    fflush(stdout);
    if (w->asked)
        fprintf(stderr, "pgrun: stopped by SIG%s%s\n", sigabbrev_np(w->asked), w->asked_on);
    else if (w->story) {
        report_head(head, sizeof head, w);
        fprintf(stderr, "%s%s", head, w->story);
    }
    int killed = 0;
    for (int i = 0; i < w->size; i++) killed += w->children[i].killed != 0;
    if (killed)
        fprintf(stderr, "    %d of the others did not end by %s and %s stopped\n", killed,
                killed == 1 ? "itself" : "themselves", killed == 1 ? "was" : "were");
}

int host_launch(const host_options *o, int argc, char **argv) {
    host_world w = {0};
    char **rank_argv = host_options_for_rank(argc, argv);
    int code = HOST_FAILED;
    w.fd = w.signals = -1;
    if (!rank_argv || (o->nnodes > 1 && hosts_meet(&w.link, o) < 0) || open_world(&w, o) < 0) {
        fprintf(stderr, "pgrun: %s\n", pg_errmsg());
        goto done;
    }
    w.children[0].beside = host_opens_prompt(o) && isatty(STDIN_FILENO);
    for (int i = 0; i < w.size; i++)
        if (start(o, &w, i, rank_argv) < 0) {
            fprintf(stderr, "pgrun: cannot start rank %d: %s\n", i, strerror(errno));
            send_all(&w, SIGKILL);
            w.escalated = 2;
            w.first = i;
            w.children[i].status = HOST_FAILED << 8; /* as if it had exited so */
            w.failed_at = pg_page_clock();
            hosts_tell_failure(w.link, "it cannot start its ranks");
            break;
        }
    if (w.alive) watch(&w);
    watch_others(&w);
    for (int i = 0; i < w.size; i++) relay_finish(&w, &w.children[i]);
    tell(&w);
    code = exit_code(&w);
done:
    if (w.pages) pg_shm_unmap(w.pages);
    if (w.fd >= 0) close(w.fd);
    if (w.signals >= 0) close(w.signals);
    hosts_leave(w.link);
    free(w.story);
    free(w.children);
    free(rank_argv);
    return code;
}
