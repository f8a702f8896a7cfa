/* options.c: the command line.  One table names every option; usage, reading and "did you mean"
 * all come from it.  Options of pgrun stand before SCRIPT; what follows SCRIPT belongs to it. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../backend/page.h"
#include "host.h"

static const struct option {
    const char *name, *value, *help; /* value NULL: takes none */
} known[] = {
    {"-n", "N|auto", "start N ranks on this host and stop them all when one fails"},
    {"-i", NULL, "open the prompt, on all ranks, after SCRIPT or -e"},
    {"-e", "CODE", "run a line of Lua (may be given several times)"},
    {"--device", "cpu|cuda|auto", "where tensors live; auto takes a GPU if there is one"},
    {"--memory", "SIZE", "limit for tensors of all ranks here, as 4G; else most of what is free"},
    {"--no-jit", NULL, "interpret Lua, do not compile it"},
    {"--nnodes", "N", "hosts taking part, each starting its own pgrun (GPUs only; help ranks)"},
    {"--node-rank", "N", "which of them this is, from 0"},
    {"--master", "HOST:PORT", "where the hosts meet: an address of host 0 and a free port there"},
    {"--help", NULL, "this list"},
    {"--version", NULL, "what this program is and what it found"},
};
#define NKNOWN ((int)(sizeof known / sizeof known[0]))

void host_usage(void) {
    printf("usage: pgrun [options] SCRIPT [--field=value ...]   train a recipe, or run a script\n"
           "       pgrun [options] VERB [arguments]             pgrun help lists the verbs\n"
           "       pgrun                                        the prompt\n\noptions:\n");
    for (int i = 0; i < NKNOWN; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", known[i].name, known[i].value ? " " : "",
                 known[i].value ? known[i].value : "");
        printf("  %-23s %s\n", left, known[i].help);
    }
}

/* Letters to add, drop or change to make a into b.  Both under 64 letters. */
static int distance(const char *a, const char *b) {
    int row[65], m = (int)strlen(a), n = (int)strlen(b);
    if (m > 64 || n > 64) return 64;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; i <= m; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = corner + (a[i - 1] != b[j - 1]), above = row[j] + 1, left = row[j - 1] + 1;
            corner = row[j];
            row[j] = change < above ? change : above;
            if (left < row[j]) row[j] = left;
        }
    }
    return row[n];
}

static int unknown(const char *name) {
    int best = 0, closest = 65;
    for (int i = 0; i < NKNOWN; i++) {
        int d = distance(name, known[i].name);
        if (d < closest) closest = d, best = i;
    }
    fprintf(stderr, "pgrun: unknown option %s; did you mean %s?  pgrun --help lists them\n", name,
            known[best].name);
    return HOST_USAGE;
}

static int bad(const char *option, const char *value, const char *rule) {
    fprintf(stderr, "pgrun: %s %s: %s\n", option, value, rule);
    return HOST_USAGE;
}

int host_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* A whole number in [low, high], or -1. */
static int whole(const char *text, int low, int high) {
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    return end == text || *end || errno || n < low || n > high ? -1 : (int)n;
}

/* "4G", "512M", "1.5g", "1000000": bytes, or -1. */
static int64_t size(const char *text) {
    char *end;
    double n = strtod(text, &end), unit = 1;
    switch (*end) {
    case 'k':
    case 'K': unit = 1 << 10, end++; break;
    case 'm':
    case 'M': unit = 1 << 20, end++; break;
    case 'g':
    case 'G': unit = 1 << 30, end++; break;
    case 't':
    case 'T': unit = 1099511627776.0, end++; break;
    }
    if (*end == 'i') end++;
    if (*end == 'B' || *end == 'b') end++;
    return end == text || *end || !(n > 0) || n * unit > 9e18 ? -1 : (int64_t)(n * unit);
}

static int set_option(host_options *o, const char *name, const char *value) {
    if (!strcmp(name, "-n")) {
        o->ranks = !strcmp(value, "auto") ? host_cores() : whole(value, 1, PG_SHM_RANKS);
        if (o->ranks < 0) return bad(name, value, "give a number of ranks from 1 to 256, or auto");
    } else if (!strcmp(name, "-e")) {
        if (o->codes == HOST_MAX_CODE) return bad(name, value, "at most 16 lines; use a file");
        o->code[o->codes++] = value;
    } else if (!strcmp(name, "--device")) {
        if (strcmp(value, "cpu") && strcmp(value, "cuda") && strcmp(value, "auto"))
            return bad(name, value, "a device is cpu, cuda or auto");
        o->device = value;
    } else if (!strcmp(name, "--memory")) {
        o->memory = size(value);
        if (o->memory < 0) return bad(name, value, "give a size such as 4G or 512M");
    } else if (!strcmp(name, "--nnodes")) {
        o->nnodes = whole(value, 1, 65536);
        if (o->nnodes < 0) return bad(name, value, "give the number of hosts, from 1");
    } else if (!strcmp(name, "--node-rank")) {
        o->node_rank = whole(value, 0, 65535);
        if (o->node_rank < 0) return bad(name, value, "hosts are counted from 0");
    } else if (!strcmp(name, "--master")) {
        const char *colon = strrchr(value, ':');
        size_t length = colon ? (size_t)(colon - value) : 0;
        o->master_port = colon ? whole(colon + 1, 1, 65535) : -1;
        if (!length || length >= sizeof o->master_host || o->master_port < 0)
            return bad(name, value, "give HOST:PORT, such as 10.0.0.1:29500");
        memcpy(o->master_host, value, length);
        o->master_host[length] = 0;
        o->master = value;
    } else if (!strcmp(name, "-i")) o->interactive = 1;
    else if (!strcmp(name, "--no-jit")) o->no_jit = 1;
    else if (!strcmp(name, "--help")) o->help = 1;
    else o->version = 1;
    return 0;
}

/* The option that argument `text` names; its value, if it stands in the same argument (-n4,
 * --device=cpu), goes to *value.  -1: none. */
static int option_of(const char *text, const char **value) {
    *value = NULL;
    if (!strcmp(text, "-h")) text = "--help";
    for (int i = 0; i < NKNOWN; i++) {
        size_t length = strlen(known[i].name);
        if (strncmp(text, known[i].name, length)) continue;
        if (!text[length]) return i;
        if (!known[i].value) continue;
        if (text[length] == '=') return *value = text + length + 1, i;
        if (known[i].name[1] != '-') return *value = text + length, i;
    }
    return -1;
}

int host_option_words(const char *text) {
    const char *value;
    int k = option_of(text, &value);
    return k < 0 ? 0 : known[k].value && !value ? 2 : 1;
}

int host_opens_prompt(const host_options *o) {
    return o->interactive || (!o->script && !o->codes && !o->help && !o->version);
}

/* What only makes sense together. */
static int check_together(const host_options *o) {
    char n[16];
    if (o->nnodes > 1 && host_opens_prompt(o)) {
        snprintf(n, sizeof n, "%d", o->nnodes);
        return bad("--nnodes", n, "the prompt runs on the ranks of one host; leave out -i");
    }
    if (o->nnodes > 1 && o->device && !strcmp(o->device, "cpu")) {
        snprintf(n, sizeof n, "%d", o->nnodes);
        return bad("--nnodes", n,
                   "ranks on the CPU share memory, which ends at the host; run on one "
                   "host with -n, or on GPUs");
    }
    if (o->nnodes > 1 && !o->master) {
        snprintf(n, sizeof n, "%d", o->nnodes);
        return bad("--nnodes", n, "the hosts must find each other; add --master HOST:PORT");
    }
    if (o->node_rank >= o->nnodes) {
        snprintf(n, sizeof n, "%d", o->node_rank);
        return bad("--node-rank", n, "must be below --nnodes");
    }
    return 0;
}

int host_options_read(host_options *o, int argc, char **argv) {
    *o = (host_options){.nnodes = 1};
    int i = 1;
    for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        const char *value;
        if (!strcmp(argv[i], "--")) {
            i++;
            break;
        }
        int k = option_of(argv[i], &value);
        if (k < 0) return unknown(argv[i]);
        if (known[k].value && !value) {
            if (i + 1 == argc) {
                fprintf(stderr, "pgrun: %s needs a value: %s %s\n", known[k].name, known[k].name,
                        known[k].value);
                return HOST_USAGE;
            }
            value = argv[++i];
        }
        int rc = set_option(o, known[k].name, value);
        if (rc) return rc;
    }
    if (i < argc) o->script = argv[i++];
    o->args = argv + i;
    o->nargs = argc - i;
    return check_together(o);
}

char **host_options_for_rank(int argc, char **argv) {
    char **kept = calloc((size_t)argc + 1, sizeof *kept);
    if (!kept) return NULL;
    int n = 0, i = 0;
    kept[n++] = argv[i++];
    while (i < argc && argv[i][0] == '-' && argv[i][1] && strcmp(argv[i], "--")) {
        const char *value;
        int k = option_of(argv[i], &value), words = 1 + (k >= 0 && known[k].value && !value);
        int drop = k >= 0 &&
                   (!strcmp(known[k].name, "-n") || !strcmp(known[k].name, "--nnodes") ||
                    !strcmp(known[k].name, "--node-rank") || !strcmp(known[k].name, "--master"));
        for (int w = 0; w < words && i < argc; w++, i++)
            if (!drop) kept[n++] = argv[i];
    }
    while (i < argc) kept[n++] = argv[i++];
    return kept;
}
