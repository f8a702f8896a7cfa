/* relay.c: the ranks' output, whole lines at a time.  Rank 0's lines pass as they are; the others'
 * begin with "[rank 3] ", unless the rank wrote that itself. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"

#define CHUNK   4096         /* PIPE_BUF: what a writable pipe takes without waiting */
#define LONGEST (256 * 1024) /* bytes of a line before it is passed on in parts */

/* Write all, with an eye on the ranks while the reader of our output is slow;
 * 0 where nobody reads. */
static int write_all(host_world *w, int fd, const char *text, size_t n) {
    while (n) {
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        if (poll(&ready, 1, 100) <= 0) {
            launch_tick(w);
            if (w->escalated == 2) return 1; /* all are being killed, and nobody reads */
            continue;
        }
        ssize_t sent = write(fd, text, n < CHUNK ? n : CHUNK);
        if (sent < 0 && errno != EINTR && errno != EAGAIN) return errno != EPIPE;
        if (sent > 0) text += sent, n -= (size_t)sent;
    }
    return 1;
}

static int print_lines(host_world *w, const host_child *c, int which, const char *text, size_t n) {
    char prefix[24];
    int fd = which ? STDERR_FILENO : STDOUT_FILENO;
    if (!c->rank) return write_all(w, fd, text, n);
    char *whole = malloc(n + 32), *end = (char *)(uintptr_t)text + n;
    int prefix_bytes = snprintf(prefix, sizeof prefix, "[rank %d] ", c->rank), read = 1;
    while (text < end && read) {
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        size_t bytes = (size_t)((newline ? newline + 1 : end) - text), used = 0;
        if (bytes < 6 || memcmp(text, "[rank ", 6)) used = (size_t)prefix_bytes;
        if (whole) { /* one write a line keeps it whole among the others */
            memcpy(whole, prefix, used);
            memcpy(whole + used, text, bytes);
            read = write_all(w, fd, whole, used + bytes);
        } else {
            read = write_all(w, fd, text, bytes);
        }
        text += bytes;
    }
    free(whole);
    return read;
}

static void close_pipe(host_child *c, int which) {
    if (c->pipes[which] >= 0) close(c->pipes[which]);
    c->pipes[which] = -1;
}

void relay_read(host_world *w, host_child *c, int which) {
    relay_line *l = &c->lines[which];
    if (l->room - l->used < CHUNK) {
        char *more = realloc(l->text, l->room + 4 * CHUNK);
        if (!more) return;
        l->text = more;
        l->room += 4 * CHUNK;
    }
    ssize_t n = read(c->pipes[which], l->text + l->used, l->room - l->used);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (n <= 0) {
        close_pipe(c, which);
        return;
    }
    char *last = memrchr(l->text + l->used, '\n', (size_t)n);
    l->used += (size_t)n;
    size_t whole = last ? (size_t)(last + 1 - l->text) : l->used > LONGEST ? l->used : 0;
    if (!print_lines(w, c, which, l->text, whole))
        close_pipe(c, which); /* the rank sees what we saw: nobody reads */
    memmove(l->text, l->text + whole, l->used - whole);
    l->used -= whole;
}

void relay_finish(host_world *w, host_child *c) {
    for (int i = 0; i < 2; i++) {
        relay_line *l = &c->lines[i];
        if (l->used) {
            if (l->used < l->room) l->text[l->used++] = '\n';
            print_lines(w, c, i, l->text, l->used);
        }
        free(l->text);
        *l = (relay_line){0};
        close_pipe(c, i);
    }
}
