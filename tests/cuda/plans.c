/* plans.c: which kernels cuDNN makes of our attention graphs on an H200, on a machine without one.
 *
 *   plans DEVICE.json      run by tests/journey/cudnn_plans.sh, beside a stand-in for the driver
 *
 * A graph that is nearly right is accepted by slower engines, so each case must get a kernel whose
 * name says sm90.  Also: the calls that must not go to cuDNN. */
#include "../../kernels/attention_cudnn.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
static const char *(*loaded)(void);

static cudnnBackendDescriptor_t device_of(const char *path) {
    static char text[4096];
    const cudnn_library *lib = cudnn_open();
    cudnnBackendDescriptor_t d = NULL;
    FILE *f = fopen(path, "r");
    if (!f) return printf("cannot open %s\n", path), NULL;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    while (n && text[n - 1] == '\n') n--;
    if (lib->descriptor_new(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d) != CUDNN_STATUS_SUCCESS ||
        lib->set(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)n, text) !=
            CUDNN_STATUS_SUCCESS ||
        lib->finalize(d) != CUDNN_STATUS_SUCCESS)
        return printf("cuDNN does not take %s\n", path), NULL;
    return d;
}

typedef struct {
    const char *name;
    int64_t batch, rows, keys, heads, kv_heads, width;
    int packed, causal, lengths, deterministic, dtype;
} plan_case;

static void check(const plan_case *c, int backward, cudnnBackendDescriptor_t device) {
    int64_t q = c->heads * c->width, kv = c->kv_heads * c->width;
    if (c->packed) q = kv = q + 2 * kv;
    sdpa_shape shape = {.batch = c->batch,
                        .rows = c->rows,
                        .keys = c->keys,
                        .heads = c->heads,
                        .kv_heads = c->kv_heads,
                        .width = c->width,
                        .q_stride = q,
                        .kv_stride = kv,
                        .dq_stride = backward ? q : 0,
                        .dkv_stride = backward ? kv : 0,
                        .dtype = c->dtype,
                        .causal = c->causal,
                        .lengths = c->lengths,
                        .deterministic = backward && c->deterministic,
                        .backward = backward};
    sdpa_plan *p = NULL;
    loaded();
    if (sdpa_plan_new(&p, &shape, NULL, device) < 0) {
        printf("FAIL %s: %s\n", c->name, pg_errmsg());
        failures++;
        return;
    }
    const char *kernels = loaded();
    int good = p->plan && sdpa_engine_is_hopper(p) && strstr(kernels, "sm90");
    printf("%s %s %s: engine %d, workspace %lld, %s", good ? "ok  " : "FAIL", c->name,
           backward ? "backward" : "forward", p->engine, (long long)p->workspace,
           kernels[0] ? kernels : "no kernel\n");
    if (p->graph.failure[0]) printf("     %s\n", p->graph.failure);
    failures += !good;
    sdpa_plan_free(p);
}

static void refused(const char *part, pg_attn_args a, int backward, size_t version) {
    const char *why = NULL;
    int usable = cudnn_attention_usable(&a, backward, version, &why);
    int good = part ? !usable && why && strstr(why, part) : usable && !why;
    if (!good) printf("FAIL refusal \"%s\": got \"%s\"\n", part ? part : "", why ? why : "");
    failures += !good;
}

static void refusals(void) {
    const pg_attn_args fine = {.batch = 2,
                               .rows = 192,
                               .keys = 192,
                               .heads = 4,
                               .kv_heads = 2,
                               .width = 64,
                               .q_stride = 512,
                               .kv_stride = 512,
                               .scale = 0.125,
                               .causal = 1,
                               .dtype = PG_BF16};
    const int32_t lengths[2] = {1, 2};
    pg_attn_args a = fine;
    refused(NULL, fine, 0, 91900);
    refused(NULL, fine, 1, 91900);
    refused("9.11", fine, 0, 91000);
    refused("9.15", fine, 1, 91500);
    refused(NULL, fine, 0, 91500);
    a = fine, a.causal = 0, refused("9.26", a, 1, 91900);
    a = fine, a.causal = 0, refused(NULL, a, 1, 92600);
    a = fine, a.causal = 0, refused(NULL, a, 0, 91900);
    a = fine, a.causal = 0, a.lengths = lengths, refused(NULL, a, 1, 91900);
    a = fine, a.dtype = PG_F32, refused("f16", a, 0, 91900);
    a = fine, a.dropout = 0.1, refused("dropout", a, 0, 91900);
    a = fine, a.rows = 1, refused("single", a, 0, 91900);
    a = fine, a.keys = 256, refused("fewer rows", a, 0, 91900);
    a = fine, a.width = 60, refused("multiples of 8", a, 0, 91900);
    a = fine, a.width = 264, refused("up to 256", a, 0, 91900);
    a = fine, a.q = (const char *)lengths + 2, refused("borders", a, 0, 91900);
}

int main(int argc, char **argv) {
    static const plan_case cases[] = {
        {"grouped heads packed", 4, 4096, 4096, 32, 8, 128, 1, 1, 0, 0, PG_BF16},
        {"gpt2 f16 packed", 64, 1024, 1024, 12, 12, 64, 1, 1, 0, 0, PG_F16},
        {"all keys", 2, 256, 256, 4, 4, 64, 0, 0, 0, 0, PG_BF16},
        {"other keys", 2, 256, 384, 4, 2, 128, 0, 0, 0, 0, PG_BF16},
        {"lengths causal packed", 2, 384, 384, 4, 2, 128, 1, 1, 1, 0, PG_BF16},
        {"odd rows", 1, 200, 200, 3, 1, 128, 0, 1, 0, 0, PG_BF16},
        {"width 256", 1, 512, 512, 2, 2, 256, 0, 1, 0, 0, PG_BF16},
        {"deterministic", 2, 384, 384, 4, 2, 128, 1, 1, 0, 1, PG_BF16},
    };
    if (argc != 2) return puts("usage: plans DEVICE.json"), 2;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver) *(void **)&loaded = dlsym(driver, "fake_driver_kernels");
    if (!loaded) return puts("FAIL: libcuda.so.1 is not the stand-in"), 2;
    refusals();
    if (!cudnn_open()) return printf("skipped: %s\n", pg_errmsg()), 0;
    cudnnBackendDescriptor_t device = device_of(argv[1]);
    if (!device) return 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int backward = 0; backward < 2; backward++) check(&cases[i], backward, device);
    printf("cuDNN %zu, %d failures\n", cudnn_open()->version(), failures);
    return failures > 0;
}
