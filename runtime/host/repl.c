/* repl.c: the C half of the prompt: reading a line, and running one so that Ctrl-C stops it.
 * lua/pg/repl.lua has the rest: what a line means, how values print, what a Tab offers.
 *
 * repl.lua turns the compiler off while a line runs, since only interpreted code sees the hook that
 * Ctrl-C sets; what sits in C is stopped by the flag or, after 5 s, by the alarm (signals.c). */
#include <errno.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#include <editline/readline.h>
#include <lauxlib.h>
#include <luajit.h>

#include "host.h"

#define HISTORY_LINES 2000

static lua_State *state; /* for the completion that libedit calls back */
static int cancelled;    /* the line was given up by Ctrl-C */
static char history[PATH_MAX];

/* ---- bytes from stdin, with an eye on signals ---- */

/* One byte, or -1 at the end of the file or when a signal has come. */
static int next_byte(void) {
    struct pollfd stdin_ready = {.fd = STDIN_FILENO, .events = POLLIN};
    for (;;) {
        if (host_signal_seen()) return -1;
        if (poll(&stdin_ready, 1, 200) <= 0) continue; /* 200 ms: a signal just before the poll */
        unsigned char byte;
        ssize_t n = read(STDIN_FILENO, &byte, 1);
        if (n == 1) return byte;
        if (n == 0 || errno != EINTR) return -1;
    }
}

/* For libedit: one character as wchar_t.  Ctrl-C ends the line, which read_line() then drops. */
static int next_character(FILE *unused) {
    (void)unused;
    mbstate_t shift;
    memset(&shift, 0, sizeof shift);
    for (;;) {
        int byte = next_byte();
        if (byte < 0 && host_signal_seen() == SIGINT) {
            cancelled = 1;
            return '\n';
        }
        if (byte < 0) return -1;
        wchar_t character;
        char part = (char)byte;
        size_t n = mbrtowc(&character, &part, 1, &shift);
        if (n == (size_t)-1) return byte;
        if (n != (size_t)-2) return (int)character;
    }
}

/* ---- completion ---- */

static char *next_match(const char *text, int again) {
    static int i;
    (void)text;
    i = again ? i + 1 : 1;
    lua_rawgeti(state, -1, i); /* the list that complete() left on the stack */
    const char *match = lua_tostring(state, -1);
    char *copy = match ? strdup(match) : NULL;
    lua_pop(state, 1);
    return copy;
}

static char **complete(const char *text, int start, int end) {
    (void)start, (void)end;
    int top = lua_gettop(state);
    char **matches = NULL;
    rl_attempted_completion_over = 1; /* no file names */
    lua_getfield(state, LUA_REGISTRYINDEX, "pg.complete");
    lua_pushstring(state, text);
    if (lua_pcall(state, 1, 1, 0) == 0 && lua_istable(state, -1))
        matches = rl_completion_matches(text, next_match);
    lua_settop(state, top);
    return matches;
}

/* ---- reading lines ---- */

static void find_history(void) {
    const char *named = getenv("PGRUN_HISTORY"), *state_home = getenv("XDG_STATE_HOME");
    const char *home = getenv("HOME");
    char folder[PATH_MAX - 16];
    if (named) {
        snprintf(history, sizeof history, "%s", named);
        return;
    }
    if (state_home && *state_home) snprintf(folder, sizeof folder, "%s/pgrun", state_home);
    else if (home && *home) snprintf(folder, sizeof folder, "%s/.local/state/pgrun", home);
    else return;
    if (pg_fs_mkdir(folder) == PG_OK) snprintf(history, sizeof history, "%s/history", folder);
}

static void open_editor(void) {
    static char breaks[] = " \t\n\"\\'`@$><=;|&{(+-*/%^~,[]#)}";
    if (!setlocale(LC_CTYPE, "") || MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    rl_readline_name = (char *)(uintptr_t) "pgrun";
    rl_catch_signals = 0;
    rl_getc_function = next_character; /* libedit looks at these two in rl_initialize only */
    rl_initialize();
    rl_attempted_completion_function = complete;
    rl_completer_word_break_characters = breaks;
    rl_completion_append_character = 0;
    using_history();
    stifle_history(HISTORY_LINES);
    find_history();
    if (*history) read_history(history);
}

static void remember(const char *line) {
    if (!line[strspn(line, " \t")]) return;
    add_history(line);
    if (*history) write_history(history);
}

static int push_plain_line(lua_State *L) {
    luaL_Buffer line;
    int byte, any = 0;
    luaL_buffinit(L, &line);
    while ((byte = next_byte()) >= 0 && byte != '\n') luaL_addchar(&line, (char)byte), any = 1;
    luaL_pushresult(&line);
    if (byte < 0 && !any) lua_pushnil(L);
    return 1;
}

/* read(prompt) -> the line | nil at the end | false when Ctrl-C gave it up. */
static int read_line(lua_State *L) {
    const char *prompt = luaL_checkstring(L, 1);
    if (!isatty(STDIN_FILENO)) return push_plain_line(L);
    cancelled = 0;
    char *line = readline(prompt);
    if (cancelled) {
        host_signals_reset();
        lua_pushboolean(L, 0);
    } else if (line) {
        remember(line);
        lua_pushstring(L, line);
    } else {
        putchar('\n');
        lua_pushnil(L);
    }
    free(line);
    return 1;
}

/* guard(f) -> true, results... | false, message with traceback. */
static int guard(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    int failed = host_call(L, 0, LUA_MULTRET);
    if (host_signal_seen() == SIGINT) host_signals_reset();
    lua_pushboolean(L, !failed);
    lua_insert(L, 1);
    return lua_gettop(L);
}

/* ended() -> boolean: SIGTERM came. */
static int ended(lua_State *L) {
    lua_pushboolean(L, host_signal_seen() || host_stop_requested());
    return 1;
}

static void push_native(lua_State *L, int terminal) {
    static const luaL_Reg functions[] = {
        {"read", read_line}, {"guard", guard}, {"ended", ended}, {NULL, NULL}};
    lua_newtable(L);
    for (const luaL_Reg *f = functions; f->name; f++)
        lua_pushcfunction(L, f->func), lua_setfield(L, -2, f->name);
    lua_pushboolean(L, terminal), lua_setfield(L, -2, "terminal");
}

/* Open the editor where stdin is a terminal, and leave its Tab to lua/pg/repl.lua. */
static int open_terminal(lua_State *L) {
    int terminal = isatty(STDIN_FILENO);
    state = L;
    if (terminal) open_editor();
    lua_getglobal(L, "require");
    lua_pushliteral(L, "pg.repl");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "complete");
    lua_setfield(L, LUA_REGISTRYINDEX, "pg.complete");
    lua_pop(L, 1);
    return 0;
}

/* terminal() -> { read, guard, ended, terminal }: for whoever reads lines from people. */
static int open_native(lua_State *L) {
    open_terminal(L);
    push_native(L, isatty(STDIN_FILENO));
    return 1;
}

const luaL_Reg host_repl_functions[] = {{"terminal", open_native}, {NULL, NULL}};

/* On several ranks the first reads lines for all (live/prompt.lua), the others follow. */
int host_prompt(lua_State *L) {
    pg_ranks who = host_ranks();
    int terminal = !who.rank && isatty(STDIN_FILENO);
    lua_pushcfunction(L, open_terminal);
    if (!who.rank && host_call(L, 0, 0)) return host_show_error(L);
    lua_getglobal(L, "require");
    lua_pushstring(L, who.size > 1 ? "pg.live.prompt" : "pg.repl");
    if (host_call(L, 1, 1)) return host_show_error(L);
    if (terminal)
        printf("pgrun %s, %s; help() tells more, Ctrl-D ends\n", HOST_VERSION, LUAJIT_VERSION);
    for (;;) {
        lua_getfield(L, -1, "run");
        push_native(L, terminal);
        if (!host_call(L, 1, 1)) break;
        /* Ctrl-C between two lines, in code of ours: go on with the next line */
        if (!terminal || host_signal_seen() != SIGINT) return host_show_error(L);
        host_signals_reset();
        lua_pop(L, 1);
    }
    int all_well = lua_toboolean(L, -1), sign = host_signal_seen();
    lua_pop(L, 2);
    if (sign) return 128 + sign;
    return all_well || terminal ? HOST_DONE : HOST_FAILED;
}
