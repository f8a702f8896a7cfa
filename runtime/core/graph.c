/* graph.c: graphs of pg.h: recording, what a graph holds, and what is checked before it runs again.
 *
 * A graph's kernels have addresses written in, so those must stay what they are.  Blocks taken
 * while recording come from the graph's own arena (pool.h); storages from before are listed when
 * an op asks for their address, and held.  The list also says which of them the graph writes:
 * what the host knew of their ids is then as after the recording, each time.  Ids that are only
 * read are looked at before each launch, as an op without a graph would: mostly the range noted
 * when they were written. */
#include "graph.h"
#include "../base/capture.h"
#include "check.h"
#include "ops_nn.h"

#include <stdlib.h>

typedef struct {
    pg_storage *storage;
    int writes;
    pg_id_range after; /* of the ids in it, if it writes */
} held;

typedef struct { /* ids to look at before a launch; their storage is in the other list */
    pg_tensor ids;
    const char *op, *what; /* literals */
    int64_t v, ignore;
    int ignores;
} look;

struct pg_graph {
    void *impl; /* the backend's */
    pg_arena *arena;
    held *held;
    look *looks;
    int64_t n_held, n_looks, room_held, room_looks;
    pg_graph *next; /* among the doomed */
};

static struct {
    pg_graph *now;    /* being recorded */
    int64_t number;   /* of recordings so far */
    pg_graph *doomed; /* freed by a finalizer while another was recorded */
} state;

static int grow(void **list, int64_t n, int64_t *room, size_t size) {
    if (n < *room) return 1;
    int64_t more = *room ? 2 * *room : 64;
    void *larger = realloc(*list, (size_t)more * size);
    if (!larger) return 0;
    *list = larger;
    *room = more;
    return 1;
}

static void no_list(void) {
    pg_capture_bars("graph", "there is no memory left for the list of what it holds");
}

void pg_graph_note(pg_storage *s, int writes) {
    pg_graph *g = state.now;
    if (!g || (s->arena && s->arena == g->arena)) return;
    if (s->recorded != state.number) {
        if (!grow((void **)&g->held, g->n_held, &g->room_held, sizeof *g->held)) return no_list();
        s->recorded = state.number;
        s->entry = g->n_held++;
        g->held[s->entry] = (held){.storage = s};
        __atomic_add_fetch(&s->owners, 1, __ATOMIC_RELAXED);
    }
    g->held[s->entry].writes |= writes;
}

int pg_graph_note_ids(const char *op, const char *what, const pg_tensor *ids, int64_t v,
                      const int64_t *ignore, int good) {
    pg_graph *g = state.now;
    pg_storage *s = ids->storage;
    pg_graph_note(s, 0);
    if (!g || s->arena == g->arena || g->held[s->entry].writes) {
        if (good) return PG_OK;
        return pg_capture_bars(op, "the ids that it makes cannot be checked; make them before");
    }
    look l = {.ids = *ids, .op = op, .what = what, .v = v, .ignores = ignore != NULL};
    if (ignore) l.ignore = *ignore;
    for (int64_t i = 0; i < g->n_looks; i++) { /* forward and backward ask the same */
        const look *k = &g->looks[i];
        if (k->ids.storage == s && k->ids.first == l.ids.first && k->ids.count == l.ids.count &&
            k->v == v && k->ignores == l.ignores && k->ignore == l.ignore)
            return PG_OK;
    }
    if (!grow((void **)&g->looks, g->n_looks, &g->room_looks, sizeof *g->looks)) {
        no_list();
        return PG_ENOMEM;
    }
    g->looks[g->n_looks++] = l;
    return PG_OK;
}

static void release(pg_graph *g, int spoilt) {
    for (int64_t i = 0; i < g->n_held; i++) pg_storage_release(g->held[i].storage);
    pg_arena_close(g->arena, spoilt);
    free(g->held);
    free(g->looks);
    free(g);
}

static void bury(void) {
    while (state.doomed) {
        pg_graph *g = state.doomed;
        state.doomed = g->next;
        pg_graph_free(g);
    }
}

int pg_graph_begin(void) {
    PG_POLL();
    PG_TRY(pg_capture_bars("graph", "one is recorded at a time"));
    const pg_backend *b = pg_backend_now();
    if (!b) return PG_EDEVICE;
    if (!b->graphs || !b->kernels)
        return pg_fail(PG_EGRAPH, "graph: device %s has none; call the function itself", b->name);
    pg_graph *g = calloc(1, sizeof *g);
    if (!g) return pg_fail(PG_ENOMEM, "graph: no memory for its handle");
    if (!(g->arena = pg_arena_new())) return free(g), PG_ENOMEM;
    int rc = b->graphs->begin();
    if (rc < 0) return release(g, 0), rc;
    pg_capture_begin();
    pg_arena_use(g->arena);
    state.number++;
    state.now = g;
    return PG_OK;
}

/* What was written was not: nothing is known of it. */
static void forget_ids(pg_graph *g) {
    for (int64_t i = 0; i < g->n_held; i++)
        if (g->held[i].writes) g->held[i].storage->ids.known = 0;
}

int pg_graph_end(pg_graph **out) {
    pg_graph *g = state.now;
    if (out) *out = NULL;
    if (!g) return pg_fail(PG_EINVAL, "graph: none is being recorded");
    const char *spoilt = pg_capture_end();
    pg_arena_use(NULL);
    state.now = NULL;
    int rc = pg_backend_device()->graphs->end(out && !*spoilt ? &g->impl : NULL);
    if (*spoilt && out) rc = pg_fail(PG_EGRAPH, "%s", spoilt);
    if (rc < 0 || !out) {
        forget_ids(g);
        release(g, 1);
    } else {
        for (int64_t i = 0; i < g->n_held; i++) g->held[i].after = g->held[i].storage->ids;
        *out = g;
    }
    bury();
    return rc < 0 ? rc : PG_OK;
}

int pg_graph_launch(pg_graph *g) {
    PG_POLL();
    if (!g) return pg_fail(PG_EINVAL, "graph: it is missing (NULL)");
    PG_TRY(pg_capture_bars("graph", "another is not launched in it"));
    const pg_backend *b = pg_backend_device();
    for (int64_t i = 0; i < g->n_held; i++)
        if (g->held[i].storage->dropped)
            return pg_fail(PG_EINVAL, "graph: the numbers of %s are not here now (dropped)",
                           g->held[i].storage->dropped);
    for (int64_t i = 0; i < g->n_looks; i++) {
        const look *l = &g->looks[i];
        PG_TRY(pg_ids_check(b, l->op, l->what, &l->ids, l->v, l->ignores ? &l->ignore : NULL));
    }
    PG_TRY(b->graphs->launch(g->impl));
    for (int64_t i = 0; i < g->n_held; i++)
        if (g->held[i].writes) g->held[i].storage->ids = g->held[i].after;
    return PG_OK;
}

int64_t pg_graph_bytes(const pg_graph *g) { return g ? pg_arena_bytes(g->arena) : 0; }

void pg_graph_free(pg_graph *g) {
    if (!g || pg_backend_closed()) return;
    if (state.now) { /* its list is of storages that may be in use; after the recording */
        g->next = state.doomed;
        state.doomed = g;
        return;
    }
    pg_backend_device()->graphs->free(g->impl);
    release(g, 0);
}
