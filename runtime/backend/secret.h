/* secret.h: the words by which the hosts of one user's jobs know one another:
 * PGRUN_SECRET, else the file ~/.config/pgrun/secret.  It never travels (store.c proves it
 * instead) and is never printed. */
#ifndef PG_SECRET_H
#define PG_SECRET_H

#define PG_SECRET_FILE  "~/.config/pgrun/secret"
#define PG_SECRET_LEAST 16 /* bytes: who listens on the network may try out short ones */
#define PG_SECRET_MOST  256

typedef struct {
    char text[PG_SECRET_MOST + 1]; /* "": none is needed */
} pg_secret;

/* PG_EINVAL: there is none, others can read the file, or it is too short; says what to do. */
int pg_secret_read(pg_secret *out);
#endif
