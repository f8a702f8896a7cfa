/* test_json.c: the walk over a JSON text, and what is refused with line and column. */
#include "../check.h"

typedef struct {
    int kind;
    const char *key, *text;
    int64_t size;
    double real;
    int64_t integer;
} value;

static value next(pg_json *j) {
    value v;
    ok(pg_json_next(j, &v.kind, &v.key, &v.text, &v.size, &v.real, &v.integer));
    return v;
}

static pg_json *parsed(const char *text) {
    pg_json *j;
    ok(pg_json_parse(&j, text, (int64_t)strlen(text)));
    return j;
}

static void test_walk_in_document_order(void **state) {
    (void)state;
    pg_json *j = parsed(
        "{\"z\":[1,[],{\"k\":\"v\"},2.5],\"a\":null,\"t\":true,\"f\":false,\"e\":{}}");
    value v = next(j);
    assert_true(v.kind == PG_JSON_OBJECT && v.size == 5 && !v.key);
    v = next(j);
    assert_true(v.kind == PG_JSON_ARRAY && v.size == 4);
    assert_string_equal(v.key, "z");
    v = next(j);
    assert_true(v.kind == PG_JSON_INT && v.integer == 1 && !v.key);
    v = next(j);
    assert_true(v.kind == PG_JSON_ARRAY && v.size == 0);
    v = next(j);
    assert_true(v.kind == PG_JSON_OBJECT && v.size == 1 && !v.key);
    v = next(j);
    assert_true(v.kind == PG_JSON_STRING && v.size == 1);
    assert_string_equal(v.key, "k");
    assert_string_equal(v.text, "v");
    v = next(j);
    assert_true(v.kind == PG_JSON_REAL && v.real == 2.5 && !v.key);
    const struct {
        const char *key;
        int kind;
    } rest[] = {
        {"a", PG_JSON_NULL}, {"t", PG_JSON_TRUE}, {"f", PG_JSON_FALSE}, {"e", PG_JSON_OBJECT}};
    for (int i = 0; i < 4; i++) {
        v = next(j);
        assert_string_equal(v.key, rest[i].key);
        assert_int_equal(v.kind, rest[i].kind);
    }
    refuses(PG_EINVAL, "no further value",
            pg_json_next(j, &v.kind, &v.key, &v.text, &v.size, &v.real, &v.integer));
    refuses(PG_EINVAL, "NULL",
            pg_json_next(j, NULL, &v.key, &v.text, &v.size, &v.real, &v.integer));
    pg_json_free(j);
}

static void test_numbers_and_strings(void **state) {
    (void)state;
    pg_json *j = parsed(
        "[9007199254740993,-9223372036854775808,9223372036854775807,1e2,\"\\u00e9\\u0000x\"]");
    next(j);
    assert_int_equal(next(j).integer, 9007199254740993);
    assert_true(next(j).integer == INT64_MIN);
    assert_true(next(j).integer == INT64_MAX);
    value v = next(j);
    assert_true(v.kind == PG_JSON_REAL && v.real == 100);
    v = next(j);
    assert_int_equal(v.size, 4);
    assert_memory_equal(v.text, "\xc3\xa9\0x", 5);
    pg_json_free(j);
    j = parsed("17"); /* no array or object around it */
    assert_int_equal(next(j).integer, 17);
    pg_json_free(j);
}

static void test_what_is_refused(void **state) {
    (void)state;
    const struct {
        const char *text, *part;
    } bad[] = {
        {"", "json: line 1, column 0"},
        {"{\"a\":1,\n \"a\":2}", "line 2, column 4: duplicate object key"},
        {"[1,\n2,\n]", "line 3, column 1"},
        {"{a:1}", "line 1, column 2"},
        {"[1] x", "end of file expected"},
        {"[01]", "line 1"},
        {"[NaN]", "line 1"},
        {"[9223372036854775808]", "too big integer"},
        {"[1e999]", "real number overflow"},
        {"\"\xff\"", "unable to decode byte 0xff"},
        {"\"\\ud800\"", "\\uD800"},
        {"{\"a\\u0000\":1}", "NUL byte in object key"},
    };
    pg_json *j;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refuses(PG_EINVAL, bad[i].part,
                pg_json_parse(&j, bad[i].text, (int64_t)strlen(bad[i].text)));
    refuses(PG_EINVAL, "no text", pg_json_parse(&j, NULL, 1));
    char deep[5000];
    memset(deep, '[', sizeof deep);
    refuses(PG_EINVAL, "maximum parsing depth", pg_json_parse(&j, deep, sizeof deep));
    memset(deep, '[', 2000);
    memset(deep + 2000, ']', 2000);
    ok(pg_json_parse(&j, deep, 4000));
    for (int i = 0; i < 2000; i++) assert_int_equal(next(j).kind, PG_JSON_ARRAY);
    pg_json_free(j);
    pg_json_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_walk_in_document_order),
        cmocka_unit_test(test_numbers_and_strings),
        cmocka_unit_test(test_what_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
