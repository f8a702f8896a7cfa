/* capture.h: while a graph is recorded (pg_graph_begin in pg.h) ops are noted down and not done.
 *
 * What the host would have to see or to bring meanwhile is refused; the refusal spoils the
 * recording, also where somebody catches it, and its text is kept for the one who ends it.  On the
 * lowest floor, because a plug-in asks too. */
#ifndef PG_CAPTURE_H
#define PG_CAPTURE_H
#include "status.h"

int pg_capture_on(void);
void pg_capture_begin(void);
/* No longer; what spoilt it, or "".  Lives until the next begin. */
const char *pg_capture_end(void);
/* PG_OK where no graph is recorded, else PG_EGRAPH "op: a graph is being recorded, and WHY". */
int pg_capture_bars(const char *op, const char *why);
#endif
