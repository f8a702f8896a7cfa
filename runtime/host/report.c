/* report.c: which rank ended first, how, and what the others did then.
 *
 * Only the launcher can know the first death: a survivor blames whoever left it, who may have left
 * because of another.  So the story is told from the status pages at the moment of that death. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "launch.h"

#define OTHERS_TOLD 8

static const char *signal_name(int number, char room[16]) {
    const char *name = sigabbrev_np(number);
    if (name) snprintf(room, 16, "SIG%s", name);
    else snprintf(room, 16, "signal %d", number);
    return room;
}

void report_death(char *text, size_t bytes, const host_world *w, int i) {
    const host_child *c = &w->children[i];
    const pg_page *p = pg_page_of(w->pages, i);
    char when[48] = " before the first step", name[16];
    if (p->step >= 0) snprintf(when, sizeof when, " at step %lld", (long long)p->step);
    if (WIFSIGNALED(c->status))
        snprintf(text, bytes, "rank %d was killed by %s%s", c->rank,
                 signal_name(WTERMSIG(c->status), name), when);
    else if (p->failure[0])
        snprintf(text, bytes, "rank %d failed%s: %.700s", c->rank, when, p->failure);
    else
        snprintf(text, bytes, "rank %d ended with exit code %d%s", c->rank, WEXITSTATUS(c->status),
                 when);
}

/* When it failed, as its page tells; a death without a message came from outside and goes first. */
static int64_t death_order(const host_world *w, int i) {
    const pg_page *p = pg_page_of(w->pages, i);
    return WIFSIGNALED(w->children[i].status) ? 0 : p->failed_at;
}

int report_first(const host_world *w, const int *ended, int n) {
    int first = ended[0];
    for (int i = 1; i < n; i++)
        if (death_order(w, ended[i]) < death_order(w, first)) first = ended[i];
    for (int i = 0; i < w->size; i++) { /* it may have failed first and be slower to end */
        int64_t at = w->children[i].ended ? 0 : pg_page_of(w->pages, i)->failed_at;
        if (at && at < death_order(w, first)) first = i;
    }
    return first;
}

/* Where a rank of ours ended because of another host's, that one was the first. */
void report_head(char *text, size_t bytes, const host_world *w) {
    char death[1200];
    if (w->elsewhere[0]) {
        snprintf(text, bytes, "pgrun: %s\n", w->elsewhere);
        return;
    }
    report_death(death, sizeof death, w, w->first);
    if (w->link) snprintf(text, bytes, "pgrun: %s: %s\n", hosts_self(w->link), death);
    else snprintf(text, bytes, "pgrun: %s\n", death);
}

void report_write(host_world *w) {
    char text[1200];
    size_t bytes;
    FILE *f = open_memstream(&w->story, &bytes);
    if (!f) return;
    int told = 0, others = w->size - (w->first >= 0);
    for (int i = 0; i < w->size && told < OTHERS_TOLD; i++) {
        const host_child *c = &w->children[i];
        if (i == w->first) continue;
        if (c->ended && WIFEXITED(c->status) && !WEXITSTATUS(c->status))
            snprintf(text, sizeof text, "rank %d had ended well", c->rank);
        else pg_page_describe(text, sizeof text, pg_page_of(w->pages, i), c->rank);
        fprintf(f, "    then %s\n", text);
        told++;
    }
    if (others > told) fprintf(f, "    and %d more\n", others - told);
    fclose(f);
}
