/* capture.c: see capture.h. */
#include "capture.h"

#include <stdio.h>

static int on;
static char spoilt[512];

int pg_capture_on(void) { return on; }

void pg_capture_begin(void) {
    on = 1;
    spoilt[0] = 0;
}

const char *pg_capture_end(void) {
    on = 0;
    return spoilt;
}

int pg_capture_bars(const char *op, const char *why) {
    if (!on) return PG_OK;
    int code = pg_fail(PG_EGRAPH, "%s: a graph is being recorded, and %s", op, why);
    if (!spoilt[0]) snprintf(spoilt, sizeof spoilt, "%s", pg_errmsg());
    return code;
}
