/* source.c: where a Lua file is found.
 *
 * pgrun runs from its source tree (TREE/build/pgrun beside TREE/runtime/pg.h: files are read there,
 * so that an edit needs no build) or from anywhere else (copies inside the program, made by
 * scripts/embed.sh).  Either way a file keeps one short name, "lua/pg/init.lua" or
 * "models/tiny.lua", which is what messages show. */
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host.h"

typedef struct {
    const char *path, *start, *end;
} pg_embedded_file; /* as embed.sh writes it */
extern const pg_embedded_file pg_embedded[];

const char *host_tree(void) {
    static char root[PATH_MAX];
    static int looked;
    if (looked) return root;
    looked = 1;
    char at[PATH_MAX], probe[PATH_MAX + 32];
    ssize_t n = readlink("/proc/self/exe", at, sizeof at - 1);
    if (n <= 0) return root;
    at[n] = 0;
    for (int up = 0; up < 3; up++) { /* TREE/build/pgrun, TREE/build/san-address/pgrun */
        char *slash = strrchr(at, '/');
        if (!slash || slash == at) break;
        *slash = 0;
        char *name = strrchr(at, '/');
        if (!name || strcmp(name, "/build")) continue;
        *name = 0;
        snprintf(probe, sizeof probe, "%s/runtime/pg.h", at);
        if (access(probe, R_OK) == 0) memcpy(root, at, strlen(at) + 1);
        break;
    }
    return root;
}

void host_source_free(host_source *s) {
    free(s->text);
    s->text = NULL;
}

static int is_file(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
}

/* Read a file (or a pipe) whole. */
static int read_file(const char *path, const char *name, host_source *out) {
    if (!is_file(path)) return 0;
    FILE *f = fopen(path, "rb");
    if (!f) return 0;
    size_t room = 1 << 16, n = 0, got;
    char *text = malloc(room);
    while (text && (got = fread(text + n, 1, room - n, f)) > 0) {
        n += got;
        if (n < room) continue;
        char *more = realloc(text, room *= 2);
        if (!more) free(text);
        text = more;
    }
    int failed = ferror(f);
    fclose(f);
    if (!text || failed) {
        free(text);
        return 0;
    }
    *out = (host_source){.text = text, .bytes = n};
    snprintf(out->name, sizeof out->name, "%s", name);
    if (!realpath(path, out->path)) snprintf(out->path, sizeof out->path, "%s", path);
    return 1;
}

static int read_embedded(const char *name, host_source *out) {
    for (const pg_embedded_file *e = pg_embedded; e->path; e++) {
        if (strcmp(e->path, name)) continue;
        size_t n = (size_t)(e->end - e->start);
        char *text = malloc(n + 1);
        if (!text) return 0;
        memcpy(text, e->start, n);
        *out = (host_source){.text = text, .bytes = n};
        snprintf(out->name, sizeof out->name, "%s", name);
        return 1;
    }
    return 0;
}

int host_find_file(const char *name, host_source *out) {
    char path[PATH_MAX];
    /* the header must be the one this program was compiled with, so never the tree's */
    if (*host_tree() && strcmp(name, "runtime/pg.h") &&
        snprintf(path, sizeof path, "%s/%s", host_tree(), name) < (int)sizeof path &&
        read_file(path, name, out))
        return 1;
    return read_embedded(name, out);
}

void host_each_embedded(const char *prefix, void (*see)(const char *path, void *context),
                        void *context) {
    for (const pg_embedded_file *e = pg_embedded; e->path; e++)
        if (!strncmp(e->path, prefix, strlen(prefix))) see(e->path, context);
}

/* FOLDER/name, with the name messages show; "./" is left out. */
static int read_under(const char *folder, const char *name, host_source *out) {
    char path[PATH_MAX];
    int n = !strcmp(folder, ".") ? snprintf(path, sizeof path, "%s", name)
                                 : snprintf(path, sizeof path, "%s/%s", folder, name);
    return n < (int)sizeof path && read_file(path, path, out);
}

int host_find_script(const char *given, host_source *out) {
    char name[PATH_MAX];
    const char *forms[] = {"%s", "%s.lua", "models/%s", "models/%s.lua"};
    for (int i = 0; i < 4; i++) {
        if (i >= 2 && given[0] == '/') break;
        if (snprintf(name, sizeof name, forms[i], given) >= (int)sizeof name) return 0;
        if (read_under(".", name, out)) return 1;
    }
    for (int i = 0; i < 4; i++) { /* the recipes that came with pgrun, from any folder */
        snprintf(name, sizeof name, forms[i], given);
        if (!strncmp(name, "models/", 7) && host_find_file(name, out)) return 1;
    }
    return 0;
}

int host_find_verb(const char *verb, host_source *out) {
    char name[PATH_MAX];
    for (const char *c = verb; *c; c++)
        if (*c == '/' || *c == '.') return 0;
    return snprintf(name, sizeof name, "lua/pg/cmd/%s.lua", verb) < (int)sizeof name &&
           host_find_file(name, out);
}

/* models.x: beside the user, beside the script, beside its folder, then what came with pgrun. */
static int find_model(const char *name, const char *script, host_source *out) {
    if (read_under(".", name, out)) return 1;
    if (script) {
        char first[PATH_MAX], second[PATH_MAX + 8];
        snprintf(first, sizeof first, "%s", script);
        const char *folder = dirname(first);
        if (read_under(folder, name, out)) return 1;
        const char *slash = strrchr(folder, '/');
        if (!strcmp(folder, ".")) snprintf(second, sizeof second, "..");
        else if (slash) snprintf(second, sizeof second, "%.*s", (int)(slash - folder), folder);
        else snprintf(second, sizeof second, ".");
        if (*second && read_under(second, name, out)) return 1;
    }
    return host_find_file(name, out);
}

int host_find_module(const char *module, const char *script, host_source *out) {
    int ours = !strcmp(module, "pg") || !strncmp(module, "pg.", 3);
    int model = !strncmp(module, "models.", 7);
    if ((!ours && !model) || strlen(module) > PATH_MAX / 2) return 0;
    char slashed[PATH_MAX / 2 + 1], name[PATH_MAX];
    snprintf(slashed, sizeof slashed, "%s", module);
    for (char *c = slashed; *c; c++)
        if (*c == '.') *c = '/';
    const char *forms[] = {"%s%s.lua", "%s%s/init.lua"};
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, forms[i], ours ? "lua/" : "", slashed);
        if (ours ? host_find_file(name, out) : find_model(name, script, out)) return 1;
    }
    return 0;
}
