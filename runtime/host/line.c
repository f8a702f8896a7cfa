/* line.c: running a line of Lua that may not hurt: within a time, with its output kept apart.
 *
 * While a line is open a timer ticks in the thread that runs Lua.  A tick looks whether the line is
 * to stop (its time is over, somebody asked, it prints without end) and then makes C entries fail
 * and sets a hook that raises at every instruction, so that a pcall inside does not swallow it.
 * Only interpreted code sees the hook: the caller turns the compiler off.  What stands still in C
 * for GRACE seconds more cannot be stopped, and the rank ends. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>

#include "../backend/page.h"
#include "host.h"

#define TICK_MS 100
#define GRACE   5 /* seconds to hear that it shall stop */
#define SECOND  1000000000ll
#define PRINTED (64 << 20)  /* bytes that a line may print */
#define KEPT    (256 << 10) /* bytes of them that are handed on */
#define TICK    (SIGRTMIN + 1)

enum reason { NONE, TIME, ASKED, OUTPUT };

/* One line at a time; ticks read and write it, in the same thread. */
static struct {
    lua_State *state;
    timer_t timer;
    int made;                /* the timer is there */
    volatile int open;       /* between line_begin and line_end */
    volatile int running;    /* inside limited() */
    volatile int reason;     /* why it was stopped */
    int64_t deadline, since; /* ns; since: when it was told to stop */
    uint32_t number;         /* of the line, the same on all ranks */
    int prompt, leads;       /* Ctrl-C belongs to it; this rank tells the others */
    int watched;             /* the client's socket, or -1 */
    int output, before;      /* the file that catches stdout, and what was stdout; -1: none */
} line = {.watched = -1, .output = -1, .before = -1};

static void raise_hook(lua_State *L, lua_Debug *d) {
    (void)d;
    luaL_error(L, "interrupted");
}

/* The client has sent an interrupt (a frame of one byte, 'I') or is gone. */
static int client_stops(void) {
    unsigned char head[5];
    if (line.watched < 0) return 0;
    ssize_t n = recv(line.watched, head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
    if (n == 0) return 1;
    return n == 5 && head[0] == 1 && !head[1] && !head[2] && !head[3] && head[4] == 'I';
}

static int prints_too_much(void) {
    struct stat st;
    return line.output >= 0 && fstat(line.output, &st) == 0 && st.st_size > PRINTED;
}

static int find_reason(int64_t now) {
    const pg_page *board = host_board();
    if (client_stops() || (int32_t)(atomic_load(&board->stopped) - line.number) >= 0) return ASKED;
    if (!line.running) return NONE;
    if (now > line.deadline) return TIME;
    return prints_too_much() ? OUTPUT : NONE;
}

static void end_rank(void) {
    static const char text[] = "a line of the prompt stood still in C and could not be stopped";
    pg_status_fail(text);
    if (write(STDERR_FILENO, "pgrun: ", 7) < 0 || write(STDERR_FILENO, text, sizeof text - 1) < 0 ||
        write(STDERR_FILENO, "; ended\n", 8) < 0) { /* nothing to be done about it */
    }
    _exit(HOST_FAILED);
}

static void tick(void) {
    int64_t now = pg_page_clock();
    if (!line.reason) {
        line.reason = find_reason(now);
        line.since = now;
        if (line.reason == ASKED && line.leads) atomic_store(&host_board()->stopped, line.number);
    }
    if (!line.reason || !line.running) return;
    pg_interrupt(1);
    lua_sethook(line.state, raise_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
    if (now - line.since > GRACE * SECOND) end_rank();
}

static void on_tick(int number) {
    int kept = errno;
    (void)number;
    if (line.open) tick();
    errno = kept;
}

int host_line_takes_interrupt(void) {
    if (!line.open || !line.prompt) return 0;
    atomic_store(&host_board()->stopped, line.number);
    return 1;
}

static int set_timer(int ms) {
    struct itimerspec every = {.it_interval = {.tv_nsec = ms * 1000000l},
                               .it_value = {.tv_nsec = ms * 1000000l}};
    return timer_settime(line.timer, 0, &every, NULL);
}

static void make_timer(lua_State *L) {
    struct sigaction action;
    struct sigevent event;
    if (line.made) return;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_tick;
    action.sa_flags = SA_RESTART;
    sigaction(TICK, &action, NULL);
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = TICK;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    if (timer_create(CLOCK_MONOTONIC, &event, &line.timer) < 0)
        luaL_error(L, "no timer for lines: %s", strerror(errno));
    line.made = 1;
}

/* line_begin(number, prompt, watched): a line is about to run, perhaps on other ranks alone.
 * prompt: Ctrl-C stops it and nothing else.  watched: the client that may stop it, or nil. */
static int line_begin(lua_State *L) {
    make_timer(L);
    line.state = L;
    line.number = (uint32_t)luaL_checknumber(L, 1);
    line.prompt = lua_toboolean(L, 2);
    line.watched = lua_isnumber(L, 3) ? host_control_fd((int)lua_tointeger(L, 3)) : -1;
    line.leads = host_ranks().rank == 0;
    line.reason = NONE;
    line.running = 0;
    line.open = 1;
    set_timer(TICK_MS);
    return 0;
}

/* line_end(): all ranks are done with it. */
static int line_end(lua_State *L) {
    (void)L;
    line.open = 0;
    if (line.made) set_timer(0);
    return 0;
}

static void end_running(lua_State *L) {
    line.running = 0;
    lua_sethook(L, NULL, 0, 0);
    if (line.reason && !host_signal_seen()) pg_interrupt(0);
}

/* limited(f, seconds) -> true, results... | false, message with traceback, reason.
 * reason: "time", "asked", "output", or nil: an error of its own. */
static int limited(lua_State *L) {
    static const char *const names[] = {NULL, "time", "asked", "output"};
    luaL_checktype(L, 1, LUA_TFUNCTION);
    line.deadline = pg_page_clock() + (int64_t)(luaL_checknumber(L, 2) * 1e9);
    lua_settop(L, 1);
    line.running = 1;
    int failed = host_call(L, 0, LUA_MULTRET);
    end_running(L);
    lua_pushboolean(L, !failed);
    lua_insert(L, 1);
    if (failed) lua_pushstring(L, names[line.reason]);
    return lua_gettop(L);
}

/* ---- output ---- */

/* capture(): from now on stdout is kept; of C and of programs that are started, too. */
static int capture(lua_State *L) {
    fflush(stdout);
    line.output = memfd_create("pgrun-line", MFD_CLOEXEC);
    line.before = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    if (line.output < 0 || line.before < 0 || dup2(line.output, STDOUT_FILENO) < 0)
        return luaL_error(L, "cannot keep a line's output: %s", strerror(errno));
    return 0;
}

static void push_output(lua_State *L) {
    struct stat st = {0};
    fstat(line.output, &st);
    size_t bytes = st.st_size < KEPT ? (size_t)st.st_size : KEPT;
    char *text = malloc(bytes + 1);
    ssize_t n = text ? pread(line.output, text, bytes, 0) : 0;
    lua_pushlstring(L, text ? text : "", n > 0 ? (size_t)n : 0);
    free(text);
    if (st.st_size <= KEPT) return;
    lua_pushfstring(L, "\n... and %f bytes more\n", (double)(st.st_size - KEPT));
    lua_concat(L, 2);
}

/* captured() -> what has been printed since capture(); stdout is as it was. */
static int captured(lua_State *L) {
    fflush(stdout);
    dup2(line.before, STDOUT_FILENO);
    close(line.before);
    push_output(L);
    close(line.output);
    line.output = line.before = -1;
    return 1;
}

static int nap(lua_State *L) {
    double seconds = luaL_checknumber(L, 1);
    struct timespec t = {.tv_sec = (time_t)seconds,
                         .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
    return 0;
}

const luaL_Reg host_line_functions[] = {
    {"line_begin", line_begin}, {"line_end", line_end}, {"limited", limited}, {"capture", capture},
    {"captured", captured},     {"nap", nap},           {NULL, NULL}};
