/* shm_group.c: groups: how the listed ranks find one another, leave, cancel and start afresh.
 *
 * The first rank of the list leads: it takes a slot, writes the list into the region and announces
 * it in the control block; the others find it there, compare, and take their seats.  A leader forms
 * one group at a time, so there is never a doubt which is meant, even among duplicates.  An
 * announcement is slot + 1 and a running number, so that a slot used again is told apart. */
#define _GNU_SOURCE /* fallocate */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int shm_group_new(shm_group **out, const int *members, int size, int rank, const char *name) {
    shm_group *g = calloc(1, sizeof *g);
    if (g) g->members = calloc((size_t)size, sizeof *g->members);
    if (g) g->lanes = calloc((size_t)(1 + 2 * size), sizeof *g->lanes);
    if (!g || !g->members || !g->lanes) {
        shm_group_drop(g);
        return pg_fail(PG_ENOMEM, "comm_split %s: out of memory", name);
    }
    memcpy(g->members, members, (size_t)size * sizeof *members);
    pg_page_write(g->name, sizeof g->name, name);
    g->size = size;
    g->rank = rank;
    g->slot = -1;
    *out = g;
    return PG_OK;
}

void shm_group_drop(shm_group *g) {
    if (!g) return;
    shm_region_unmap(g->region, g->size);
    free(g->members);
    free(g->lanes);
    free(g);
}

/* A slot whose old region fits, else a new one at the end of the file. */
static int take_slot(int *out, int size) {
    shm_control *c = shm.control;
    for (int fresh = 0; fresh <= 1; fresh++)
        for (int i = 1; i < SHM_GROUPS; i++) {
            uint32_t unused = 0;
            shm_slot *s = &c->slots[i];
            if (!atomic_compare_exchange_strong(&s->used, &unused, 1)) continue;
            if (s->size == (fresh ? 0 : size)) {
                *out = i;
                if (!fresh) return PG_OK;
                int64_t bytes = shm_region_bytes(size);
                s->offset = atomic_fetch_add(&c->top, bytes);
                s->size = size;
                /* a byte at the end: the file grows, and never shrinks as
                 * ftruncate could make it */
                if (pwrite(shm.fd, "", 1, s->offset + bytes - 1) == 1) return PG_OK;
                atomic_store(&s->used, 0);
                return pg_fail(PG_ENOMEM, "comm_split: the shared file cannot grow: %s",
                               strerror(errno));
            }
            atomic_store(&s->used, 0);
        }
    return pg_fail(PG_ENOMEM, "comm_split: %d groups are alive in this world already; free some",
                   SHM_GROUPS);
}

static int lead(shm_group *g) {
    PG_TRY(take_slot(&g->slot, g->size));
    PG_TRY(shm_region_map(&g->region, g->slot));
    shm_region *r = g->region;
    r->size = g->size;
    pg_page_write(r->name, sizeof r->name, g->name);
    for (int i = 0; i < g->size; i++) r->members[i] = g->members[i];
    atomic_store(&r->seats[g->rank].joined, 1);
    atomic_store(&shm.control->forming[shm.rank],
                 shm.led++ * 2 * SHM_GROUPS + (uint32_t)g->slot + 1);
    shm_wake(g);
    return SHM_MOVED;
}

static int seats_taken(const shm_op *op, int after) {
    const shm_group *g = op->group;
    if (g->rank > 0) return after < 0 ? 0 : -1; /* all but the leader wait for the leader */
    for (int i = after + 1; g->region && i < g->size; i++)
        if (!atomic_load(&g->region->seats[i].joined)) return i;
    return -1;
}

/* Even when the lists differ it stays until all have come, so that all hear of it. */
static int advance_leader(shm_op *op) {
    shm_group *g = op->group;
    if (!g->region) {
        int code = lead(g);
        return code < 0 ? shm_fail(op, code, "%s", pg_errmsg()) : code;
    }
    if (seats_taken(op, -1) >= 0) return SHM_BLOCKED;
    atomic_store(&shm.control->forming[shm.rank], 0);
    const shm_notice *n = shm_notice_get(&g->region->broken);
    if (n) return shm_fail(op, n->code, "comm_split: %s", n->text);
    atomic_store(&g->region->ready, 1);
    shm_wake(g);
    return SHM_FINISHED;
}

static void list_text(char *text, size_t bytes, const char *name, const int32_t *members, int n) {
    size_t used = (size_t)snprintf(text, bytes, "%.47s {", name);
    for (int i = 0; i < n && used + 24 < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", i ? "," : "", members[i]);
    snprintf(text + used, bytes - used, "}");
}

/* 1 joined, 0 not meant for this rank, or the lists differ: then it is broken for all. */
static int join(shm_op *op, shm_region *r) {
    shm_group *g = op->group;
    int seat = -1, same = r->size == g->size && !strcmp(r->name, g->name);
    for (int i = 0; i < r->size && i < PG_SHM_RANKS; i++) {
        if (r->members[i] == shm.rank) seat = i;
        same = same && r->members[i] == g->members[i];
    }
    /* Another group may have come and gone while we read: then this was none of ours.  One that
     * this rank has been at has failed, and its leader is about to withdraw it. */
    if (seat < 0 || atomic_load(&shm.control->forming[g->members[0]]) != g->seen) return 0;
    if (atomic_load(&r->seats[seat].joined)) return 0;
    if (same) {
        atomic_store(&r->seats[seat].joined, 1);
        pg_page_ring(&shm.control->pages[g->members[0]]);
        return 1;
    }
    char a[240], b[240], text[SHM_TEXT];
    list_text(a, sizeof a, r->name, r->members, r->size);
    list_text(b, sizeof b, g->name, g->members, g->size);
    snprintf(text, sizeof text,
             "rank %d splits off %s, rank %d splits off %s; all ranks of a group "
             "must name it and list it alike",
             g->members[0], a, shm.rank, b);
    shm_notice_set(&r->broken, PG_ECOMM, text);
    atomic_store(&r->seats[seat].joined, 1);
    shm_wake_all(shm.control);
    return shm_fail(op, PG_ECOMM, "comm_split: %s", text);
}

static int advance_member(shm_op *op) {
    shm_group *g = op->group;
    if (g->region) return atomic_load(&g->region->ready) ? SHM_FINISHED : SHM_BLOCKED;
    uint32_t word = atomic_load(&shm.control->forming[g->members[0]]);
    if (word == 0 || word == g->seen) return SHM_BLOCKED;
    g->seen = word;
    g->slot = (int)(word % (2 * SHM_GROUPS)) - 1;
    shm_region *r;
    int code = shm_region_map(&r, g->slot);
    if (code < 0) return shm_fail(op, code, "%s", pg_errmsg());
    code = join(op, r);
    if (code == 1) g->region = r;
    else shm_region_unmap(r, shm.control->slots[g->slot].size);
    return code == 1 ? SHM_MOVED : code;
}

int shm_split(void **impl, void *parent, const int32_t *ranks, int n, const char *name) {
    int members[PG_SHM_RANKS], rank = 0;
    shm_group *g, *of = parent;
    void *ticket;
    if (!shm.control) return pg_fail(PG_ECOMM, "comm_split: this rank has left its world");
    for (int i = 0; i < n; i++) {
        members[i] = of->members[ranks[i]];
        if (ranks[i] == of->rank) rank = i;
    }
    PG_TRY(shm_group_new(&g, members, n, rank, name));
    shm_op *op = shm_op_new(g, &g->lanes[0], (shm_call){.kind = SHM_SPLIT, .count = n});
    if (!op) {
        shm_group_drop(g);
        return PG_ENOMEM;
    }
    op->advance = rank == 0 ? advance_leader : advance_member;
    op->blocker = seats_taken;
    shm_start(op, &ticket);
    int code = shm_wait(ticket);
    shm_lock();
    if (code < 0) {
        if (rank == 0) atomic_store(&shm.control->forming[shm.rank], 0);
        shm_group_drop(g); /* its slot stays taken: others may still look at it */
    } else {
        g->next = shm.groups;
        shm.groups = g;
        *impl = g;
    }
    shm_unlock();
    return code;
}

/* The last member to leave gives the memory back and frees the slot. */
static void leave(shm_group *g) {
    shm_slot *s = &shm.control->slots[g->slot];
    int last = atomic_fetch_add(&g->region->left, 1) + 1 == (uint32_t)g->size;
    if (!last || g->slot == 0) return;
    fallocate(shm.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, s->offset,
              shm_region_bytes(g->size));
    atomic_store(&s->used, 0);
}

void shm_free(void *impl) {
    shm_group *g = impl;
    if (!g) return;
    shm_lock();
    if (shm.control) {
        shm_abandon(g, PG_ECANCEL, "the group was freed");
        leave(g);
    }
    for (shm_group **at = &shm.groups; *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    if (shm.world == g) shm.world = NULL;
    shm_group_drop(g);
    shm_unlock();
}

int shm_cancel(void *impl, const char *reason) {
    shm_group *g = impl;
    char text[SHM_TEXT];
    if (!g->region)
        return pg_fail(PG_ECOMM, "comm_cancel %s: this rank has left its world", g->name);
    snprintf(text, sizeof text, "cancelled by rank %d: %.900s", shm.rank, reason ? reason : "");
    shm_lock();
    shm_notice_set(&g->region->broken, PG_ECANCEL, text);
    shm_abandon(g, PG_ECANCEL, text);
    shm_unlock();
    shm_wake(g);
    return PG_OK;
}

/* Members whose count of phases is behind this rank's. */
static int not_reformed(const shm_op *op, int after) {
    const shm_group *g = op->group;
    uint32_t mine = atomic_load(&g->region->seats[g->rank].reforms);
    for (int j = after + 1; j < g->size; j++)
        if ((int32_t)(atomic_load(&g->region->seats[j].reforms) - mine) < 0) return j;
    return -1;
}

static void enter_phase(shm_group *g, int phase) {
    atomic_fetch_add(&g->region->seats[g->rank].reforms, 1);
    g->reforming = phase;
    shm_wake(g);
}

/* Each member cleans what it writes; the first also lifts the break. */
static void clean(shm_group *g) {
    g->posts = g->turn = g->calls = 0;
    atomic_store(&g->region->seats[g->rank].posted, 0);
    for (int p = 0; p < g->size; p++) {
        atomic_store(&shm_pipe_of(g, g->rank, p)->head, 0);
        atomic_store(&shm_pipe_of(g, p, g->rank)->tail, 0);
    }
    if (g->rank == 0) atomic_store(&g->region->broken.set, 0);
}

/* Phase 1: nobody touches the group any more.  Phase 2: everybody's part is clean.  A reform that
 * failed half way goes on in its phase when it is called again. */
static int advance_reform(shm_op *op) {
    shm_group *g = op->group;
    if (g->reforming == 0) {
        enter_phase(g, 1);
        return SHM_MOVED;
    }
    if (not_reformed(op, -1) >= 0) return SHM_BLOCKED;
    if (g->reforming == 1) {
        clean(g);
        enter_phase(g, 2);
        return SHM_MOVED;
    }
    g->reforming = 0;
    return SHM_FINISHED;
}

int shm_reform(void *impl) {
    shm_group *g = impl;
    void *ticket;
    if (!g->region)
        return pg_fail(PG_ECOMM, "comm_reform %s: this rank has left its world", g->name);
    shm_op *op = shm_op_new(g, &g->lanes[0], (shm_call){.kind = SHM_REFORM});
    if (!op) return PG_ENOMEM;
    op->advance = advance_reform;
    op->blocker = not_reformed;
    shm_lock();
    shm_abandon(g, PG_ECANCEL, "the group was reformed");
    shm_unlock();
    shm_start(op, &ticket);
    return shm_wait(ticket);
}
