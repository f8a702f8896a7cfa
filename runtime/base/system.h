/* system.h: what several rooms ask of the system in the same way. */
#ifndef PG_SYSTEM_H
#define PG_SYSTEM_H
#include <pthread.h>

/* 0, or an errno.  The thread leaves signals to the main one, but for SIGBUS, by which a mapped
 * file that was cut short tells of itself where it is read. */
int pg_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);
void pg_nap_ms(int ms);       /* a signal may cut it short */
int pg_same_user(int socket); /* whether this user's process is at the other end of a Unix socket */
#endif
