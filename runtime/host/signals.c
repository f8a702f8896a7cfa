/* signals.c: Ctrl-C and SIGTERM in a rank.
 *
 * A signal only sets flags.  pg_interrupt() makes every C entry fail with "interrupted", which Lua
 * raises; a hook stops interpreted loops that call no C.  Compiled loops see neither, so an alarm
 * stands behind: if nobody has called host_signal_heard() within 5 s, the process ends.  A second
 * Ctrl-C always kills. */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <lauxlib.h>

#include "host.h"

#define GRACE      5  /* seconds to hear an interrupt */
#define STOP_GRACE 30 /* seconds to finish a step and save after SIGTERM */

static lua_State *state;
static pthread_t main_thread;
static volatile sig_atomic_t seen; /* the signal that asked for an end */
static volatile sig_atomic_t stop; /* SIGTERM, for a loop that has claimed it */
static volatile sig_atomic_t claimed;

int host_signal_seen(void) { return seen; }
int host_stop_requested(void) { return stop; }
/* A loop that has claimed the stop also sees for itself that nobody reads its lines. */
void host_claim_stop(int yes) {
    claimed = yes;
    signal(SIGPIPE, yes ? SIG_IGN : SIG_DFL);
}

void host_request_stop(void) {
    if (claimed && !stop) stop = SIGTERM;
}

/* With a position where that is a line of the user's. */
static void stop_hook(lua_State *L, lua_Debug *d) {
    lua_sethook(L, NULL, 0, 0);
    if (!pg_interrupted()) return;
    if (!lua_getinfo(L, "S", d) || strncmp(d->source, "@lua/pg/", 8)) luaL_error(L, "interrupted");
    lua_pushliteral(L, "interrupted");
    lua_error(L);
}

static void on_alarm(int signal_number) {
    (void)signal_number;
    static const char text[] = "pgrun: did not stop when asked; ended\n";
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) { /* nothing to be done about it */
    }
    _exit(128 + (seen ? seen : stop ? stop : SIGINT));
}

/* Reading a mapped file beyond its end; the signal then does what it would have done. */
static void on_bus(int number) {
    static const char text[] = "pgrun: a data file was cut short while it was read\n";
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) { /* nothing to be done about it */
    }
    signal(number, SIG_DFL);
    raise(number);
}

static void on_signal(int number) {
    if (!pthread_equal(pthread_self(),
                       main_thread)) { /* Lua's hook may only be set from its thread */
        pthread_kill(main_thread, number);
        return;
    }
    if (number == SIGTERM && claimed && !stop) {
        stop = SIGTERM;
        alarm(STOP_GRACE);
        return;
    }
    if (number == SIGINT && host_line_takes_interrupt()) return;
    seen = number;
    pg_interrupt(1);
    lua_sethook(state, stop_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
    signal(number, SIG_DFL);
    alarm(GRACE);
}

static void handle(int number, void (*handler)(int)) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, NULL);
}

void host_signals_install(lua_State *L) {
    state = L;
    main_thread = pthread_self();
    handle(SIGALRM, on_alarm);
    handle(SIGINT, on_signal);
    handle(SIGTERM, on_signal);
    handle(SIGBUS, on_bus);
    signal(SIGPIPE, SIG_DFL);
}

void host_signal_heard(unsigned seconds) {
    pg_interrupt(0);
    lua_sethook(state, NULL, 0, 0);
    alarm(seconds);
}

void host_signals_reset(void) {
    host_signal_heard(0);
    seen = stop = 0;
    handle(SIGINT, on_signal);
    handle(SIGTERM, on_signal);
}
