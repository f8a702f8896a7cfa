/* choices_cublas.c: which algorithm was the fastest for a shape, remembered as text.
 *
 * A line is "VERSION <tab> CARD <tab> NUMBER,... <tab> HEX": cuBLAS's version, the card's name, the
 * fields of a gemm_key, the library's 64 bytes for an algorithm.  They hold for that version and
 * card alone; lines of others are kept in the file and otherwise passed over. */
#include "matmul_cublas.h"
#include "../runtime/base/settings.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE_BYTES = 1024, WORDS = 8, FILE_MOST = 64 << 20 };
static const char title[] = "pgrun gemm choices 1\n";

typedef struct {
    gemm_key key;
    cublasLtMatmulAlgo_t algo;
} choice;

static struct {
    choice *list;
    int64_t n, room;
    char loaded[4096]; /* the file that was read */
    char *text;        /* what cuda_gemm_choices gave out */
} memory;

/* "VERSION <tab> CARD <tab>" of this process. */
static const char *own_prefix(void) {
    static char text[sizeof(struct cudaDeviceProp) + 32];
    struct cudaDeviceProp card;
    int device = 0;
    if (text[0]) return text;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaGetDeviceProperties(&card, device) != cudaSuccess)
        strcpy(card.name, "?");
    snprintf(text, sizeof text, "%zu\t%s\t", cublasLtGetVersion(), card.name);
    return text;
}

static choice *known(const gemm_key *key) {
    for (int64_t i = 0; i < memory.n; i++)
        if (!memcmp(&memory.list[i].key, key, sizeof *key)) return &memory.list[i];
    return NULL;
}

static int remember(const choice *c) {
    choice *old = known(&c->key);
    if (old) {
        *old = *c;
        return PG_OK;
    }
    if (memory.n == memory.room) {
        int64_t room = memory.room ? 2 * memory.room : 64;
        choice *list = realloc(memory.list, (size_t)room * sizeof *list);
        if (!list) return pg_fail(PG_ENOMEM, "matmul: no memory to keep choices");
        memory.list = list;
        memory.room = room;
    }
    memory.list[memory.n++] = *c;
    return PG_OK;
}

static void write_line(FILE *f, const choice *c) {
    fputs(own_prefix(), f);
    for (int i = 0; i < GEMM_FIELDS; i++) fprintf(f, "%s%" PRId64, i ? "," : "", c->key.at[i]);
    fputc('\t', f);
    for (int i = 0; i < WORDS; i++) fprintf(f, "%016" PRIx64, c->algo.data[i]);
    fputc('\n', f);
}

/* Exactly the numbers and digits of a line behind its prefix; 0 if it is of another form. */
static int parse_line(choice *c, const char *text) {
    char *end;
    for (int i = 0; i < GEMM_FIELDS; i++) {
        c->key.at[i] = strtoll(text, &end, 10);
        if (end == text || *end != (i + 1 < GEMM_FIELDS ? ',' : '\t')) return 0;
        text = end + 1;
    }
    for (int i = 0; i < WORDS; i++) {
        char digits[17] = "";
        for (int d = 0; d < 16; d++)
            if (!isxdigit((unsigned char)(digits[d] = text[d]))) return 0;
        c->algo.data[i] = strtoull(digits, NULL, 16);
        text += 16;
    }
    return *text == '\n' || *text == '\0';
}

/* A line of any version and card: two tabs before the numbers. */
static const char *behind_prefix(const char *line) {
    const char *tab = strchr(line, '\t');
    tab = tab ? strchr(tab + 1, '\t') : NULL;
    return tab ? tab + 1 : NULL;
}

/* All lines of a text.  With `others`, where lines of other versions and cards go, what is known
 * already stays as it is.  PG_EINVAL names the line. */
static int parse(const char *text, FILE *others) {
    const char *own = own_prefix();
    size_t prefix = strlen(own), length = strlen(title);
    if (strncmp(text, title, length)) return pg_fail(PG_EINVAL, "gemm choices: no title line");
    text += length;
    for (int number = 2; *text; number++) {
        char line[LINE_BYTES];
        const char *end = strchr(text, '\n');
        size_t bytes = end ? (size_t)(end + 1 - text) : strlen(text);
        choice c;
        snprintf(line, sizeof line, "%.*s", (int)pg_min64((int64_t)bytes, LINE_BYTES - 1), text);
        const char *numbers = behind_prefix(line);
        if (!numbers || !parse_line(&c, numbers))
            return pg_fail(PG_EINVAL, "gemm choices: line %d is of another form", number);
        if (strncmp(line, own, prefix)) {
            if (others) fputs(line, others);
        } else if (!others || !known(&c.key)) {
            PG_TRY(remember(&c));
        }
        text += bytes;
    }
    return PG_OK;
}

/* A whole file as text, or NULL if there is none; *rc tells of one that cannot be read. */
static char *read_file(const char *path, int *rc) {
    *rc = PG_OK;
    FILE *f = fopen(path, "re");
    if (!f) return NULL;
    char *text = NULL;
    fseek(f, 0, SEEK_END);
    long bytes = ftell(f);
    rewind(f);
    if (bytes >= 0 && bytes <= FILE_MOST) text = calloc(1, (size_t)bytes + 1);
    if (!text || fread(text, 1, (size_t)bytes, f) != (size_t)bytes ||
        strlen(text) != (size_t)bytes) {
        free(text);
        text = NULL;
        *rc = pg_fail(PG_EIO, "gemm choices: cannot be read as text");
    }
    fclose(f);
    return text;
}

static void complain(const char *path, const char *what) {
    fprintf(stderr, "pgrun: %s: %s\n", path, what);
}

/* Reads the file in force once; a bad one is told of and ignored. */
static void load(void) {
    const char *path = pg_gemm_cache_path();
    if (!strcmp(path, memory.loaded)) return;
    snprintf(memory.loaded, sizeof memory.loaded, "%s", path);
    if (!path[0]) return;
    int rc;
    char *text = read_file(path, &rc);
    if (text) rc = parse(text, NULL);
    if (rc < 0) {
        pg_fail_within(rc, "ignored: ");
        complain(path, pg_errmsg());
    }
    free(text);
}

/* The file anew: lines of other cards as they are there now, then all of ours.  Written aside and
 * renamed, so that a reader finds the old file or the new one. */
static void save(void) {
    const char *path = pg_gemm_cache_path();
    char aside[4096 + 32];
    int rc, whole = 0;
    if (!path[0]) return;
    snprintf(aside, sizeof aside, "%s.%ld", path, (long)getpid());
    char *text = read_file(path, &rc);
    FILE *f = fopen(aside, "we");
    if (f) {
        fputs(title, f);
        if (text) parse(text, f); /* and takes what another process has found meanwhile */
        for (int64_t i = 0; i < memory.n; i++) write_line(f, &memory.list[i]);
        whole = !ferror(f);
        whole = fclose(f) == 0 && whole;
    }
    if (!whole || rename(aside, path)) {
        complain(path, "choices of GEMM algorithms cannot be written there");
        if (f) unlink(aside);
        pg_gemm_cache(NULL); /* said once */
    }
    free(text);
}

const cublasLtMatmulAlgo_t *gemm_choice_find(const gemm_key *key) {
    load();
    choice *c = known(key);
    return c ? &c->algo : NULL;
}

void gemm_choice_add(const gemm_key *key, const cublasLtMatmulAlgo_t *algo) {
    choice c = {*key, *algo};
    if (remember(&c) == PG_OK) save();
}

const char *cuda_gemm_choices(void) {
    size_t bytes;
    load();
    free(memory.text);
    memory.text = NULL;
    FILE *f = open_memstream(&memory.text, &bytes);
    if (!f) return "";
    fputs(title, f);
    for (int64_t i = 0; i < memory.n; i++) write_line(f, &memory.list[i]);
    fclose(f);
    return memory.text ? memory.text : "";
}

int cuda_gemm_adopt(const char *text) {
    load();
    gemm_plans_forget();
    return text[0] ? parse(text, NULL) : PG_OK;
}
