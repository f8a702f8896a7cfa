/* test_control.c: the socket of a run: what a stranger may send without harm,
 * and who may have it. */
#include "folder.h"
#include "../../runtime/host/host.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

static lua_State *L;

static int start(void **state) {
    L = luaL_newstate();
    if (!L) return -1;
    for (const luaL_Reg *f = host_control_functions; f->name; f++)
        lua_register(L, f->name, f->func);
    return folder_make(state) || chdir(folder);
}

static int end(void **state) {
    lua_close(L);
    return folder_remove(state);
}

/* Call name(text), or name(number) where text is NULL; results replace the stack. */
static int call(const char *name, const char *text, double number) {
    lua_settop(L, 0);
    lua_getglobal(L, name);
    if (text) lua_pushstring(L, text);
    else lua_pushnumber(L, number);
    if (lua_pcall(L, 1, LUA_MULTRET, 0)) fail_msg("%s: %s", name, lua_tostring(L, -1));
    return lua_gettop(L);
}

static void listens(const char *path) {
    call("control_listen", path, 0);
    if (!lua_toboolean(L, 1)) fail_msg("no socket in %s: %s", path, lua_tostring(L, 2));
}

/* A plain client, which may send what it likes. */
static int stranger(void) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strcpy(a.sun_path, "control"); /* the folder is the current one: its path may be too long */
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void says(int fd, const void *bytes, size_t n) {
    assert_int_equal(send(fd, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
}

/* Looks until a message has come: its kind and text are these. */
static void hears(const char *kind, const char *text) {
    for (int i = 0; i < 50; i++) {
        int n = call("control_next", NULL, 0.1);
        if (!n) continue;
        assert_int_equal(n, 3);
        assert_string_equal(lua_tostring(L, 2), kind);
        assert_string_equal(lua_tostring(L, 3), text);
        return;
    }
    fail_msg("no message %s %s", kind, text);
}

/* The other side has closed, after whatever it said; 1: it said something. */
static int is_closed(int fd) {
    char text[256];
    int any = 0;
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&p, 1, 2000), 1);
        ssize_t n = recv(fd, text, sizeof text, 0);
        if (n <= 0) return any;
        any = 1;
    }
}

static void messages(void **state) {
    (void)state;
    listens(folder);
    assert_int_equal(call("control_next", NULL, 0), 0);
    int fd = stranger();
    says(fd, "\3\0\0\0Lhi\1\0\0\0Q\5\0", 14); /* two and the beginning of a third */
    hears("L", "hi");
    hears("Q", "");
    assert_int_equal(call("control_next", NULL, 0.05), 0);
    for (int i = 0; i < 6; i++) { /* the rest of it, byte by byte */
        says(fd, "\0\0Lfou" + i, 1);
        assert_int_equal(call("control_next", NULL, 0), 0);
    }
    says(fd, "r", 1);
    hears("L", "four");
    close(fd);
    assert_int_equal(call("control_next", NULL, 1), 1); /* gone */
    call("control_close", "", 0);
    assert_int_equal(access(in_folder("control"), F_OK), -1);
}

static void garbage(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
    } bad[] = {{"\0\0\0\0", 4}, {"GET / HTTP/1.1\r\n", 16}, {"\377\377\377\377x", 5}};
    listens(folder);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int fd = stranger(), other = stranger();
        says(fd, bad[i].bytes, bad[i].n);
        for (int k = 0; k < 5 && call("control_next", NULL, 0.1) != 1; k++) {}
        assert_int_equal(lua_gettop(L), 1);
        assert_int_equal(is_closed(fd), 1); /* told why */
        says(other, "\2\0\0\0Lx", 6);
        hears("L", "x"); /* nobody else has noticed */
        close(fd);
        close(other);
        call("control_next", NULL, 0.1);
    }
    call("control_close", "", 0);
}

/* More connections than there are places: the oldest that has not been kept goes. */
static void crowd(void **state) {
    (void)state;
    int fds[40];
    listens(folder);
    int kept = stranger();
    says(kept, "\1\0\0\0A", 5);
    hears("A", "");
    call("control_keep", NULL, lua_tonumber(L, 1));
    for (int i = 0; i < 40; i++) {
        fds[i] = stranger();
        call("control_next", NULL, 0);
    }
    says(fds[39], "\1\0\0\0Q", 5);
    hears("Q", "");
    says(kept, "\1\0\0\0L", 5);
    hears("L", "");
    assert_int_equal(is_closed(fds[0]), 0);
    for (int i = 0; i < 40; i++) close(fds[i]);
    close(kept);
    call("control_close", "", 0);
}

static void one_run_a_folder(void **state) {
    (void)state;
    struct stat st;
    mode_t before = umask(0);
    listens(folder);
    umask(before);
    assert_int_equal(stat(in_folder("control"), &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    pid_t other = fork();
    if (!other) { /* another process, while this one lives */
        call("control_listen", folder, 0);
        _exit(!lua_toboolean(L, 1) && lua_toboolean(L, 3) ? 0 : 1);
    }
    int status;
    waitpid(other, &status, 0);
    assert_int_equal(status, 0);
    assert_int_equal(access(in_folder("control"), F_OK), 0); /* and it is still ours */
    call("control_close", "", 0);
    other = fork();
    if (!other) { /* one that dies without closing */
        call("control_listen", folder, 0);
        kill(getpid(), SIGKILL);
    }
    waitpid(other, &status, 0);
    assert_int_equal(access(in_folder("control"), F_OK), 0);
    listens(folder);
    call("control_close", "", 0);
    put_file(in_folder("control"), "mine", 4); /* no socket: not ours to remove */
    call("control_listen", folder, 0);
    assert_false(lua_toboolean(L, 1));
    assert_false(lua_toboolean(L, 3));
    file_is(in_folder("control"), "mine", 4);
    assert_int_equal(unlink(in_folder("control")), 0);
    call("control_listen", in_folder("nothing"), 0);
    assert_false(lua_toboolean(L, 1));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages),
        cmocka_unit_test(garbage),
        cmocka_unit_test(crowd),
        cmocka_unit_test(one_run_a_folder),
    };
    return cmocka_run_group_tests(tests, start, end);
}
