/* marks.c: pg_marks: moments between ops, told by the device where it has a clock of its own, else
 * by the host, whose ops are done when they return. */
#include "../base/capture.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>

struct pg_marks {
    int n, first;  /* first: the mark that was set first, -1 before */
    void **events; /* [n] the backend's; NULL: the host's clock */
    double *times; /* [n] of the host's clock; with events 0; NaN: not set */
};

#define MOST (1 << 24)

static int open_events(pg_marks *m, const pg_memory_ops *memory) {
    if (!memory->mark_new) return PG_OK;
    m->events = calloc((size_t)m->n, sizeof *m->events);
    if (!m->events) return pg_fail(PG_ENOMEM, "marks: no memory for %d of them", m->n);
    for (int i = 0; i < m->n; i++) PG_TRY(memory->mark_new(&m->events[i]));
    return PG_OK;
}

int pg_marks_new(pg_marks **out, int n) {
    if (!out) return pg_fail(PG_EINVAL, "marks: out is NULL");
    *out = NULL;
    if (n < 1 || n > MOST) return pg_fail(PG_EINVAL, "marks: %d of them; 1 to %d", n, MOST);
    const pg_backend *b = pg_backend_device();
    if (!b) return PG_EDEVICE;
    pg_marks *m = calloc(1, sizeof *m);
    double *times = malloc((size_t)n * sizeof *times);
    if (!m || !times) {
        free(m);
        free(times);
        return pg_fail(PG_ENOMEM, "marks: no memory for %d of them", n);
    }
    *m = (pg_marks){.n = n, .first = -1, .times = times};
    for (int i = 0; i < n; i++) times[i] = NAN;
    int rc = open_events(m, b->memory);
    if (rc < 0) {
        pg_marks_free(m);
        return rc;
    }
    *out = m;
    return PG_OK;
}

int pg_marks_set(pg_marks *m, int i) {
    PG_POLL();
    if (!m) return pg_fail(PG_EINVAL, "marks: they are missing (NULL)");
    if (i < 0 || i >= m->n)
        return pg_fail(PG_EINVAL, "marks: number %d; they are counted 0 to %d", i, m->n - 1);
    PG_TRY(pg_capture_bars("marks", "it has no moment yet; set them before and afterwards"));
    if (m->events) PG_TRY(pg_backend_device()->memory->mark_set(m->events[i]));
    m->times[i] = m->events ? 0 : pg_time();
    if (m->first < 0) m->first = i;
    return PG_OK;
}

int pg_marks_read(pg_marks *m, double *seconds) {
    PG_POLL();
    if (!m || !seconds)
        return pg_fail(PG_EINVAL, "marks: %s missing (NULL)", m ? "seconds are" : "they are");
    PG_TRY(pg_capture_bars("marks", "the host waits for nothing in it; read them afterwards"));
    for (int i = 0; i < m->n; i++) {
        seconds[i] = m->times[i];
        if (m->events && !isnan(seconds[i]))
            PG_TRY(pg_backend_device()->memory->mark_read(&seconds[i], m->events[m->first],
                                                          m->events[i]));
    }
    return PG_OK;
}

void pg_marks_free(pg_marks *m) {
    if (!m || pg_backend_closed()) return;
    for (int i = 0; m->events && i < m->n; i++)
        if (m->events[i]) pg_backend_device()->memory->mark_free(m->events[i]);
    free(m->events);
    free(m->times);
    free(m);
}
