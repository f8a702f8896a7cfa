/* json.c: a JSON text parsed by jansson and handed out value by value, in document order, so that
 * Lua builds its tables without C ever calling Lua.  Integers keep their 64 bits. */
#include "../base/status.h"

#include <jansson.h>
#include <stdlib.h>

/* An array or object whose members are being handed out. */
typedef struct {
    json_t *of;
    size_t index; /* array: the next element */
    void *member; /* object: the next member, NULL after the last */
} level;

struct pg_json {
    json_t *root;
    level *levels; /* from the outermost inwards; jansson's parser stops at 2048 */
    size_t depth, room;
    int started;
};

int pg_json_parse(pg_json **out, const char *text, int64_t bytes) {
    PG_POLL();
    if (!out || (!text && bytes) || bytes < 0) return pg_fail(PG_EINVAL, "json: no text");
    *out = NULL;
    pg_json *j = calloc(1, sizeof *j);
    if (!j) return pg_fail(PG_ENOMEM, "json: no memory");
    json_error_t error;
    j->root = json_loadb(text ? text : "", (size_t)bytes,
                         JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (!j->root) {
        free(j);
        return pg_fail(PG_EINVAL, "json: line %d, column %d: %s", error.line, error.column,
                       error.text);
    }
    *out = j;
    return PG_OK;
}

void pg_json_free(pg_json *j) {
    if (!j) return;
    json_decref(j->root);
    free(j->levels);
    free(j);
}

static int enter(pg_json *j, json_t *of) {
    if (j->depth == j->room) {
        size_t room = j->room ? 2 * j->room : 8;
        level *grown = realloc(j->levels, room * sizeof *grown);
        if (!grown) return pg_fail(PG_ENOMEM, "json: no memory for %zu levels", room);
        j->levels = grown;
        j->room = room;
    }
    j->levels[j->depth++] = (level){.of = of, .member = json_object_iter(of)};
    return PG_OK;
}

/* The next value and its key; NULL after the last. */
static json_t *advance(pg_json *j, const char **key) {
    *key = NULL;
    if (!j->started) {
        j->started = 1;
        return j->root;
    }
    for (; j->depth > 0; j->depth--) {
        level *l = &j->levels[j->depth - 1];
        if (json_is_array(l->of) && l->index < json_array_size(l->of))
            return json_array_get(l->of, l->index++);
        if (json_is_object(l->of) && l->member) {
            json_t *value = json_object_iter_value(l->member);
            *key = json_object_iter_key(l->member);
            l->member = json_object_iter_next(l->of, l->member);
            return value;
        }
    }
    return NULL;
}

static int kind_of(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT: return PG_JSON_OBJECT;
    case JSON_ARRAY: return PG_JSON_ARRAY;
    case JSON_STRING: return PG_JSON_STRING;
    case JSON_INTEGER: return PG_JSON_INT;
    case JSON_REAL: return PG_JSON_REAL;
    case JSON_TRUE: return PG_JSON_TRUE;
    case JSON_FALSE: return PG_JSON_FALSE;
    default: return PG_JSON_NULL;
    }
}

int pg_json_next(pg_json *j, int *kind, const char **key, const char **text, int64_t *size,
                 double *real, int64_t *integer) {
    if (!j || !kind || !key || !text || !size || !real || !integer)
        return pg_fail(PG_EINVAL, "json: next: NULL");
    json_t *v = advance(j, key);
    if (!v) return pg_fail(PG_EINVAL, "json: next: there is no further value");
    *kind = kind_of(v);
    *text = json_string_value(v); /* NULL, 0 and 0.0 for another kind */
    *integer = json_integer_value(v);
    *real = json_real_value(v);
    *size = (int64_t)json_string_length(v);
    if (json_is_array(v)) *size = (int64_t)json_array_size(v);
    if (json_is_object(v)) *size = (int64_t)json_object_size(v);
    if (json_is_array(v) || json_is_object(v)) PG_TRY(enter(j, v));
    return PG_OK;
}
