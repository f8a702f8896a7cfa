/* status.h: codes become messages here, once.
 *
 * A function that fails says why with pg_fail() and returns its code; a caller passes it on with
 * PG_TRY().  The text is kept per thread and read through pg_errmsg().  The floor of the tower:
 * it includes nothing but pg.h. */
#ifndef PG_STATUS_H
#define PG_STATUS_H
#include "../pg.h"

/* Remember the message (printf style) and return `code`. */
int pg_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Put text in front of the current message: "save: " + what went wrong below. Returns `code`. */
int pg_fail_within(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define PG_TRY(call)                                                                               \
    do {                                                                                           \
        int pg_try_code = (call);                                                                  \
        if (pg_try_code < 0) return pg_try_code;                                                   \
    } while (0)
#define PG_TRY_TO(label, rc, call)                                                                 \
    do {                                                                                           \
        (rc) = (call);                                                                             \
        if ((rc) < 0) goto label;                                                                  \
    } while (0)

/* Every C entry that may take time begins so; a raised flag becomes PG_EINTR. */
#define PG_POLL()                                                                                  \
    do {                                                                                           \
        if (pg_interrupted()) return pg_fail(PG_EINTR, "interrupted");                             \
    } while (0)
#endif
