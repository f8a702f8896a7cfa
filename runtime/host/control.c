/* control.c: the socket FOLDER/control by which people reach a run, and its clients' side.
 *
 * A message is a length (4 bytes, little endian), a kind (one byte) and a text; live/init.lua says
 * what the kinds mean.  Nothing here waits for a client: a message that comes in parts stays in the
 * peer's buffer, garbage and people who do not read lose their connection.  Only the user who runs
 * it may connect: the socket has mode 0600 and each peer's user is asked of the kernel.
 * The folder is held open and named through /proc/self/fd, since a socket's
 * path ends at 108 bytes. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <lauxlib.h>

#include "../backend/page.h"
#include "../base/system.h"
#include "host.h"

#define PEERS     16
#define LONGEST   (4 << 20) /* bytes of a message */
#define CHUNK     65536
#define SEND_WAIT 2000 /* ms that a client may take to read */
#define NAME      "control"

typedef struct peer {
    int fd;        /* -1: free */
    int kept;      /* is not sent away to make room */
    int64_t since; /* ns: when it came */
    char *in;
    size_t used, room;
} peer;

static struct {
    int listener, folder; /* -1: none */
    pid_t owner;          /* who made the socket: children of this process do not remove it */
    peer peers[PEERS];
    int turn; /* where the next look begins, so that nobody is passed over */
    int ready;
} control = {.listener = -1, .folder = -1};

static void prepare(void) {
    if (control.ready) return;
    for (int i = 0; i < PEERS; i++) control.peers[i].fd = -1;
    control.ready = 1;
}

static void address_of(struct sockaddr_un *a, int folder) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(a->sun_path, sizeof a->sun_path, "/proc/self/fd/%d/" NAME, folder);
}

/* ---- peers ---- */

static void drop(peer *p) {
    if (p->fd >= 0) close(p->fd);
    free(p->in);
    *p = (peer){.fd = -1};
}

static peer *peer_of(int id) {
    prepare();
    return id >= 1 && id <= PEERS && control.peers[id - 1].fd >= 0 ? &control.peers[id - 1] : NULL;
}

int host_control_fd(int id) {
    const peer *p = peer_of(id);
    return p ? p->fd : -1;
}

/* A place for a new peer: a free one, else that of the oldest that is not kept. */
static peer *place(void) {
    peer *oldest = NULL;
    prepare();
    for (int i = 0; i < PEERS; i++) {
        peer *p = &control.peers[i];
        if (p->fd < 0) return p;
        if (!p->kept && (!oldest || p->since < oldest->since)) oldest = p;
    }
    if (oldest) drop(oldest);
    return oldest;
}

static int add_peer(int fd) {
    peer *p = place();
    if (!p) {
        close(fd);
        return 0;
    }
    p->fd = fd;
    p->since = pg_page_clock();
    return (int)(p - control.peers) + 1;
}

static int accept_all(void) {
    int fd, n = 0;
    while ((fd = accept4(control.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        if (pg_same_user(fd)) n += add_peer(fd) > 0;
        else close(fd);
    }
    return n;
}

/* All of it, waiting a little for a slow reader; 0: it could not be sent, and the peer is gone. */
static int send_all(peer *p, const char *text, size_t n) {
    int64_t end = pg_page_clock() + SEND_WAIT * 1000000ll;
    while (n) {
        ssize_t sent = send(p->fd, text, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            text += sent, n -= (size_t)sent;
            continue;
        }
        if (sent < 0 && errno == EINTR) continue;
        struct pollfd ready = {.fd = p->fd, .events = POLLOUT};
        if (errno != EAGAIN || pg_page_clock() > end) break;
        poll(&ready, 1, 50);
    }
    if (n) drop(p);
    return n == 0;
}

static int send_message(peer *p, char kind, const char *text, size_t n) {
    unsigned char head[5];
    size_t bytes = n + 1;
    for (int i = 0; i < 4; i++) head[i] = (unsigned char)(bytes >> 8 * i);
    head[4] = (unsigned char)kind;
    return send_all(p, (const char *)head, sizeof head) && send_all(p, text, n);
}

/* Bytes of the message that lies first in the buffer; 0: not whole yet, -1: garbage. */
static int64_t first_message(const peer *p) {
    if (p->used < 4) return 0;
    uint32_t n = 0;
    for (int i = 0; i < 4; i++) n |= (uint32_t)(unsigned char)p->in[i] << 8 * i;
    if (n < 1 || n > LONGEST) return -1;
    return p->used >= n + 4 ? n : 0;
}

/* Take what has come; 0 when the peer is gone. */
static int fill(peer *p) {
    for (;;) {
        if (p->room - p->used < CHUNK) {
            char *more = realloc(p->in, p->room + CHUNK);
            if (!more) return 0;
            p->in = more;
            p->room += CHUNK;
        }
        ssize_t n = recv(p->fd, p->in + p->used, p->room - p->used, MSG_DONTWAIT);
        if (n > 0) p->used += (size_t)n;
        if (n == 0) return 0;
        if (n < 0) return errno == EAGAIN || errno == EINTR;
        if (first_message(p)) return 1; /* whole, or garbage: look at it before reading on */
    }
}

/* Push id, kind, text of the peer's first message and take it out, or id alone for one that is
 * gone; 0: nothing yet. */
static int push_message(lua_State *L, peer *p, int gone) {
    int64_t n = first_message(p);
    int id = (int)(p - control.peers) + 1;
    if (n < 0) {
        static const char why[] = "that is no message of pgrun";
        send_message(p, 'E', why, sizeof why - 1);
        gone = 1;
    }
    if (n <= 0 && !gone) return 0;
    lua_pushinteger(L, id);
    if (n <= 0) {
        drop(p);
        return 1;
    }
    lua_pushlstring(L, p->in + 4, 1);
    lua_pushlstring(L, p->in + 5, (size_t)n - 1);
    p->used -= (size_t)n + 4;
    memmove(p->in, p->in + n + 4, p->used);
    return 3;
}

/* One poll of all; revents by peer. */
static int look(struct pollfd *polls, int ms) {
    polls[PEERS] = (struct pollfd){.fd = control.listener, .events = POLLIN};
    for (int i = 0; i < PEERS; i++)
        polls[i] = (struct pollfd){.fd = control.peers[i].fd, .events = POLLIN};
    int n = poll(polls, PEERS + 1, ms);
    if (n > 0 && control.listener >= 0 && polls[PEERS].revents && accept_all())
        return look(polls, 0); /* whoever comes has something to say */
    return n;
}

/* control_next(seconds) -> id, kind, text: a message | id: that peer is gone |
 * nothing in that time. */
static int control_next(lua_State *L) {
    double seconds = luaL_optnumber(L, 1, 0);
    struct pollfd polls[PEERS + 1];
    prepare();
    for (int i = 0; i < PEERS; i++) { /* what came with an earlier read */
        peer *p = &control.peers[i];
        int n = p->fd >= 0 && p->used ? push_message(L, p, 0) : 0;
        if (n) return n;
    }
    if (look(polls, (int)(seconds * 1000)) <= 0) return 0;
    for (int k = 0; k < PEERS; k++) {
        int i = (control.turn + k) % PEERS;
        peer *p = &control.peers[i];
        if (p->fd < 0 || p->fd != polls[i].fd || !polls[i].revents) continue;
        int gone = !fill(p), n = push_message(L, p, gone);
        control.turn = i + 1;
        if (n) return n;
    }
    return 0;
}

/* control_send(id, kind, text) -> boolean */
static int control_send(lua_State *L) {
    size_t n;
    peer *p = peer_of((int)luaL_checkinteger(L, 1));
    const char *kind = luaL_checkstring(L, 2), *text = luaL_optlstring(L, 3, "", &n);
    luaL_argcheck(L, n < LONGEST, 3, "4 MiB at most");
    lua_pushboolean(L, p && send_message(p, *kind, text, n));
    return 1;
}

/* control_keep(id): it may stay when others come. */
static int control_keep(lua_State *L) {
    peer *p = peer_of((int)luaL_checkinteger(L, 1));
    if (p) p->kept = 1;
    return 0;
}

static int control_drop(lua_State *L) {
    peer *p = peer_of((int)luaL_checkinteger(L, 1));
    if (p) drop(p);
    return 0;
}

/* ---- listening and connecting ---- */

static int open_folder(const char *folder) {
    return open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static int connect_to(int folder) {
    struct sockaddr_un a;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address_of(&a, folder);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
    int why = errno;
    if (fd >= 0) close(fd);
    errno = why;
    return -1;
}

static void close_listener(void) {
    if (control.listener >= 0 && control.owner == getpid()) {
        unlinkat(control.folder, NAME, 0);
        close(control.listener);
    }
    if (control.folder >= 0) close(control.folder); /* and with it the lock */
    control.listener = control.folder = -1;
}

static void at_exit(void) { close_listener(); }

/* A live run holds a lock on its folder; where the file system knows none, its socket answers. */
static int is_live(int folder) {
    if (flock(folder, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) return 1;
    int fd = connect_to(folder);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* Make the socket in the folder: 0, or -1 with errno. */
static int bind_in(int folder) {
    struct sockaddr_un a;
    struct stat st;
    address_of(&a, folder);
    if (fstatat(folder, NAME, &st, AT_SYMLINK_NOFOLLOW) == 0) { /* of a run that was killed */
        if (!S_ISSOCK(st.st_mode)) return errno = EEXIST, -1;
        unlinkat(folder, NAME, 0);
    }
    control.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (control.listener < 0) return -1;
    control.owner = getpid();
    /* before bind: the file comes into being with this mode, whatever the umask allows */
    if (fchmod(control.listener, S_IRUSR | S_IWUSR) == 0 &&
        bind(control.listener, (struct sockaddr *)&a, sizeof a) == 0 &&
        fchmodat(folder, NAME, S_IRUSR | S_IWUSR, 0) == 0 && listen(control.listener, PEERS) == 0)
        return 0;
    return -1;
}

/* control_listen(folder) -> true | false, why, live: a live run has the folder. */
static int control_listen(lua_State *L) {
    static int registered;
    const char *path = luaL_checkstring(L, 1);
    close_listener();
    prepare();
    if (!registered++) atexit(at_exit);
    control.folder = open_folder(path);
    int live = control.folder >= 0 && is_live(control.folder);
    if (control.folder >= 0 && !live && bind_in(control.folder) == 0) {
        lua_pushboolean(L, 1);
        return 1;
    }
    int why = errno;
    if (control.listener >= 0) close(control.listener);
    control.listener = -1;
    close_listener();
    lua_pushboolean(L, 0);
    lua_pushstring(L, live ? "another process trains in it" : strerror(why));
    lua_pushboolean(L, live);
    return 3;
}

/* control_close(): everybody is sent away, and the socket is gone. */
static int control_close(lua_State *L) {
    (void)L;
    prepare();
    for (int i = 0; i < PEERS; i++) drop(&control.peers[i]);
    close_listener();
    return 0;
}

/* control_connect(folder) -> id | nil, why */
static int control_connect(lua_State *L) {
    int folder = open_folder(luaL_checkstring(L, 1));
    int fd = folder >= 0 ? connect_to(folder) : -1, why = errno;
    if (folder >= 0) close(folder);
    if (fd >= 0 && !pg_same_user(fd)) close(fd), fd = -1, why = EPERM;
    if (fd < 0) {
        lua_pushnil(L);
        lua_pushstring(L, strerror(why));
        return 2;
    }
    lua_pushinteger(L, add_peer(fd));
    return 1;
}

const luaL_Reg host_control_functions[] = {
    {"control_listen", control_listen},   {"control_close", control_close},
    {"control_connect", control_connect}, {"control_next", control_next},
    {"control_send", control_send},       {"control_keep", control_keep},
    {"control_drop", control_drop},       {NULL, NULL}};
