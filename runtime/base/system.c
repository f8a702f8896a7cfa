/* system.c: see system.h. */
#include "system.h"

#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

int pg_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t most, before;
    sigfillset(&most);
    sigdelset(&most, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &most, &before); /* the new thread inherits it */
    int why = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return why;
}

void pg_nap_ms(int ms) {
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000l}, NULL);
}

int pg_same_user(int socket) {
    struct ucred other;
    socklen_t bytes = sizeof other;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 &&
           other.uid == geteuid();
}
