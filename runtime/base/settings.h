/* settings.h: switches of the process that kernels read and pg.h sets.
 *
 * They live on the lowest floor because a plug-in asks for them too. */
#ifndef PG_SETTINGS_H
#define PG_SETTINGS_H
#include "status.h"

int pg_tf32_allowed(void);
int pg_wants_deterministic(void);
const char *pg_gemm_cache_path(void); /* "" where choices are not kept in a file */
#endif
