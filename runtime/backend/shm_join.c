/* shm_join.c: handing the ranks' block round where no launcher passed it on
 * (torchrun, mpirun, Slurm).
 *
 * Rank 0 makes the same anonymous memfd as the launcher and gives it to each rank that calls at a
 * socket in Linux's abstract namespace, named after user, host, port and job.  So there is no file
 * that a crash could leave, nor one of an earlier run that could be joined: the name dies with
 * rank 0, and is closed once all have come.  Both sides ask the kernel who the other is, and talk
 * only to their own user. */
#define _GNU_SOURCE /* MSG_CMSG_CLOEXEC */
#include "../base/system.h"
#include "shm.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_MS  10   /* between two attempts to reach rank 0 */
#define ANSWER_MS 5000 /* a caller has that long to say who it is */

typedef struct {
    uint64_t magic;
    uint32_t version;
    int32_t rank, size;
} hello;

typedef struct { /* the answer; a file descriptor comes with it where it is welcome */
    int32_t welcome;
    char text[252];
} answer;

/* A hash of host and job: long ones would not fit a socket's name. */
static socklen_t address(struct sockaddr_un *a, const char *host, int port, const char *job) {
    uint64_t where = pg_hash(host, (int64_t)strlen(host), 0);
    where = pg_hash(job, (int64_t)strlen(job), where);
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "pgrun-%u-%d-%016llx",
                     (unsigned)geteuid(), port, (unsigned long long)where);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* 1 readable, 0 not within ms. */
static int readable(int s, int ms) {
    struct pollfd p = {.fd = s, .events = POLLIN};
    return poll(&p, 1, ms) == 1;
}

static int give(int s, int fd, const answer *a) {
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec data = {.iov_base = (void *)a, .iov_len = sizeof *a};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (a->welcome) {
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return sendmsg(s, &m, MSG_NOSIGNAL) == (ssize_t)sizeof *a;
}

static int receive(int s, int *fd, answer *a) {
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec data = {.iov_base = a, .iov_len = sizeof *a};
    struct msghdr m = {.msg_iov = &data,
                       .msg_iovlen = 1,
                       .msg_control = &control,
                       .msg_controllen = sizeof control};
    if (recvmsg(s, &m, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *a)
        return pg_fail(PG_ECOMM, "ranks: rank 0 went away while ranks were joining");
    a->text[sizeof a->text - 1] = 0;
    if (!a->welcome) return pg_fail(PG_ECOMM, "ranks: refused by rank 0: %s", a->text);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (!c || c->cmsg_type != SCM_RIGHTS || c->cmsg_len != CMSG_LEN(sizeof *fd))
        return pg_fail(PG_ECOMM, "ranks: rank 0 sent no block");
    memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return PG_OK;
}

/* One caller at rank 0's door; came[] notes it.  A rank that counts the ranks otherwise can never
 * be made up for, so rank 0 fails with it; one too many may belong to another job. */
static int welcome(int s, int fd, int size, char *came) {
    hello h = {0};
    answer a = {0};
    if (!pg_same_user(s) || !readable(s, ANSWER_MS)) return PG_OK;
    if (recv(s, &h, sizeof h, 0) != (ssize_t)sizeof h || h.magic != SHM_MAGIC) return PG_OK;
    if (h.version != SHM_VERSION)
        snprintf(a.text, sizeof a.text, "rank %d runs another version of pgrun", h.rank);
    else if (h.size != size)
        snprintf(a.text, sizeof a.text,
                 "rank %d says %d ranks, rank 0 says %d; set WORLD_SIZE alike on all", h.rank,
                 h.size, size);
    else if (h.rank < 1 || h.rank >= size || came[h.rank])
        snprintf(a.text, sizeof a.text, "rank %d is out of range or there twice", h.rank);
    else a.welcome = 1;
    if (give(s, fd, &a) && a.welcome) came[h.rank] = 1;
    if (h.version == SHM_VERSION && h.size == size) return PG_OK;
    return pg_fail(PG_ECOMM, "ranks: %s", a.text);
}

static void missing(char *text, size_t bytes, const char *came, int size) {
    size_t used = 0;
    text[0] = 0;
    for (int r = 1; r < size && used + 16 < bytes; r++)
        if (!came[r])
            used += (size_t)snprintf(text + used, bytes - used, "%s%d", used ? ", " : "", r);
}

static int bind_until(int s, const struct sockaddr_un *a, socklen_t bytes, int64_t deadline) {
    while (bind(s, (const struct sockaddr *)a, bytes) != 0) {
        if (errno != EADDRINUSE) return pg_fail(PG_ECOMM, "ranks: bind: %s", strerror(errno));
        PG_POLL();
        if (pg_page_clock() > deadline)
            return pg_fail(PG_ECOMM,
                           "ranks: another job of this user is starting under the same "
                           "MASTER_ADDR and MASTER_PORT; give this one another MASTER_PORT");
        pg_nap_ms(RETRY_MS);
    }
    return listen(s, PG_SHM_RANKS) == 0 ? PG_OK
                                        : pg_fail(PG_ECOMM, "ranks: listen: %s", strerror(errno));
}

static int serve(int s, int fd, int size, int64_t deadline, double seconds) {
    char came[PG_SHM_RANKS] = {0};
    for (int here = 1; here < size;) {
        PG_POLL();
        if (readable(s, 100)) {
            int caller = accept4(s, NULL, NULL, SOCK_CLOEXEC);
            if (caller >= 0) {
                int code = welcome(caller, fd, size, came);
                close(caller);
                PG_TRY(code);
            }
            here = 1;
            for (int r = 1; r < size; r++) here += came[r];
        } else if (pg_page_clock() > deadline) {
            char who[256];
            missing(who, sizeof who, came, size);
            return pg_fail(PG_ECOMM, "ranks: only %d of %d ranks joined within %.6g s; missing: %s",
                           here, size, seconds, who);
        }
    }
    return PG_OK;
}

static int call_at(int s, const struct sockaddr_un *a, socklen_t bytes, int64_t deadline,
                   double seconds) {
    while (connect(s, (const struct sockaddr *)a, bytes) != 0) {
        if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR)
            return pg_fail(PG_ECOMM, "ranks: connect: %s", strerror(errno));
        PG_POLL();
        if (pg_page_clock() > deadline)
            return pg_fail(PG_ECOMM,
                           "ranks: rank 0 did not come within %.6g s; start it on this host with "
                           "the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                           seconds);
        pg_nap_ms(RETRY_MS);
    }
    return pg_same_user(s)
               ? PG_OK
               : pg_fail(PG_ECOMM, "ranks: another user holds the place of rank 0; choose "
                                   "another MASTER_PORT");
}

static int ask(int s, int *fd, int rank, int size, int64_t deadline) {
    hello h = {.magic = SHM_MAGIC, .version = SHM_VERSION, .rank = rank, .size = size};
    answer a;
    if (send(s, &h, sizeof h, MSG_NOSIGNAL) != (ssize_t)sizeof h)
        return pg_fail(PG_ECOMM, "ranks: rank 0 went away while ranks were joining");
    while (!readable(s, 100)) {
        PG_POLL();
        if (pg_page_clock() > deadline) return pg_fail(PG_ECOMM, "ranks: rank 0 does not answer");
    }
    return receive(s, fd, &a);
}

int shm_join_by_socket(int *fd, const char *host, int port, const char *job, int rank, int size,
                       double seconds) {
    struct sockaddr_un a;
    socklen_t bytes = address(&a, host, port, job);
    int64_t deadline = pg_page_clock() + (int64_t)(seconds > 9e8 ? 9e17 : seconds * 1e9);
    int made = -1, rc = PG_OK;
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0) return pg_fail(PG_ECOMM, "ranks: socket: %s", strerror(errno));
    if (rank == 0) {
        PG_TRY_TO(done, made, pg_shm_create(size));
        PG_TRY_TO(done, rc, bind_until(s, &a, bytes, deadline));
        PG_TRY_TO(done, rc, serve(s, made, size, deadline, seconds));
        *fd = made;
    } else {
        PG_TRY_TO(done, rc, call_at(s, &a, bytes, deadline, seconds));
        PG_TRY_TO(done, rc, ask(s, fd, rank, size, deadline));
    }
done:
    close(s);
    if (rank == 0 && made < 0) return made;
    if (rc < 0 && made >= 0) close(made);
    return rc;
}
