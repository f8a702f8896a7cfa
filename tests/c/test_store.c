/* test_store.c: the key-value store between ranks and launchers: values, waiting, who is missed,
 * and who is turned away; the secret and its hash. */
#include "world.h"
#include "folder.h"
#include "../../runtime/backend/secret.h"
#include "../../runtime/backend/store.h"
#include "../../runtime/base/sha256.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define JOB  "a job"
#define LONG 20.0 /* seconds */

/* A rank that finds the server by itself: rank 0 serves. */
static int open_at(pg_store **s, const char *host, int port, const char *job, int rank, int size,
                   double seconds) {
    pg_store_place at = {.host = host, .port = port, .job = job};
    return pg_store_open(s, &at, rank, size, rank ? PG_STORE_RANK : PG_STORE_MINE, seconds);
}

static int port_of(int n) { return 10000 + (int)(getpid() % 20000) + n; }

/* A rank in a child; its exit code is what the body returns. */
static pid_t child(int (*body)(int), int argument) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid) return pid;
    alarm(60);
    _exit(body(argument));
}

static int ended(pid_t pid) {
    int status;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int ring_member(int argument) {
    int rank = argument % 100, port = argument / 100, value = 0;
    char key[32];
    pg_store *s;
    must_ok(open_at(&s, "127.0.0.1", port, JOB, rank, 4, LONG));
    for (int turn = 0; turn < 50; turn++) {
        int mine = 1000 * turn + rank, from = (rank + 1) % 4;
        snprintf(key, sizeof key, "%d/%d", turn, rank);
        must_ok(pg_store_set(s, key, &mine, sizeof mine));
        snprintf(key, sizeof key, "%d/%d", turn, from);
        must_ok(pg_store_get(s, key, &value, sizeof value, LONG));
        must(value == 1000 * turn + from);
    }
    snprintf(key, sizeof key, "end/%d", rank);
    must_ok(pg_store_set(s, key, "", 0));
    for (int r = 0; !rank && r < 4; r++) { /* the server leaves last */
        snprintf(key, sizeof key, "end/%d", r);
        must_ok(pg_store_get(s, key, &value, 0, LONG));
    }
    pg_store_close(s, 0);
    return 0;
}

static void test_ranks_exchange(void **state) {
    (void)state;
    pid_t pids[4];
    int base = port_of(0);
    for (int r = 0; r < 4; r++) pids[r] = child(ring_member, 100 * base + (r + 1) % 4);
    for (int r = 0; r < 4; r++) assert_int_equal(ended(pids[r]), 0);
}

static int stranger(int argument) {
    pg_store *s;
    must_refuse(PG_ECOMM, "another job", open_at(&s, "localhost", argument, "other", 1, 2, LONG));
    must(!s);
    must_refuse(PG_ECOMM, "rank 1 counts 3 ranks, rank 0 counts 2",
                open_at(&s, "localhost", argument, JOB, 1, 3, LONG));
    return 0;
}

static void test_strangers_are_refused(void **state) {
    (void)state;
    pg_store *s, *again;
    int port = port_of(1), code, value = 7;
    ok(open_at(&s, "localhost", port, JOB, 0, 2, LONG));
    assert_int_equal(ended(child(stranger, port)), 0);
    refuses(PG_ECOMM, "cannot listen", open_at(&again, "localhost", port, JOB, 0, 2, LONG));
    assert_int_equal(pg_store_look(s, &code, "none", &value, sizeof value), -1);
    assert_int_equal(code, PG_OK);
    refuses(PG_ECOMM, "waited 0.05 s for \"none\"", pg_store_get(s, "none", &value, 4, 0.05));
    ok(pg_store_set(s, "four", &value, 4));
    refuses(PG_ECOMM, "has 4 bytes, not 8", pg_store_get(s, "four", &(int64_t){0}, 8, LONG));
    char key[PG_STORE_KEY + 1];
    memset(key, 'k', PG_STORE_KEY);
    key[PG_STORE_KEY] = 0;
    refuses(PG_EINVAL, "store: key of 128", pg_store_set(s, key, "", 0));
    pg_store_close(s, 0);
}

static int orphan(int argument) {
    pg_store *s;
    int64_t value;
    must_ok(open_at(&s, "127.0.0.1", argument, JOB, 1, 2, LONG));
    must_ok(pg_store_set(s, "here", "", 0));
    must_refuse(PG_ECOMM, "rank 0", pg_store_get(s, "never", &value, 8, LONG));
    pg_store_close(s, 0);
    return 0;
}

static void test_rank_0_goes(void **state) {
    (void)state;
    pg_store *s;
    int port = port_of(2), nothing;
    ok(open_at(&s, "127.0.0.1", port, JOB, 0, 2, LONG));
    pid_t pid = child(orphan, port);
    ok(pg_store_get(s, "here", &nothing, 0, LONG));
    pg_store_close(s, 0);
    assert_int_equal(ended(pid), 0);
}

static void test_nobody_there(void **state) {
    (void)state;
    pg_store *s;
    refuses(PG_ECOMM, "MASTER_PORT", open_at(&s, "127.0.0.1", port_of(3), JOB, 1, 2, 0.1));
    assert_null(s);
    refuses(PG_ECOMM, "MASTER_ADDR=", open_at(&s, "no such host", 1, JOB, 1, 2, 0.1));
}

/* ---- over TCP: an address that is this host's, but not the loopback by name ---- */

#define SECRET "twenty-four characters.."

static int teller(int port) {
    pg_store *mine;
    int code, n;
    must_ok(open_at(&mine, "0", port, JOB, 1, 2, LONG));
    must_ok(pg_store_once(mine, "first", "one", 4));
    must_ok(pg_store_once(mine, "first", "two", 4));
    char text[8];
    n = pg_store_look(mine, &code, "first", text, sizeof text);
    must(n == 4 && !strcmp(text, "one"));
    pg_store_close(mine, 0);
    return 0;
}

/* Far more callers than ranks, who say nothing: one that has the secret is let in all the same. */
static void test_flood(void **state) {
    (void)state;
    enum { CALLERS = 300 };
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port_of(6))};
    pg_store *s;
    int silent[CALLERS], nothing;
    setenv("PGRUN_SECRET", SECRET, 1);
    ok(open_at(&s, "0.0.0.0", port_of(6), JOB, 0, 2, LONG));
    for (int i = 0; i < CALLERS; i++) {
        silent[i] = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(connect(silent[i], (struct sockaddr *)&to, sizeof to), 0);
    }
    assert_int_equal(ended(child(teller, port_of(6))), 0);
    ok(pg_store_get(s, "gone/1", &nothing, 0, LONG));
    for (int i = 0; i < CALLERS; i++) close(silent[i]);
    pg_store_close(s, 0);
    unsetenv("PGRUN_SECRET");
}

static int wrong_secret(int port) {
    pg_store *s;
    setenv("PGRUN_SECRET", SECRET "!", 1);
    must_refuse(PG_ECOMM, "another secret", open_at(&s, "0", port, JOB, 1, 2, LONG));
    unsetenv("PGRUN_SECRET");
    setenv("HOME", "/nowhere", 1);
    must_refuse(PG_EINVAL, "set PGRUN_SECRET", open_at(&s, "0", port, JOB, 1, 2, LONG));
    return 0;
}

/* Speaks the protocol as far as one can without the secret, and is hung up on. */
static int forger(int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct {
        uint32_t magic;
        int32_t what, bytes, rank, size;
        char key[PG_STORE_KEY], data[PG_STORE_DATA];
    } f = {.magic = 0x70677332u, .rank = 1, .size = 2, .key = JOB}, back;
    for (int what = 1; what <= 4; what++) { /* a proof of nothing, then values without one */
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
        f.what = 0;
        must(send(fd, &f, sizeof f, 0) == (ssize_t)sizeof f);
        must(recv(fd, &back, sizeof back, MSG_WAITALL) == (ssize_t)sizeof back);
        f.what = what;
        must(send(fd, &f, sizeof f, 0) == (ssize_t)sizeof f);
        must(recv(fd, &back, sizeof back, MSG_WAITALL) <= 0);
        close(fd);
    }
    return 0;
}

static void test_tcp(void **state) {
    (void)state;
    pg_store *s;
    int port = port_of(4), nothing, code;
    char text[8];
    setenv("PGRUN_SECRET", SECRET, 1);
    ok(open_at(&s, "0.0.0.0", port, JOB, 0, 2, LONG));
    assert_int_equal(ended(child(forger, port)), 0);
    assert_int_equal(ended(child(wrong_secret, port)), 0);
    assert_int_equal(pg_store_look(s, &code, "gone/1", text, sizeof text), -1);
    assert_int_equal(ended(child(teller, port)), 0);
    ok(pg_store_get(s, "gone/1", &nothing, 0, LONG)); /* it had the secret, and is missed */
    assert_int_equal(pg_store_look(s, &code, "first", text, sizeof text), 4);
    assert_string_equal(text, "one");
    assert_int_equal(pg_store_look(s, &code, "", text, sizeof text), -1); /* the forger's key */
    pg_store_close(s, 0);
    unsetenv("PGRUN_SECRET");
}

/* The launcher of host 1 counts other ranks. */
static int other_host(int port) {
    pg_store *s;
    pg_store_place at = {.host = "127.0.0.1", .port = port, .job = ""};
    must_refuse(PG_ECOMM, "pgrun on host 0: host 1 counts 8 ranks, host 0 counts 4",
                pg_store_open(&s, &at, 9, 8, PG_STORE_HOST, LONG));
    return 0;
}

static void test_served_by_a_launcher(void **state) {
    (void)state;
    pg_store *s;
    pg_store_place at = {.host = "127.0.0.1", .port = port_of(5), .job = ""};
    ok(pg_store_open(&s, &at, 4, 4, PG_STORE_MINE, LONG));
    assert_int_equal(ended(child(other_host, at.port)), 0);
    pg_store_close(s, 0);
}

/* ---- the secret ---- */

static void put_bytes(const char *text, size_t bytes, mode_t mode) {
    const char *path = in_folder(".config/pgrun/secret");
    put_file(path, text, (int64_t)bytes);
    assert_int_equal(chmod(path, mode), 0);
}

static void put_secret(const char *text, mode_t mode) { put_bytes(text, strlen(text), mode); }

static void test_secret(void **state) {
    (void)state;
    pg_secret secret;
    unsetenv("PGRUN_SECRET");
    setenv("HOME", folder, 1);
    refuses(PG_EINVAL, "~/.config/pgrun/secret", pg_secret_read(&secret));
    mkdir(in_folder(".config"), 0700);
    mkdir(in_folder(".config/pgrun"), 0700);
    put_secret(SECRET "\n", 0600);
    ok(pg_secret_read(&secret));
    assert_string_equal(secret.text, SECRET);
    put_secret(SECRET "\n", 0640);
    refuses(PG_EINVAL, "chmod 600", pg_secret_read(&secret));
    put_secret("short\n", 0600);
    refuses(PG_EINVAL, "has 5 characters", pg_secret_read(&secret));
    put_bytes("\0" SECRET, sizeof SECRET, 0600); /* or it would be no secret at all */
    refuses(PG_EINVAL, "has a byte 0", pg_secret_read(&secret));
    setenv("PGRUN_SECRET", "another one of some length", 1);
    ok(pg_secret_read(&secret));
    assert_string_equal(secret.text, "another one of some length");
    unsetenv("PGRUN_SECRET");
}

static const char *hex(const unsigned char bytes[PG_SHA256_BYTES]) {
    static char text[2 * PG_SHA256_BYTES + 1];
    for (int i = 0; i < PG_SHA256_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return text;
}

/* FIPS 180-4's own examples, and RFC 4231, cases 2 and 6. */
static void test_sha256(void **state) {
    (void)state;
    static const char two[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    unsigned char out[PG_SHA256_BYTES], key[131];
    pg_sha256 h;
    pg_sha256_begin(&h);
    pg_sha256_add(&h, "abc", 3);
    pg_sha256_end(&h, out);
    assert_string_equal(hex(out),
                        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    pg_sha256_begin(&h);
    for (int i = 0; i < 56; i++) pg_sha256_add(&h, two + i, 1);
    pg_sha256_end(&h, out);
    assert_string_equal(hex(out),
                        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    pg_hmac(out, "Jefe", 4, "what do ya want for nothing?", 28);
    assert_string_equal(hex(out),
                        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    pg_hmac(out, key, sizeof key, "Test Using Larger Than Block-Size Key - Hash Key First", 54);
    assert_string_equal(hex(out),
                        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_exchange),
        cmocka_unit_test(test_strangers_are_refused),
        cmocka_unit_test(test_rank_0_goes),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_flood),
        cmocka_unit_test(test_served_by_a_launcher),
        cmocka_unit_test(test_secret),
        cmocka_unit_test(test_sha256),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
