/* ranks.c: reading rank, size and place from the variables of the four launchers we know. */
#include "ranks.h"
#include "../base/status.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_PORT    29500 /* torchrun's */
#define DEFAULT_TIMEOUT 600.0 /* seconds */

static const char *value_of(const char *name) {
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

static int read_int(int *out, const char *name, const char *text, int low, int high) {
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    while (isspace((unsigned char)*end)) end++;
    if (*end || end == text || errno || n < low || n > high)
        return pg_fail(PG_EINVAL, "ranks: %s=%s; it is an integer from %d to %d", name, text, low,
                       high);
    *out = (int)n;
    return PG_OK;
}

/* The variable, or `absent` where there is none; absent < 0: it must be there. */
static int read_var(int *out, const char *name, int absent, int low, int high, const char *beside) {
    const char *text = value_of(name);
    if (text) return read_int(out, name, text, low, high);
    if (absent < 0)
        return pg_fail(PG_EINVAL, "ranks: %s is set, %s is not; a launcher sets both", beside,
                       name);
    *out = absent;
    return PG_OK;
}

typedef struct {
    const char *source, *rank, *size, *local_rank, *local_size, *job;
} family;

static const family families[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_JOB_ID"},
};

static int read_family(pg_ranks *r, const family *f) {
    const char *there = value_of(f->rank) ? f->rank : f->size;
    r->source = f->source;
    PG_TRY(read_var(&r->size, f->size, -1, 1, INT_MAX, there));
    PG_TRY(read_var(&r->rank, f->rank, -1, 0, r->size - 1, there));
    PG_TRY(read_var(&r->local_size, f->local_size, r->size, 1, r->size, there));
    /* without local variables all ranks are taken to be on this host */
    int absent = r->local_size == r->size ? r->rank : -1;
    PG_TRY(read_var(&r->local_rank, f->local_rank, absent, 0, r->local_size - 1, f->local_size));
    if (value_of(f->job)) snprintf(r->job, sizeof r->job, "%s", value_of(f->job));
    return PG_OK;
}

/* "gnode[10,20,25-27],x3" begins with gnode10. */
static void first_host(char *out, size_t bytes, const char *list) {
    size_t n = strcspn(list, "[,");
    int used = snprintf(out, bytes, "%.*s", (int)n, list);
    if (list[n] != '[' || used < 0 || (size_t)used >= bytes) return;
    list += n + 1;
    snprintf(out + used, bytes - (size_t)used, "%.*s", (int)strcspn(list, ",-]"), list);
}

/* Tasks of one node in Slurm's "8(x2),4": the node's number counts from 0. */
static int tasks_of_node(int *out, const char *name, const char *list, int node) {
    const char *at = list;
    while (*at) {
        char *end;
        long tasks = strtol(at, &end, 10), times = 1;
        if (end == at || tasks < 1 || tasks > INT_MAX) break;
        if (!strncmp(end, "(x", 2)) {
            times = strtol(end + 2, &end, 10);
            if (*end == ')') end++;
        }
        if (node < times) {
            *out = (int)tasks;
            return PG_OK;
        }
        node -= (int)times;
        at = *end == ',' ? end + 1 : end;
    }
    return pg_fail(PG_EINVAL, "ranks: %s=%s does not tell the tasks of this node", name, list);
}

static int read_slurm(pg_ranks *r) {
    const char *per_node = "SLURM_STEP_TASKS_PER_NODE", *list = value_of("SLURM_STEP_NODELIST");
    int nodes, node, job;
    r->source = "Slurm";
    PG_TRY(read_var(&r->size, "SLURM_NTASKS", -1, 1, INT_MAX, "SLURM_PROCID"));
    PG_TRY(read_var(&r->rank, "SLURM_PROCID", -1, 0, r->size - 1, "SLURM_NTASKS"));
    PG_TRY(read_var(&nodes, "SLURM_NNODES", 1, 1, INT_MAX, ""));
    PG_TRY(read_var(&node, "SLURM_NODEID", nodes == 1 ? 0 : -1, 0, nodes - 1, "SLURM_NNODES"));
    if (!value_of(per_node)) per_node = "SLURM_TASKS_PER_NODE";
    r->local_size = r->size;
    if (nodes > 1 && value_of(per_node))
        PG_TRY(tasks_of_node(&r->local_size, per_node, value_of(per_node), node));
    int absent = nodes == 1 ? r->rank : -1;
    PG_TRY(read_var(&r->local_rank, "SLURM_LOCALID", absent, 0, r->local_size - 1, "SLURM_PROCID"));
    if (list) first_host(r->host, sizeof r->host, list);
    PG_TRY(read_var(&job, "SLURM_JOB_ID", 0, 0, INT_MAX, ""));
    r->port = 20000 + job % 10000; /* below the ports that systems hand out; two jobs seldom meet */
    snprintf(r->job, sizeof r->job, "%d.%s", job,
             value_of("SLURM_STEP_ID") ? value_of("SLURM_STEP_ID") : "");
    return PG_OK;
}

static int is_slurm_step(void) {
    const char *tasks = value_of("SLURM_NTASKS");
    return tasks && value_of("SLURM_PROCID") && atoi(tasks) > 1;
}

int pg_ranks_read(pg_ranks *out) {
    *out = (pg_ranks){.size = 1, .local_size = 1, .port = DEFAULT_PORT, .source = ""};
    snprintf(out->host, sizeof out->host, "127.0.0.1");
    size_t i, n = sizeof families / sizeof *families;
    for (i = 0; i < n; i++)
        if (value_of(families[i].rank) || value_of(families[i].size)) break;
    if (i < n) PG_TRY(read_family(out, &families[i]));
    else if (is_slurm_step()) PG_TRY(read_slurm(out));
    out->served = value_of("PG_STORE_SERVED") != NULL;
    if (value_of("MASTER_ADDR"))
        snprintf(out->host, sizeof out->host, "%s", value_of("MASTER_ADDR"));
    return read_var(&out->port, "MASTER_PORT", out->port, 1, 65535, "");
}

int pg_ranks_here(void) {
    pg_ranks r;
    return pg_ranks_read(&r) == PG_OK ? r.local_size : 1;
}

int pg_ranks_timeout(double *seconds) {
    const char *text = value_of("PGRUN_TIMEOUT");
    char *end;
    *seconds = DEFAULT_TIMEOUT;
    if (!text) return PG_OK;
    double value = strtod(text, &end);
    if (*end || !(value > 0) || !isfinite(value))
        return pg_fail(PG_EINVAL, "PGRUN_TIMEOUT=%s; it is a number of seconds above 0", text);
    *seconds = value;
    return PG_OK;
}
