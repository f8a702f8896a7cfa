/* version.c: what this build found, for pgrun --version: one "name value" on a line.  LuaJIT's own
 * line comes from the host, the only room that knows it. */
#include "../backend/backend.h"
#include "../base/status.h"

#include <cblas.h>
#include <jansson.h>
#include <omp.h>
#include <stdio.h>
#include <unistd.h>

const char *pg_version_info(void) {
    static _Thread_local char text[3072];
    char cuda[1536];
    pg_backend_cuda_info(cuda, sizeof cuda);
    snprintf(text, sizeof text,
             "BLAS     %s, kernels for %s\n"
             "JSON     jansson %s\n"
             "threads  %d (OMP_NUM_THREADS)\n"
             "memory   %.1f GiB on this host\n"
             "%s",
             openblas_get_config(), openblas_get_corename(), jansson_version_str(),
             omp_get_max_threads(),
             (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / 1073741824.0, cuda);
    return text;
}
