/* board.c: how the first rank of a host calls the others together without a collective.
 *
 * The words stand on the first rank's status page (backend/page.h), which all ranks of the host
 * see.  `meet` is written before a step and read after it: each step holds a collective that
 * the first rank takes part in, so whoever comes to that turn sees the word.  `calls` wakes
 * ranks that have nothing to do but wait (the prompt).  Ranks of several hosts share no page
 * and use collectives. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>

#include "../backend/page.h"
#include "host.h"

static pg_page *first_page(void) {
    int fd;
    pg_page *mine = pg_page_mine();
    void *map = pg_page_map(&fd);
    return map ? pg_page_of(map, 0) : mine;
}

pg_page *host_board(void) { return first_page(); }

/* shared() -> boolean: all ranks of the job see the first rank's page. */
static int shared(lua_State *L) {
    int fd, size = host_ranks().size;
    void *map = pg_page_map(&fd);
    lua_pushboolean(L, size == 1 || (map && pg_page_ranks(map) == size));
    return 1;
}

/* meet(turn): all ranks are to meet then. */
static int meet(lua_State *L) {
    atomic_store(&first_page()->meet, (int64_t)luaL_checknumber(L, 1));
    return 0;
}

/* meeting() -> the turn in which all meet; 0: none has been called. */
static int meeting(lua_State *L) {
    lua_pushnumber(L, (lua_Number)atomic_load(&first_page()->meet));
    return 1;
}

/* call(): wake the ranks that wait in wait_call(). */
static int call(lua_State *L) {
    pg_page *p = first_page();
    (void)L;
    atomic_fetch_add(&p->calls, 1);
    syscall(SYS_futex, &p->calls, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return 0;
}

/* wait_call(seen) -> the count of calls, once it differs from seen; false: this rank is to end. */
static int wait_call(lua_State *L) {
    uint32_t seen = (uint32_t)luaL_checkinteger(L, 1);
    pg_page *p = first_page();
    struct timespec slice = {.tv_nsec = 200000000l}; /* a signal may come just before the sleep */
    while (atomic_load(&p->calls) == seen) {
        if (host_signal_seen() || host_stop_requested() || pg_page_dead(p)) {
            lua_pushboolean(L, 0);
            return 1;
        }
        syscall(SYS_futex, &p->calls, FUTEX_WAIT, seen, &slice, NULL, 0);
    }
    lua_pushinteger(L, (lua_Integer)atomic_load(&p->calls));
    return 1;
}

/* prompt_open(boolean): from now on Ctrl-C stops the line, not the job. */
static int prompt_open(lua_State *L) {
    atomic_store(&first_page()->prompt, lua_toboolean(L, 1));
    return 0;
}

/* told(): why this rank ends with its exit code has been said; the launcher need not tell. */
static int told(lua_State *L) {
    (void)L;
    atomic_store(&pg_page_mine()->told, 1);
    return 0;
}

const luaL_Reg host_board_functions[] = {{"shared", shared},       {"meet", meet},
                                         {"meeting", meeting},     {"call", call},
                                         {"wait_call", wait_call}, {"prompt_open", prompt_open},
                                         {"told", told},           {NULL, NULL}};
