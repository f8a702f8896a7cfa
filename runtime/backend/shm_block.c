/* shm_block.c: the segment: made by the launcher or rank 0, mapped by all, grown by each new group.
 *
 * A sparse file: control block and pages first, then regions of groups, each mapped by its members
 * alone.  Nothing is committed before it is written, so the pipes of a large group cost addresses
 * only.  The file never shrinks; a region whose members have all left is punched out and reused. */
#define _GNU_SOURCE /* memfd_create */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096
static int64_t round_page(int64_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

static int64_t control_bytes(int ranks) {
    return round_page((int64_t)sizeof(shm_control) + ranks * (int64_t)sizeof(pg_page));
}

/* Two MiB a turn over all members stay in the caches; measured, half and twice
 * of it are no faster. */
int64_t shm_stage_bytes(int size) {
    int64_t bytes = (2 << 20) / size;
    return round_page(bytes < (64 << 10) ? 64 << 10 : bytes > (512 << 10) ? 512 << 10 : bytes);
}

static int64_t stages_at(int size) {
    return round_page((int64_t)sizeof(shm_region) + size * (int64_t)sizeof(shm_seat));
}
static int64_t stage_stride(int size) {
    return round_page((int64_t)sizeof(shm_call) + shm_stage_bytes(size));
}
static int64_t pipes_at(int size) { return stages_at(size) + 2 * size * stage_stride(size); }
static int64_t pipe_stride(void) { return round_page((int64_t)sizeof(shm_pipe)) + SHM_PIPE_BYTES; }

int64_t shm_region_bytes(int size) { return pipes_at(size) + (int64_t)size * size * pipe_stride(); }

shm_call *shm_stage(const shm_group *g, int member, uint64_t turn) {
    int64_t which = 2 * member + (int64_t)(turn & 1);
    return (shm_call *)((char *)g->region + stages_at(g->size) + which * stage_stride(g->size));
}

shm_pipe *shm_pipe_of(const shm_group *g, int from, int to) {
    int64_t which = (int64_t)from * g->size + to;
    return (shm_pipe *)((char *)g->region + pipes_at(g->size) + which * pipe_stride());
}

int pg_shm_create(int ranks) {
    if (ranks < 1 || ranks > PG_SHM_RANKS)
        return pg_fail(PG_EINVAL, "shm: %d ranks on this host; 1 to %d are possible", ranks,
                       PG_SHM_RANKS);
    int64_t first = control_bytes(ranks);
    int fd = memfd_create("pgrun", 0);
    if (fd < 0) return pg_fail(PG_ECOMM, "shm: memfd_create: %s", strerror(errno));
    void *map = MAP_FAILED;
    if (ftruncate(fd, first + shm_region_bytes(ranks)) == 0)
        map = mmap(NULL, (size_t)(first + stages_at(ranks)), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                   0);
    if (map == MAP_FAILED) {
        int why = errno;
        close(fd);
        return pg_fail(PG_ECOMM, "shm: cannot map the ranks' shared block: %s%s", strerror(why),
                       why == EFBIG ? "; ulimit -f counts it as a file: raise that" : "");
    }
    shm_control *c = map;
    *c = (shm_control){.magic = SHM_MAGIC,
                       .version = SHM_VERSION,
                       .ranks = (uint32_t)ranks,
                       .owner = geteuid(),
                       .top = first + shm_region_bytes(ranks)};
    c->slots[0] = (shm_slot){.used = 1, .size = ranks, .offset = first};
    shm_region *world = (shm_region *)((char *)map + first);
    world->size = ranks;
    world->ready = 1;
    pg_page_write(world->name, sizeof world->name, "world");
    for (int r = 0; r < ranks; r++) {
        c->pages[r].step = -1;
        world->members[r] = r;
    }
    munmap(map, (size_t)(first + stages_at(ranks)));
    return fd;
}

int pg_shm_map(void **map, int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0)
        return pg_fail(PG_ECOMM,
                       "shm: file descriptor %d of PG_SHM_FD: %s; it comes from pgrun's "
                       "launcher, unset it to start without one",
                       fd, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || st.st_size < control_bytes(1))
        return pg_fail(PG_ECOMM, "shm: file descriptor %d is not this user's block of ranks", fd);
    shm_control *c = mmap(NULL, (size_t)control_bytes(1), PROT_READ, MAP_SHARED, fd, 0);
    if (c == MAP_FAILED) return pg_fail(PG_ECOMM, "shm: mmap: %s", strerror(errno));
    int ranks = (int)c->ranks;
    int ours = c->magic == SHM_MAGIC && c->version == SHM_VERSION && c->owner == geteuid() &&
               ranks >= 1 && ranks <= PG_SHM_RANKS && st.st_size >= control_bytes(ranks);
    munmap(c, (size_t)control_bytes(1));
    if (!ours)
        return pg_fail(PG_ECOMM,
                       "shm: file descriptor %d is no block of ranks of this pgrun "
                       "(another version?)",
                       fd);
    *map = mmap(NULL, (size_t)control_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (*map == MAP_FAILED) return pg_fail(PG_ECOMM, "shm: mmap: %s", strerror(errno));
    return PG_OK;
}

void pg_shm_unmap(void *map) {
    if (map) munmap(map, (size_t)control_bytes(pg_page_ranks(map)));
}

int shm_region_map(shm_region **out, int slot) {
    const shm_slot *s = &shm.control->slots[slot];
    void *map = mmap(NULL, (size_t)shm_region_bytes(s->size), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_NORESERVE, shm.fd, s->offset);
    if (map == MAP_FAILED)
        return pg_fail(PG_ENOMEM, "shm: cannot map %lld MiB of addresses for a group of %d: %s",
                       (long long)(shm_region_bytes(s->size) >> 20), s->size, strerror(errno));
    *out = map;
    return PG_OK;
}

void shm_region_unmap(shm_region *r, int size) {
    if (r) munmap(r, (size_t)shm_region_bytes(size));
}

void shm_notice_set(shm_notice *n, int code, const char *text) {
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&n->set, &none, 1)) return;
    n->code = code;
    snprintf(n->text, sizeof n->text, "%s", text ? text : "");
    atomic_store(&n->set, 2);
}

const shm_notice *shm_notice_get(const shm_notice *n) {
    return atomic_load(&n->set) == 2 ? n : NULL;
}

/* The launcher knows who died first; a rank that only saw a peer gone may blame a survivor. */
const shm_notice *shm_world_broken(void) {
    const shm_notice *n = shm_notice_get(&shm.control->dead);
    return n ? n : shm_notice_get(&shm.control->failed);
}

void shm_wake(const shm_group *g) {
    for (int i = 0; i < g->size; i++)
        if (i != g->rank) pg_page_ring(&shm.control->pages[g->members[i]]);
}

void shm_wake_all(shm_control *c) {
    for (uint32_t r = 0; r < c->ranks; r++) pg_page_ring(&c->pages[r]);
}

void pg_shm_mark_dead(void *map, int rank, const char *text) {
    shm_control *c = map;
    char unnamed[64];
    if (!c) return;
    snprintf(unnamed, sizeof unnamed, "rank %d died", rank);
    shm_notice_set(&c->dead, PG_ECOMM, text && *text ? text : unnamed);
    shm_wake_all(c);
}
