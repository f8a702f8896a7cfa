/* graph.h: what the core notes while a graph is recorded. */
#ifndef PG_GRAPH_H
#define PG_GRAPH_H
#include "tensor.h"

/* An op takes the address of this storage, to write it or only to read. */
void pg_graph_note(pg_storage *s, int writes);
/* While recording, in place of a look at the ids: they are checked at each launch.  Refused where
 * the graph itself makes them and their range is not known. */
int pg_graph_note_ids(const char *op, const char *what, const pg_tensor *ids, int64_t v,
                      const int64_t *ignore, int good);
#endif
