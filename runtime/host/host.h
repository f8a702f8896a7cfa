/* host.h: what the files of this room share.
 *
 * The host starts Lua and ranks and ends them; it is the only room that knows lua.h.  main.c reads
 * the command line (options.c) and takes one of two ways: launch.c starts N processes and waits for
 * them (relay.c carries their output, report.c tells of the first death, hosts.c speaks with the
 * launchers of other hosts), or script.c runs Lua in this process, with files found by source.c,
 * signals by signals.c and the prompt by repl.c.  A run that goes on is reached through control.c;
 * line.c runs what comes from there, on the ranks that board.c has called together. */
#ifndef PG_HOST_H
#define PG_HOST_H
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include <lauxlib.h>

#include "../backend/page.h"
#include "../backend/ranks.h"
#include "../pg.h"

#define HOST_VERSION "0.1.0"

enum host_exit { HOST_DONE = 0, HOST_FAILED = 1, HOST_USAGE = 2 };

/* ---- options.c ---- */
#define HOST_MAX_CODE 16
typedef struct host_options {
    int ranks; /* -n; 0 when not given */
    int interactive, no_jit, help, version;
    const char *device; /* NULL when not given */
    int64_t memory;     /* bytes; 0 when not given */
    int nnodes, node_rank;
    const char *master; /* HOST:PORT or NULL; below: its two parts */
    char master_host[256];
    int master_port;
    const char *code[HOST_MAX_CODE]; /* the -e lines, in order */
    int codes;
    char *script; /* a file or a verb; NULL: none */
    char **args;  /* what follows it, NULL at the end */
    int nargs;
} host_options;

/* Fill *o from the command line; on a mistake print why to stderr and return HOST_USAGE. */
int host_options_read(host_options *o, int argc, char **argv);
/* argv without -n and its value, for the ranks that the launcher starts; NULL-ended, malloced. */
char **host_options_for_rank(int argc, char **argv);
int host_opens_prompt(const host_options *o);
/* Words of the option that begins with this one: 2 where its value is the next; 0: no option. */
int host_option_words(const char *text);
void host_usage(void);
int host_cores(void); /* that this process may use */

/* ---- source.c ---- */
typedef struct host_source {
    char *text; /* malloced, bytes long; NULL: not loaded */
    size_t bytes;
    char name[PATH_MAX]; /* as people type it: "models/tiny.lua", "lua/pg/init.lua" */
    char path[PATH_MAX]; /* the file it came from; "" for a copy inside the program */
} host_source;

const char *host_tree(void); /* the source tree's folder, or "" when the program lies in none */
void host_source_free(host_source *s);
/* Each returns 1 and fills *out, or 0.  A file that is there but cannot be
 * read counts as absent. */
int host_find_script(const char *given, host_source *out);
int host_find_verb(const char *verb, host_source *out);
int host_find_module(const char *module, const char *script, host_source *out); /* pg.*, models.* */
int host_find_file(const char *path, host_source *out); /* "lua/pg/help/x.md": the tree's or ours */
/* Call see(name, context) for each embedded path under prefix. */
void host_each_embedded(const char *prefix, void (*see)(const char *path, void *context),
                        void *context);

/* ---- script.c ---- */
lua_State *host_lua_open(const host_options *o);
/* Run all that the command line asks for; the exit code. */
int host_run(lua_State *L, const host_options *o);
/* What `name` on the command line means: 1 a verb, 0 a script, -1 neither (said on stderr). */
int host_find_work(const char *name, host_source *out);
/* lua_pcall with our message handler: on failure the top holds the message with its traceback. */
int host_call(lua_State *L, int nargs, int nresults);
/* Print the error on the stack's top (and pop it) as this rank's last word; the exit code. */
int host_show_error(lua_State *L);
void host_load_source(lua_State *L, const host_source *s); /* leaves a function, or raises */

/* ---- library.c ---- */
int host_open_library(lua_State *L); /* package.preload["pg.host"] */
pg_ranks host_ranks(void);           /* a world of one where the environment makes no sense */
void host_library_options(const host_options *o);
/* 1 if this host's first rank tells within `seconds` why it ends, with this message (NULL: any). */
int host_first_failed(double seconds, const char *message);
const char *host_script_path(void); /* the script being run, or NULL */
void host_library_script(const char *path);

/* ---- signals.c ---- */
void host_signals_install(lua_State *L);
int host_signal_seen(void);        /* SIGINT or SIGTERM that asks for an end; 0: none */
int host_stop_requested(void);     /* SIGTERM came and a training loop has claimed it */
void host_claim_stop(int claimed); /* the caller polls host_stop_requested() */
void host_request_stop(void);      /* as SIGTERM, for a loop that has claimed it; no time limit */
/* The signal has been heard: C entries work again, and `seconds` remain to end (0: no limit). */
void host_signal_heard(unsigned seconds);
void host_signals_reset(void); /* the prompt: the line is over, be ready for the next */

/* ---- repl.c ---- */
int host_prompt(lua_State *L);
extern const luaL_Reg host_repl_functions[]; /* these tables become parts of pg.host */

/* ---- board.c ---- */
pg_page *host_board(void); /* the page on which this host's first rank calls the others */
extern const luaL_Reg host_board_functions[];

/* ---- line.c ---- */
int host_line_takes_interrupt(
    void); /* 1: Ctrl-C was meant for the line that runs, and is seen to */
extern const luaL_Reg host_line_functions[];

/* ---- control.c ---- */
int host_control_fd(int id); /* of that peer; -1: none */
extern const luaL_Reg host_control_functions[];

/* ---- launch.c ---- */
int host_launch(const host_options *o, int argc, char **argv);
#endif
