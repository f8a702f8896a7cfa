/* main.c: from the command line to one of the two ways a pgrun goes: start ranks, or run Lua. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <luajit.h>

#include "../backend/page.h"
#include "host.h"

/* Where pgrun starts with one of them closed, a run's file would take its number and its lines. */
static void keep_standard_streams(void) {
    for (int fd = open("/dev/null", O_RDWR); fd >= 0; fd = open("/dev/null", O_RDWR)) {
        if (fd <= STDERR_FILENO) continue;
        close(fd);
        return;
    }
}

static int start_rank(const host_options *o) {
    setvbuf(stdout, NULL, _IOLBF, 0); /* a line printed is a line kept, however this rank ends */
    lua_State *L = host_lua_open(o);
    if (!L) return HOST_FAILED;
    host_signals_install(L);
    pg_page_mine();      /* from here on the launcher and the other ranks can tell how far we are */
    atexit(pg_shutdown); /* after os.exit; else below, before any library's own end */
    int64_t share = o->memory / pg_ranks_here();
    if ((o->device || o->memory) && pg_init(o->device ? o->device : "auto", share) < 0) {
        fprintf(stderr, "pgrun: %s\n", pg_errmsg());
        pg_status_fail(pg_errmsg());
        return HOST_FAILED;
    }
    int code = host_run(L, o);
    lua_close(L);
    pg_shutdown();
    return code;
}

static int start_ranks(const host_options *o, int argc, char **argv) {
    host_source s = {0};
    if (o->script && host_find_work(o->script, &s) < 0)
        return HOST_USAGE; /* said once, not N times */
    host_source_free(&s);
    return host_launch(o, argc, argv);
}

int main(int argc, char **argv) {
    host_options o;
    keep_standard_streams();
    /* past ulimit -f a write fails, and is told of, instead of killing us */
    signal(SIGXFSZ, SIG_IGN);
    int rc = host_options_read(&o, argc, argv);
    if (rc) return rc;
    if (o.help) {
        host_usage();
        return HOST_DONE;
    }
    if (o.version) {
        printf("pgrun %s\nLuaJIT   %s\n%s", HOST_VERSION, LUAJIT_VERSION, pg_version_info());
        return HOST_DONE;
    }
    if (o.ranks > 1 || o.nnodes > 1) return start_ranks(&o, argc, argv);
    return start_rank(&o);
}
