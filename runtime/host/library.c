/* library.c: require "pg.host": what Lua may ask of the host, and the text of pg.h as "pg.header".
 *
 * Functions here use the Lua C API, not the FFI: they are called a few times a step at most. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>

#include "../backend/page.h"
#include "../base/system.h"
#include "host.h"

static const host_options *options;
static char script[PATH_MAX];

void host_library_options(const host_options *o) { options = o; }
const char *host_script_path(void) { return *script ? script : NULL; }
void host_library_script(const char *path) { snprintf(script, sizeof script, "%s", path); }

/* stop_requested() -> boolean.  The training loop asks this between steps. */
static int stop_requested(lua_State *L) {
    lua_pushboolean(L, host_stop_requested() != 0);
    return 1;
}

/* claim_stop(boolean): from now on SIGTERM only answers stop_requested(), for 30 s. */
static int claim_stop(lua_State *L) {
    luaL_checkany(L, 1);
    host_claim_stop(lua_toboolean(L, 1));
    return 0;
}

/* request_stop(): the loop that has claimed the stop ends as if SIGTERM had
 * come, without its limit. */
static int request_stop(lua_State *L) {
    (void)L;
    host_request_stop();
    return 0;
}

/* interrupted() -> boolean.  An "interrupted" error is under way. */
static int interrupted(lua_State *L) {
    lua_pushboolean(L, pg_interrupted());
    return 1;
}

/* option_words(word) -> words of the option of pgrun that begins with this one; 0: it is none. */
static int option_words(lua_State *L) {
    lua_pushinteger(L, host_option_words(luaL_checkstring(L, 1)));
    return 1;
}

/* when_interrupted(f): f() -> what is said of Ctrl-C, in place of where it
 * came; nil: nothing more. */
static int when_interrupted(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, "pg.interrupted");
    return 0;
}

/* signal_heard(seconds): a save after "interrupted" calls this first; C works again for so long. */
static int signal_heard(lua_State *L) {
    double seconds = luaL_checknumber(L, 1);
    luaL_argcheck(L, seconds >= 0 && seconds <= 86400, 1, "0 to 86400 seconds");
    host_signal_heard((unsigned)seconds);
    return 0;
}

int host_first_failed(double seconds, const char *message) {
    double end = pg_time() + seconds;
    int fd;
    pg_page_mine(); /* joins the block */
    void *map = pg_page_map(&fd);
    const pg_page *first = map ? pg_page_of(map, 0) : NULL;
    if (!host_ranks().local_rank)
        return 0; /* of several hosts, each one's first tells for itself */
    while (!pg_interrupted() && !(first && first->failure[0])) {
        if (pg_time() >= end) return 0;
        pg_nap_ms(10);
    }
    if (pg_interrupted()) return 1;
    if (message && strncmp(first->failure, message, sizeof first->failure - 1)) return 0;
    /* let it end first, so that the launcher tells of it and not of this rank */
    for (int i = 0; i < 100 && !pg_page_dead(first) && !pg_interrupted(); i++) pg_nap_ms(10);
    pg_nap_ms(100);
    return 1;
}

/* first_failed(seconds) -> boolean: this host's first rank has told why it ends, or this rank is
 * asked to end; false when neither came in time. */
static int first_failed(lua_State *L) {
    lua_pushboolean(L, host_first_failed(luaL_checknumber(L, 1), NULL));
    return 1;
}

/* source(name) -> text, path | nil.  name as in messages: "lua/pg/help/x.md" is pgrun's own; any other
 * is what the command line would mean by it.  path is "" for a copy inside the program. */
static int source(lua_State *L) {
    const char *name = luaL_checkstring(L, 1);
    host_source s;
    int ours = !strncmp(name, "lua/pg/", 7);
    if (!(ours ? host_find_file(name, &s) : host_find_script(name, &s))) return 0;
    lua_pushlstring(L, s.text, s.bytes);
    lua_pushstring(L, s.path);
    host_source_free(&s);
    return 2;
}

/* module(name) -> text, name as in messages, path | nil: where require would
 * find pg.* or models.*. */
static int module(lua_State *L) {
    host_source s;
    if (!host_find_module(luaL_checkstring(L, 1), host_script_path(), &s)) return 0;
    lua_pushlstring(L, s.text, s.bytes);
    lua_pushstring(L, s.name);
    lua_pushstring(L, s.path);
    host_source_free(&s);
    return 3;
}

/* waits_at(): note on the status page which line is about to wait: the first outside lua/pg, and
 * where all of the work is ours (a recipe) the first outside mesh.lua.  In C because it stands
 * before every collective: debug.getinfo costs 4 us there. */
static int waits_at(lua_State *L) {
    lua_Debug d;
    char text[LUA_IDSIZE + 16] = "";
    for (int level = 1; level < 60 && lua_getstack(L, level, &d); level++) {
        lua_getinfo(L, "Sl", &d);
        if (d.currentline <= 0) continue;
        int ours = !strncmp(d.source, "@lua/pg/", 8) || strstr(d.source, "/lua/pg/");
        if (ours && (*text || strstr(d.source, "lua/pg/mesh.lua"))) continue;
        snprintf(text, sizeof text, "%s:%d", d.short_src, d.currentline);
        if (!ours) break;
    }
    pg_status_where(text);
    return 0;
}

/* keep_locals(): the caller's locals become globals, but where there is such a one. */
static int keep_locals(lua_State *L) {
    lua_Debug d;
    const char *name;
    if (!lua_getstack(L, 1, &d)) return 0;
    lua_newtable(L); /* of several of one name the last is meant */
    for (int i = 1; (name = lua_getlocal(L, &d, i)); i++) lua_setfield(L, -2, name);
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        lua_pushvalue(L, -2);
        lua_rawget(L, LUA_GLOBALSINDEX);
        int taken = !lua_isnil(L, -1) || *lua_tostring(L, -3) == '('; /* one of Lua's own */
        lua_pop(L, 1);
        if (taken) continue;
        lua_pushvalue(L, -2);
        lua_pushvalue(L, -2);
        lua_rawset(L, LUA_GLOBALSINDEX);
    }
    return 0;
}

static void add_name(const char *path, void *context) {
    lua_State *L = context;
    lua_pushstring(L, path);
    lua_rawseti(L, -2, (int)lua_objlen(L, -2) + 1);
}

/* list(prefix) -> { "lua/pg/help/x.md", ... }: files inside the program. */
static int list(lua_State *L) {
    const char *prefix = luaL_checkstring(L, 1);
    lua_newtable(L);
    host_each_embedded(prefix, add_name, L);
    return 1;
}

pg_ranks host_ranks(void) {
    pg_ranks who;
    if (pg_ranks_read(&who) < 0) who = (pg_ranks){.size = 1, .local_size = 1, .source = ""};
    return who;
}

static void set_facts(lua_State *L) {
    pg_ranks who = host_ranks();
    lua_createtable(L, options->nargs, 0);
    for (int i = 0; i < options->nargs; i++)
        lua_pushstring(L, options->args[i]), lua_rawseti(L, -2, i + 1);
    lua_setfield(L, -2, "args");
    if (options->script) lua_pushstring(L, options->script), lua_setfield(L, -2, "script");
    lua_pushstring(L, options->device ? options->device : "auto"), lua_setfield(L, -2, "device");
    lua_pushnumber(L, (lua_Number)options->memory), lua_setfield(L, -2, "memory");
    lua_pushboolean(L, host_opens_prompt(options));
    lua_setfield(L, -2, "interactive");
    lua_pushinteger(L, who.rank), lua_setfield(L, -2, "rank");
    lua_pushinteger(L, who.size), lua_setfield(L, -2, "ranks");
    if (*host_tree()) lua_pushstring(L, host_tree()), lua_setfield(L, -2, "tree");
    lua_pushinteger(L, getpid()), lua_setfield(L, -2, "pid");
    lua_pushinteger(L, getenv("PG_SHM_FD") ? getppid() : getpid());
    lua_setfield(L, -2, "starter"); /* the launcher, where there is one */
    lua_pushliteral(L, HOST_VERSION), lua_setfield(L, -2, "version");
    lua_getfield(L, LUA_REGISTRYINDEX, "pg.sources"), lua_setfield(L, -2, "sources");
}

static int open_host(lua_State *L) {
    static const luaL_Reg functions[] = {{"stop_requested", stop_requested},
                                         {"claim_stop", claim_stop},
                                         {"interrupted", interrupted},
                                         {"when_interrupted", when_interrupted},
                                         {"option_words", option_words},
                                         {"keep_locals", keep_locals},
                                         {"signal_heard", signal_heard},
                                         {"source", source},
                                         {"list", list},
                                         {"first_failed", first_failed},
                                         {"waits_at", waits_at},
                                         {"module", module},
                                         {"request_stop", request_stop},
                                         {NULL, NULL}};
    const luaL_Reg *parts[] = {functions, host_board_functions, host_line_functions,
                               host_control_functions, host_repl_functions};
    lua_newtable(L);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        for (const luaL_Reg *f = parts[i]; f->name; f++)
            lua_pushcfunction(L, f->func), lua_setfield(L, -2, f->name);
    set_facts(L);
    return 1;
}

/* pg.h without its '#' lines: what ffi.cdef takes. */
static int open_header(lua_State *L) {
    host_source s;
    if (!host_find_file("runtime/pg.h", &s)) return luaL_error(L, "pg.h is not in this program");
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    const char *end = s.text + s.bytes;
    for (const char *line = s.text; line < end;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        const char *next = newline ? newline + 1 : end;
        if (*line != '#') luaL_addlstring(&text, line, (size_t)(next - line));
        else luaL_addchar(&text, '\n'); /* so that a cdef error tells the line in pg.h */
        line = next;
    }
    host_source_free(&s);
    luaL_pushresult(&text);
    return 1;
}

int host_open_library(lua_State *L) {
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "preload");
    lua_pushcfunction(L, open_host), lua_setfield(L, -2, "pg.host");
    lua_pushcfunction(L, open_header), lua_setfield(L, -2, "pg.header");
    lua_pop(L, 2);
    return 0;
}
