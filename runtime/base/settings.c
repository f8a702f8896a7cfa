/* settings.c: switches of the process; see settings.h. */
#include "settings.h"

#include <string.h>

static int tf32, deterministic;
static char gemm_cache[4096];

int pg_allow_tf32(int on) {
    int before = tf32;
    tf32 = on != 0;
    return before;
}

int pg_deterministic(int on) {
    int before = deterministic;
    deterministic = on != 0;
    return before;
}

int pg_gemm_cache(const char *path) {
    size_t length = path ? strlen(path) : 0;
    if (length >= sizeof gemm_cache)
        return pg_fail(PG_EINVAL, "gemm_cache: a path of %zu bytes; %zu at most", length,
                       sizeof gemm_cache - 1);
    memcpy(gemm_cache, length ? path : "", length + 1);
    return PG_OK;
}

int pg_tf32_allowed(void) { return tf32; }
int pg_wants_deterministic(void) { return deterministic; }
const char *pg_gemm_cache_path(void) { return gemm_cache; }
