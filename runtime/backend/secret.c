/* secret.c: see secret.h. */
#include "secret.h"
#include "../base/status.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int take(pg_secret *out, const char *text, size_t bytes, const char *source) {
    while (bytes && isspace((unsigned char)text[bytes - 1])) bytes--;
    if (bytes < PG_SECRET_LEAST || bytes > PG_SECRET_MOST)
        return pg_fail(PG_EINVAL,
                       "secret: %s has %zu characters; give %d to %d, such as those of "
                       "`head -c 24 /dev/urandom | base64`",
                       source, bytes, PG_SECRET_LEAST, PG_SECRET_MOST);
    if (memchr(text, 0, bytes)) /* what follows it would not count */
        return pg_fail(PG_EINVAL,
                       "secret: %s has a byte 0 in it; give text, such as that of "
                       "`head -c 24 /dev/urandom | base64`",
                       source);
    memcpy(out->text, text, bytes);
    out->text[bytes] = 0;
    return PG_OK;
}

static int read_file(pg_secret *out, int fd) {
    char text[PG_SECRET_MOST + 64];
    struct stat s;
    if (fstat(fd, &s) != 0 || s.st_uid != geteuid() || s.st_mode & 077)
        return pg_fail(PG_EINVAL,
                       "secret: others can read or write %s; make it yours alone: "
                       "chmod 600 %s",
                       PG_SECRET_FILE, PG_SECRET_FILE);
    ssize_t n = read(fd, text, sizeof text);
    if (n < 0) return pg_fail(PG_EINVAL, "secret: %s: %s", PG_SECRET_FILE, strerror(errno));
    return take(out, text, (size_t)n, PG_SECRET_FILE);
}

int pg_secret_read(pg_secret *out) {
    const char *given = getenv("PGRUN_SECRET"), *home = getenv("HOME");
    char path[PATH_MAX];
    *out = (pg_secret){""};
    if (given && *given) return take(out, given, strlen(given), "PGRUN_SECRET");
    snprintf(path, sizeof path, "%s%s", home ? home : "", PG_SECRET_FILE + 1);
    int fd = home ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return pg_fail(
            PG_EINVAL,
            "secret: hosts must know one another by a secret, and there is none; make it "
            "once and copy it to all hosts: mkdir -p ~/.config/pgrun && (umask 077; head -c "
            "24 /dev/urandom | base64 >%s), or set PGRUN_SECRET alike on all",
            PG_SECRET_FILE);
    int rc = read_file(out, fd);
    close(fd);
    return rc;
}
