/* script.c: Lua in this process: the state, how require finds files, running what the command line
 * names, and what an error looks like.
 *
 * A script that returns a table is a recipe and goes to pg.recipe; one that returns nothing has
 * done its own work.  The global `pg` loads itself at the first look, so that `pgrun -e 'print(1)'`
 * costs no more than Lua itself. */
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <lauxlib.h>
#include <luajit.h>
#include <lualib.h>

#include "host.h"

/* ---- errors ---- */

#define SAME_MISTAKE 0.3 /* seconds that rank 0 has to make the mistake of another rank as well */

/* How many frames were there when the innermost host_call() began: those are
 * ours, not the user's. */
static int floor_frames;

static int count_frames(lua_State *L) {
    lua_Debug d;
    int n = 0;
    while (lua_getstack(L, n, &d)) n++;
    return n;
}

/* Append "\n    models/x.lua:14: in function 'loss'" for each Lua frame outside lua/pg. */
static void add_frames(lua_State *L, luaL_Buffer *text, int about_us) {
    const char *all = getenv("PG_TRACEBACK");
    int hide = !(all && *all && strcmp(all, "0")), hidden = 0, shown = 0;
    lua_Debug d;
    char line[LUA_IDSIZE + 128];
    int end = count_frames(L) - floor_frames;
    for (int level = 1; level < end && lua_getstack(L, level, &d) && shown < 24; level++) {
        lua_getinfo(L, "Snl", &d);
        if (*d.what == 'C' && hide) continue;
        if (hide && !strncmp(d.source, "@lua/pg/", 8)) {
            hidden++;
            continue;
        }
        if (*d.what == 'm')
            snprintf(line, sizeof line, "\n    %s:%d: in the main chunk", d.short_src,
                     d.currentline);
        else if (d.name)
            snprintf(line, sizeof line, "\n    %s:%d: in '%.60s'", d.short_src, d.currentline,
                     d.name);
        else
            snprintf(line, sizeof line, "\n    %s:%d: in the function at line %d", d.short_src,
                     d.currentline, d.linedefined);
        luaL_addstring(text, line);
        shown++;
    }
    /* With no frame of the user's to show, only a fault of our own asks for more. */
    if (!hidden || (!shown && !about_us)) return;
    snprintf(line, sizeof line, "\n    (%d more in lua/pg; PG_TRACEBACK=1 shows them)", hidden);
    luaL_addstring(text, line);
}

/* The message handler: anything becomes a string with the way there. */
static int explain(lua_State *L) {
    if (lua_type(L, 1) != LUA_TSTRING && !luaL_callmeta(L, 1, "__tostring")) {
        if (lua_isnumber(L, 1)) lua_pushvalue(L, 1);
        else lua_pushfstring(L, "an error that is a %s, not a message", luaL_typename(L, 1));
    }
    const char *message = lua_tostring(L, -1);
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    luaL_addstring(&text, message ? message : "an error whose __tostring gives no string");
    add_frames(L, &text, message && !strncmp(message, "lua/pg/", 7));
    luaL_pushresult(&text);
    return 1;
}

int host_call(lua_State *L, int nargs, int nresults) {
    int base = lua_gettop(L) - nargs, outer = floor_frames;
    floor_frames = count_frames(L);
    lua_pushcfunction(L, explain);
    lua_insert(L, base);
    int rc = lua_pcall(L, nargs, nresults, base);
    floor_frames = outer;
    lua_remove(L, base);
    return rc;
}

/* What a loop says of an interrupt takes the message's place on the stack. */
static void ask_loop(lua_State *L) {
    lua_getfield(L, LUA_REGISTRYINDEX, "pg.interrupted");
    if (!lua_isnil(L, -1) && !lua_pcall(L, 0, 1, 0) && lua_isstring(L, -1)) lua_replace(L, -2);
    else lua_pop(L, 1);
}

int host_show_error(lua_State *L) {
    int sign = host_signal_seen();
    pg_ranks who = host_ranks();
    if (sign) {
        host_signal_heard(5); /* what is left is to end */
        ask_loop(L);
    }
    const char *message = lua_tostring(L, -1);
    if (!message) message = "an error without a message";
    fflush(stdout);
    char first_line[1024];
    snprintf(first_line, sizeof first_line, "%.*s", (int)strcspn(message, "\n"), message);
    if (who.rank && !sign && host_first_failed(SAME_MISTAKE, first_line)) { /* rank 0 tells it */
        pg_status_fail(first_line); /* after rank 0, so that this end is not taken for the first */
        lua_pop(L, 1);
        return HOST_FAILED;
    }
    pg_status_fail(first_line);
    if (who.size == 1) fprintf(stderr, "pgrun: %s\n", message);
    else if (!sign) fprintf(stderr, "[rank %d] %s\n", who.rank, message);
    else if (!who.rank)
        fprintf(stderr, "[rank 0] %s\n", first_line); /* they all stop: one says it */
    lua_pop(L, 1);
    return sign ? 128 + sign : HOST_FAILED;
}

/* ---- require ---- */

void host_load_source(lua_State *L, const host_source *s) {
    const char *text = s->text;
    size_t n = s->bytes;
    if (n &&
        *text == '#') { /* "#!/usr/bin/env pgrun": keep the newline, so that lines count right */
        const char *newline = memchr(text, '\n', n);
        n = newline ? n - (size_t)(newline - text) : 0;
        if (newline) text = newline;
    }
    lua_getfield(L, LUA_REGISTRYINDEX, "pg.sources");
    lua_pushstring(L, s->path);
    lua_setfield(L, -2, s->name);
    lua_pop(L, 1);
    lua_pushfstring(L, "@%s", s->name);
    if (luaL_loadbuffer(L, text, n, lua_tostring(L, -1))) lua_error(L);
    lua_remove(L, -2);
}

/* Loads the source on the way and frees it, also when it does not compile. */
static int load_protected(lua_State *L) {
    host_load_source(L, lua_touserdata(L, 1));
    return 1;
}

static int load_and_free(lua_State *L, host_source *s) {
    lua_pushcfunction(L, load_protected);
    lua_pushlightuserdata(L, s);
    int rc = lua_pcall(L, 1, 1, 0);
    host_source_free(s);
    return rc;
}

static int search_module(lua_State *L) {
    const char *name = luaL_checkstring(L, 1);
    host_source s;
    if (!host_find_module(name, host_script_path(), &s)) {
        if (strncmp(name, "pg.", 3) && strncmp(name, "models.", 7)) return 0;
        lua_pushfstring(L, "\n\tno %s here, beside the script, or in pgrun", name);
        return 1;
    }
    if (load_and_free(L, &s)) return lua_error(L);
    return 1;
}

static void add_searcher(lua_State *L) { /* second: after package.preload, before package.path */
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "loaders");
    for (int i = (int)lua_objlen(L, -1); i >= 2; i--) {
        lua_rawgeti(L, -1, i);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushcfunction(L, search_module);
    lua_rawseti(L, -2, 2);
    lua_pop(L, 2);
}

/* Other modules may lie beside the script. */
static void add_script_folder(lua_State *L, const char *script) {
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", script);
    const char *d = dirname(folder);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    lua_pushfstring(L, "%s/?.lua;%s/?/init.lua;%s", d, d, lua_tostring(L, -1));
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
}

/* _G's __index until `pg` is first looked at. */
static int load_pg(lua_State *L) {
    const char *key = lua_tostring(L, 2);
    if (lua_type(L, 2) != LUA_TSTRING || strcmp(key, "pg")) return 0;
    lua_getfield(L, LUA_GLOBALSINDEX, "require");
    lua_pushliteral(L, "pg");
    lua_call(L, 1, 1);
    lua_pushvalue(L, -1);
    lua_setglobal(L, "pg");
    if (lua_getmetatable(L, LUA_GLOBALSINDEX)) {
        lua_pushnil(L);
        lua_setfield(L, -2, "__index");
        lua_pop(L, 1);
    }
    return 1;
}

/* ---- the state ---- */

static lua_State *only; /* reachable to the end, so that os.exit leaves no false leak */

#ifdef PG_SANITIZED
static void *allocate(void *user, void *block, size_t before, size_t n) {
    (void)user, (void)before;
    if (n) return realloc(block, n);
    free(block);
    return NULL;
}
static lua_State *new_state(void) { return lua_newstate(allocate, NULL); }
#else
static lua_State *new_state(void) { return luaL_newstate(); }
#endif

static int open_all(lua_State *L) {
    luaL_openlibs(L);
    lua_newtable(L);
    lua_setfield(L, LUA_REGISTRYINDEX, "pg.sources");
    lua_pushthread(L);
    lua_setfield(L, LUA_REGISTRYINDEX, "pg.main"); /* pg.reload looks at its stack */
    add_searcher(L);
    host_open_library(L);
    lua_newtable(L);
    lua_pushcfunction(L, load_pg);
    lua_setfield(L, -2, "__index");
    lua_setmetatable(L, LUA_GLOBALSINDEX);
    return 0;
}

lua_State *host_lua_open(const host_options *o) {
    lua_State *L = only = new_state();
    if (!L) {
        fprintf(stderr, "pgrun: no memory for Lua\n");
        return NULL;
    }
    host_library_options(o);
    if (lua_cpcall(L, open_all, NULL)) {
        host_show_error(L);
        return NULL;
    }
    if (o->no_jit) luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
    return L;
}

/* ---- running ---- */

static void set_arg(lua_State *L, const host_options *o) {
    lua_createtable(L, o->nargs, 2);
    lua_pushliteral(L, "pgrun");
    lua_rawseti(L, -2, o->script ? -1 : 0);
    if (o->script) lua_pushstring(L, o->script), lua_rawseti(L, -2, 0);
    for (int i = 0; i < o->nargs; i++) lua_pushstring(L, o->args[i]), lua_rawseti(L, -2, i + 1);
    lua_setglobal(L, "arg");
}

/* A verb or a recipe's run says by what it returns whether the work was done. */
static int code_of(lua_State *L) {
    int code = lua_isnumber(L, -1)                             ? (int)lua_tointeger(L, -1)
               : lua_isboolean(L, -1) && !lua_toboolean(L, -1) ? HOST_FAILED
                                                               : HOST_DONE;
    lua_pop(L, 1);
    return code;
}

/* The recipe on the stack's top: pg.recipe.run(recipe, {path=, text=, args=}). */
static int run_recipe(lua_State *L, const host_options *o, const host_source *s) {
    int recipe = lua_gettop(L);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "pg.recipe");
    if (host_call(L, 1, 1)) return host_show_error(L);
    lua_getfield(L, -1, "run");
    lua_pushvalue(L, recipe);
    lua_createtable(L, 0, 4);
    lua_pushstring(L, s->name), lua_setfield(L, -2, "path");
    lua_pushlstring(L, s->text, s->bytes), lua_setfield(L, -2, "text");
    lua_createtable(L, o->nargs, 0);
    for (int i = 0; i < o->nargs; i++) lua_pushstring(L, o->args[i]), lua_rawseti(L, -2, i + 1);
    lua_setfield(L, -2, "args");
    if (host_call(L, 2, 1)) return host_show_error(L);
    return code_of(L);
}

/* The script on the stack's top gives its place to one that hands its locals to the prompt at its
 * end (library.c), where the prompt comes next; one that returns at its end cannot. */
static void show_locals(lua_State *L, const host_source *s) {
    static const char end[] = "\nrequire('pg.host').keep_locals()";
    host_source longer = *s;
    longer.bytes = s->bytes + sizeof end - 1;
    if (!(longer.text = malloc(longer.bytes + 1))) return;
    memcpy(longer.text, s->text, s->bytes);
    memcpy(longer.text + s->bytes, end, sizeof end);
    lua_pushcfunction(L, load_protected);
    lua_pushlightuserdata(L, &longer);
    if (lua_pcall(L, 1, 1, 0)) lua_pop(L, 1);
    else lua_replace(L, -2);
    free(longer.text);
}

static int run_source(lua_State *L, const host_options *o, const host_source *s, int verb) {
    lua_pushcfunction(L, load_protected);
    lua_pushlightuserdata(L, (void *)s);
    if (lua_pcall(L, 1, 1, 0)) return host_show_error(L); /* the message has file and line */
    if (!verb && host_opens_prompt(o)) show_locals(L, s);
    luaL_checkstack(L, o->nargs, "too many arguments");
    for (int i = 0; i < o->nargs; i++) lua_pushstring(L, o->args[i]);
    if (host_call(L, o->nargs, 1)) return host_show_error(L);
    if (verb) return code_of(L);
    if (lua_istable(L, -1)) return run_recipe(L, o, s);
    if (lua_isnil(L, -1)) return HOST_DONE;
    fprintf(stderr, "pgrun: %s returned a %s; a script returns a recipe (a table), or nothing\n",
            s->name, luaL_typename(L, -1));
    return HOST_FAILED;
}

int host_find_work(const char *name, host_source *out) {
    if (host_find_verb(name, out)) return 1;
    if (host_find_script(name, out)) return 0;
    errno = 0; /* it may be there and be a folder, or not be ours to read */
    FILE *f = fopen(name, "rb");
    if (f) (void)fgetc(f), fclose(f);
    if (errno && errno != ENOENT) {
        fprintf(stderr, "pgrun: %s: %m; name a Lua file that can be read\n", name);
        return -1;
    }
    fprintf(stderr,
            "pgrun: %s: no such file here or in models/, and no such verb; "
            "pgrun help lists what there is\n",
            name);
    return -1;
}

static int run_script(lua_State *L, const host_options *o) {
    host_source s;
    int verb = host_find_work(o->script, &s);
    if (verb < 0) return HOST_USAGE;
    if (!verb) {
        host_library_script(s.name);
        add_script_folder(L, s.name);
    }
    int code = run_source(L, o, &s, verb);
    host_source_free(&s);
    return code;
}

static int run_code(lua_State *L, const char *code) {
    if (luaL_loadbuffer(L, code, strlen(code), "=(command line)")) return host_show_error(L);
    return host_call(L, 0, 0) ? host_show_error(L) : HOST_DONE;
}

int host_run(lua_State *L, const host_options *o) {
    int code = HOST_DONE;
    set_arg(L, o);
    for (int i = 0; i < o->codes && !code; i++) code = run_code(L, o->code[i]);
    if (o->script && !code) code = run_script(L, o);
    if (host_opens_prompt(o) && !host_signal_seen()) {
        int prompt = host_prompt(L);
        if (!code) code = prompt;
    }
    int asked = host_stop_requested() ? host_stop_requested() : host_signal_seen();
    if (!asked) return code;
    host_signal_heard(30);            /* what is left is to close Lua */
    return code ? code : 128 + asked; /* it ended early, as it was told: not all work was done */
}
