/* twins.h: each CUDA kernel against its twin: the CPU kernel in f64 on the same rounded inputs.
 *
 * A twin_array lives twice: as doubles on the host, already rounded to its dtype, and in that dtype
 * on the device, between two rows of guard bytes.  A test draws inputs, calls both kernels, and
 * asks near() of the outputs, which start as NaN (or equal on both sides, to be added to):
 *     twin_array x = input(n, dtype), y = output(n, dtype, add);
 *     ok(twins.cpu->unary(y.host, x.host, n, PG_EXP, PG_F64, NULL));
 *     ok(twins.cuda->unary(y.device, x.device, n, PG_EXP, dtype, twins.stream));
 *     near(y, bound(dtype));
 * Tests use twin_test(), which skips without a GPU and frees the arrays.  Sizes and numbers come
 * from the seed that is printed; PG_TWINS_SEED=N draws the same again. */
#ifndef PG_TEST_TWINS_H
#define PG_TEST_TWINS_H
#include "check.h"
#include "../runtime/backend/backend.h"

#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#define TOLERANCE_GRADIENT 1e-2 /* of bf16 and f16; the values' and the others stand in check.h */
#define GUARD              256  /* bytes before and after the numbers; keeps 16-byte alignment */
#define TWINS_MOST         256  /* arrays of one test */
#define LARGE              3000005 /* elements of a large case: all blocks of any card go round */

/* Call the CPU twin in f64 on the hosts, the CUDA one in the dtype given on the devices. */
#define cpu_do(name, ...)  ok(twins.cpu->name(__VA_ARGS__, PG_F64, NULL))
#define cuda_do(name, ...) ok(twins.cuda->name(__VA_ARGS__, twins.stream))

typedef struct {
    int64_t n;
    int dtype;
    double *host; /* integers too: ids stay exact */
    void *device; /* the first number */
    char *block;  /* of the device: guard, numbers, guard */
    int64_t bytes;
} twin_array;

static struct {
    const pg_kernels *cpu, *cuda; /* cuda NULL: none, and why */
    const pg_memory_ops *memory;
    pg_stream stream;
    char why[512];
    uint64_t seed, state;
    int shift; /* elements by which new arrays leave their 16-byte boundary */
    twin_array made[TWINS_MOST];
    int count;
} twins;

/* ---- drawing ---- */
static inline uint64_t draw_word(void) { /* splitmix64, our own so that tests do not lean on ours */
    uint64_t x = twins.state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static inline double draw(double low, double high) {
    return low + (high - low) * (double)(draw_word() >> 11) * 0x1p-53;
}
static inline int64_t draw_int(int64_t low, int64_t high) { /* both included */
    return low + (int64_t)(draw_word() % (uint64_t)(high - low + 1));
}
/* PG_TWINS_MOST=64 keeps sizes below that, for checkers that slow kernels down a hundredfold. */
static inline int64_t at_most(int64_t n) {
    static int64_t most;
    if (!most) most = getenv("PG_TWINS_MOST") ? atoll(getenv("PG_TWINS_MOST")) : INT64_MAX;
    return n < most ? n : most;
}
/* A size of 1 to most: small, a multiple of 8, or anything. */
static inline int64_t draw_size(int64_t most) {
    int64_t cap = draw_int(0, 1) && most > 64 ? 64 : most;
    int64_t n = at_most(draw_int(1, cap));
    return n > 8 && draw_int(0, 1) ? n / 8 * 8 : n;
}
/* Elements of case i: 0 is large, 1 has one; each third starts off its 16-byte boundary. */
__attribute__((unused)) static int64_t case_size(int i) {
    twins.shift = i % 3 == 2 ? 1 : 0;
    return i == 0 ? at_most(LARGE) : i == 1 ? 1 : draw_size(5000);
}

/* ---- opening ---- */
static void *twins_library(void) {
    const char *const places[] = {"libpg_cuda.so", "../libpg_cuda.so"};
    char path[4096];
    snprintf(twins.why, sizeof twins.why, "built without CUDA");
    for (int i = 0; i < 2; i++) {
        ssize_t n = readlink("/proc/self/exe", path, sizeof path - 32);
        char *slash = n > 0 ? memrchr(path, '/', (size_t)n) : NULL;
        if (!slash) return NULL;
        strcpy(slash + 1, places[i]);
        if (access(path, R_OK)) continue;
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) snprintf(twins.why, sizeof twins.why, "%.400s", dlerror());
        return library;
    }
    return NULL;
}

/* Group setup.  A missing GPU is no failure: the tests skip. */
__attribute__((unused)) static int twins_open(void **state) {
    (void)state;
    const char *given = getenv("PG_TWINS_SEED");
    twins.seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    twins.state = twins.seed;
    twins.cpu = pg_kernels_cpu();
    printf("twins: PG_TWINS_SEED=%llu\n", (unsigned long long)twins.seed);
    void *library = twins_library();
    if (!library) return 0;
    const pg_backend *(*open)(int) = (const pg_backend *(*)(int))dlsym(library, "pg_cuda_open");
    const pg_backend *found = open ? open(pg_abi()) : NULL;
    if (!found) {
        snprintf(twins.why, sizeof twins.why, "%.400s", open ? pg_errmsg() : "no pg_cuda_open");
        return 0;
    }
    void *probe = found->memory->take(64);
    if (!probe) {
        snprintf(twins.why, sizeof twins.why, "%.400s", pg_errmsg());
        return 0;
    }
    found->memory->give(probe, 64);
    twins.cuda = found->kernels;
    twins.memory = found->memory;
    twins.stream = found->stream;
    return 0;
}

static int twins_begin(void **state) {
    (void)state;
    twins.shift = 0;
    return 0;
}
static int twins_end(void **state) {
    (void)state;
    while (twins.count) {
        twin_array *a = &twins.made[--twins.count];
        free(a->host);
        if (a->block) twins.memory->give(a->block, a->bytes);
    }
    return 0;
}
#define twin_test(name) cmocka_unit_test_setup_teardown(name, twins_begin, twins_end)
/* The first line of each test. */
#define need_gpu()                                                                                 \
    do {                                                                                           \
        if (!twins.cuda) {                                                                         \
            printf("skipped: no GPU (%s)\n", twins.why);                                           \
            skip();                                                                                \
        }                                                                                          \
    } while (0)
/* Frees what the test has made so far: for loops over many cases. */
__attribute__((unused)) static void twins_free(void) { twins_end(NULL); }

/* ---- arrays ---- */
static inline int64_t twin_size(const twin_array *a) { return a->n * pg_dtype_size(a->dtype); }

/* host: doubles (NULL: none), a's own from now on; they are rounded to the dtype here and sent.
 * poison: the device gets bytes 0xff, NaN in every floating dtype, and the host NaN. */
static twin_array twin_new(double *host, int64_t n, int dtype, int poison) {
    int64_t size = pg_dtype_size(dtype), start = GUARD + twins.shift * size;
    twin_array a = {n, dtype, host, NULL, NULL, start + n * size + GUARD};
    unsigned char *bytes = malloc((size_t)a.bytes);
    assert_non_null(bytes);
    memset(bytes, 0xff, (size_t)a.bytes);
    if (!poison && n) {
        ok(twins.cpu->cast(bytes + start, host, n, dtype, PG_F64, NULL));
        ok(twins.cpu->cast(host, bytes + start, n, PG_F64, dtype, NULL));
    }
    for (int64_t i = 0; poison && host && i < n; i++) host[i] = NAN;
    memset(bytes, 0xA5, (size_t)start);
    memset(bytes + start + n * size, 0xA5, GUARD);
    a.block = twins.memory->take(a.bytes);
    assert_non_null(a.block);
    a.device = a.block + start;
    ok(twins.memory->upload(a.block, bytes, a.bytes, twins.stream));
    free(bytes);
    assert_true(twins.count < TWINS_MOST);
    return twins.made[twins.count++] = a;
}

static inline double *twin_doubles(int64_t n) {
    double *host = calloc((size_t)n + 1, sizeof *host);
    assert_non_null(host);
    return host;
}
/* n numbers in [low, high), rounded to dtype; whole ones where dtype is an integer. */
__attribute__((unused)) static twin_array input_in(int64_t n, int dtype, double low, double high) {
    double *host = twin_doubles(n);
    for (int64_t i = 0; i < n; i++) host[i] = (double)(float)draw(low, high);
    return twin_new(host, n, dtype, 0);
}
__attribute__((unused)) static twin_array input(int64_t n, int dtype) {
    return input_in(n, dtype, -1, 1);
}
/* These numbers (copied). */
__attribute__((unused)) static twin_array input_of(const double *from, int64_t n, int dtype) {
    double *host = twin_doubles(n);
    if (n) memcpy(host, from, (size_t)n * sizeof *host);
    return twin_new(host, n, dtype, 0);
}
/* The same on its 16-byte boundary in any case: what no kernel takes from elsewhere. */
__attribute__((unused)) static twin_array aligned_of(const double *from, int64_t n, int dtype) {
    int shift = twins.shift;
    twins.shift = 0;
    twin_array a = input_of(from, n, dtype);
    twins.shift = shift;
    return a;
}
__attribute__((unused)) static twin_array output(int64_t n, int dtype, int add) {
    return add ? input(n, dtype) : twin_new(twin_doubles(n), n, dtype, 1);
}
/* Device scratch of that many bytes, full of NaN. */
__attribute__((unused)) static void *scratch_of(int64_t bytes) {
    int shift = twins.shift;
    twins.shift = 0;
    void *block = twin_new(NULL, bytes, PG_U8, 1).device;
    twins.shift = shift;
    return block;
}

/* What the device holds, as doubles that the caller frees; the guards must be whole. */
static inline double *device_numbers(const twin_array *a, const char *name) {
    unsigned char *bytes = malloc((size_t)a->bytes);
    double *out = twin_doubles(a->n);
    assert_non_null(bytes);
    ok(twins.memory->download(bytes, a->block, a->bytes, twins.stream));
    int64_t start = (char *)a->device - a->block, end = start + twin_size(a);
    for (int64_t i = 0; i < a->bytes; i++)
        if ((i < start || i >= end) && bytes[i] != 0xA5)
            fail_msg("%s: byte %lld outside its %lld numbers was written; PG_TWINS_SEED=%llu", name,
                     (long long)(i - start), (long long)a->n, (unsigned long long)twins.seed);
    if (a->n) ok(twins.cpu->cast(out, bytes + start, a->n, PG_F64, a->dtype, NULL));
    free(bytes);
    return out;
}

/* The device's numbers are close to the host's, by the norm of the error; the host's norm counts as
 * `least` where it is smaller. */
static inline void near_named(const twin_array *a, double limit, double least, const char *name,
                              const char *file, int line) {
    double *got = device_numbers(a, name), error = error_norm(got, a->host, a->n), size = 0;
    for (int64_t i = 0; i < a->n; i++) size += a->host[i] * a->host[i];
    if (size > 0 && sqrt(size) < least) error *= sqrt(size) / least;
    if (!(error <= limit))
        fail_msg("%s:%d: %s [%lld] %s is off by %.3g, more than %.3g; PG_TWINS_SEED=%llu", file,
                 line, name, (long long)a->n, pg_dtype_name(a->dtype), error, limit,
                 (unsigned long long)twins.seed);
    free(got);
}
#define near(a, limit) near_named(&(a), limit, 0, #a, __FILE__, __LINE__)
/* For sums whose addends may cancel to next to nothing, such as a lone one: least is a small part
 * of the norm that sums of so many have as a rule. */
#define near_sum(a, limit, least) near_named(&(a), limit, least, #a, __FILE__, __LINE__)
/* The same numbers. */
#define same(a) near_named(&(a), 0, 0, #a, __FILE__, __LINE__)

/* The dtype of kept statistics (rstd, lse): what the kernel computes in. */
__attribute__((unused)) static int real_dtype(int dtype) {
    return dtype == PG_F64 ? PG_F64 : PG_F32;
}
__attribute__((unused)) static double bound(int dtype) {
    return dtype == PG_F64 ? TOLERANCE_F64 : dtype == PG_F32 ? TOLERANCE_F32 : TOLERANCE_BF16;
}
__attribute__((unused)) static double bound_gradient(int dtype) {
    return dtype == PG_BF16 || dtype == PG_F16 ? TOLERANCE_GRADIENT : bound(dtype);
}
/* The floating dtypes, for loops. */
__attribute__((unused)) static const int floating[] = {PG_F32, PG_F64, PG_BF16, PG_F16};
#endif
