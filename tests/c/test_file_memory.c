/* test_file_memory.c: the units of runtime/file, once with each allocation failing: an error comes
 * back, and nothing is left allocated.  malloc and its kin are replaced in this program, jansson's
 * and the C library's own calls included. */
#include "folder.h"

#include <pthread.h>

static int64_t calls_to_failure, live; /* 0: never fails */

#ifndef PG_SANITIZED /* a sanitizer has its own malloc */
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);

static int fails(void) { return calls_to_failure > 0 && --calls_to_failure == 0; }

void *malloc(size_t bytes) {
    void *p = fails() ? NULL : __libc_malloc(bytes);
    live += p != NULL;
    return p;
}
void *calloc(size_t n, size_t bytes) {
    void *p = fails() ? NULL : __libc_calloc(n, bytes);
    live += p != NULL;
    return p;
}
void *realloc(void *old, size_t bytes) {
    void *p = fails() ? NULL : __libc_realloc(old, bytes);
    live += p && !old;
    return p;
}
void free(void *p) {
    live -= p != NULL;
    __libc_free(p);
}
#endif

/* ---- the work: each returns its first error ---- */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        if (rc >= 0) rc = (call);                                                                  \
    } while (0)

static int json(void) {
    static const char text[] = "{\"a\":[[[[[[[[[1]]]]]]]]],\"b\":\"text\"}";
    pg_json *j = NULL;
    const char *key, *string;
    int64_t size, integer;
    double real;
    int kind, rc = pg_json_parse(&j, text, sizeof text - 1);
    for (int i = 0; i < 12; i++) TRY(pg_json_next(j, &kind, &key, &string, &size, &real, &integer));
    pg_json_free(j);
    return rc;
}

static int safetensors_write(void) {
    pg_safetensors *f = NULL;
    int rc = pg_safetensors_create(&f, in_folder("s"));
    TRY(pg_safetensors_set_meta(f, "format", "pt"));
    for (int i = 0; i < 20; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        TRY(pg_safetensors_declare(f, name, PG_F32, 2, (int64_t[]){0, i}));
    }
    TRY(pg_safetensors_begin(f));
    TRY(pg_safetensors_finish(f));
    pg_safetensors_close(f);
    return rc;
}

static int safetensors_open(void) {
    pg_safetensors *f = NULL;
    int rc = pg_safetensors_open(&f, in_folder("s"));
    if (rc >= 0) assert_int_equal(pg_safetensors_count(f), 20);
    pg_safetensors_close(f);
    return rc;
}

static int safetensors_share(void) {
    pg_safetensors *f = NULL, *other = NULL;
    int rc = pg_safetensors_create(&f, in_folder("j"));
    TRY(pg_safetensors_declare(f, "x", PG_F32, 0, NULL));
    TRY(pg_safetensors_begin(f));
    if (rc >= 0) TRY(pg_safetensors_join(&other, pg_safetensors_share(f)));
    pg_safetensors_close(other);
    pg_safetensors_close(f);
    return rc;
}

static int tokens_write(void) {
    pg_tokens *s = NULL;
    int rc = pg_tokens_create(&s, in_folder("t"), 100);
    TRY(pg_tokens_append(s, (int32_t[]){1, 2, 3}, 3));
    TRY(pg_tokens_finish(s));
    pg_tokens_close(s);
    return rc;
}

static int prefetch(void) {
    pg_tokens *s = NULL;
    pg_prefetch *p = NULL;
    int32_t ids[3];
    int rc = pg_tokens_open(&s, in_folder("t"), -1, 0);
    TRY(pg_prefetch_new(&p, s, 1, 3, 2));
    TRY(pg_prefetch_ask(p, (int64_t[]){0}));
    TRY(pg_prefetch_take(p, ids));
    pg_prefetch_free(p);
    pg_tokens_close(s);
    return rc;
}

static int events(void) {
    pg_events *e = NULL;
    int rc = pg_events_open(&e, in_folder("e"));
    TRY(pg_events_scalar(e, "loss", 1, 2));
    TRY(pg_events_text(e, "sample", 1, "text"));
    TRY(pg_events_flush(e));
    pg_events_close(e);
    return rc;
}

static int files(void) {
    int64_t bytes;
    uint64_t hash;
    int rc = pg_fs_mkdir(in_folder("m/n"));
    TRY(pg_fs_write(in_folder("m/n/f"), "text", 4));
    TRY(pg_fs_rename(in_folder("m/n/f"), in_folder("m/n/g")));
    TRY(pg_fs_read(in_folder("m/n/g"), &bytes) ? 0 : PG_ENOMEM);
    TRY(pg_fs_hash(in_folder("m/n/g"), &hash));
    TRY(pg_fs_list(folder) ? 0 : PG_ENOMEM);
    TRY(pg_fs_glob(in_folder("m*")) ? 0 : PG_ENOMEM);
    TRY(pg_fs_remove(in_folder("m")));
    return rc;
}

static void test_each_allocation_failing(void **state) {
    (void)state;
#ifdef PG_SANITIZED
    skip();
#endif
    static const struct {
        int (*work)(void);
        const char *name;
        int at_least;
    } works[] = {
        {json, "json", 20},
        {safetensors_write, "safetensors_write", 100},
        {safetensors_open, "safetensors_open", 100},
        {safetensors_share, "safetensors_share", 20},
        {tokens_write, "tokens_write", 5},
        {prefetch, "prefetch", 8},
        {events, "events", 10},
        {files, "files", 10},
    };
    for (size_t i = 0; i < sizeof works / sizeof *works; i++) {
        int failed = 0;
        ok(works[i].work()); /* what a thread keeps is there now */
        int64_t before = live;
        for (int n = 1;; n++) {
            calls_to_failure = n;
            int rc = works[i].work();
            int reached = calls_to_failure == 0;
            calls_to_failure = 0;
            if (live != before || (rc < 0 && !*pg_errmsg()))
                fail_msg("%s, allocation %d: %d \"%s\", %d blocks left", works[i].name, n, rc,
                         pg_errmsg(), (int)(live - before));
            failed += rc < 0;
            if (!reached) break;
        }
        if (failed < works[i].at_least) fail_msg("%s failed %d times only", works[i].name, failed);
        assert_int_equal(files_with(".tmp-"), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_allocation_failing)};
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
