/* choices.c: choices of algorithms as text and in a file (kernels/choices_cublas.c), without a GPU.
 *
 *   choices FOLDER      run by tests/journey/cuda_choices.sh
 *
 * Stands in for the two libraries: version 130100, and a card whose name the test sets. */
#include "../../kernels/matmul_cublas.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int failures, forgotten;

size_t CUBLASWINAPI cublasLtGetVersion(void) { return 130100; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    (void)device;
    strcpy(p->name, "NVIDIA H200");
    return cudaSuccess;
}
void gemm_plans_forget(void) { forgotten++; }

static void expect(int good, const char *what) {
    if (!good) printf("FAIL %s\n", what);
    failures += !good;
}

static gemm_key key_of(int64_t m) { return (gemm_key){{[GEMM_M] = m, [GEMM_N] = -5}}; }
static cublasLtMatmulAlgo_t algo_of(uint64_t first) {
    return (cublasLtMatmulAlgo_t){{first, UINT64_MAX, 0, 1}};
}
static uint64_t known(int64_t m) {
    gemm_key key = key_of(m);
    const cublasLtMatmulAlgo_t *found = gemm_choice_find(&key);
    return found ? found->data[0] : 0;
}
static void add(int64_t m, uint64_t first) {
    gemm_key key = key_of(m);
    cublasLtMatmulAlgo_t algo = algo_of(first);
    gemm_choice_add(&key, &algo);
}

static char *text_of(const char *path) {
    static char text[8192];
    FILE *f = fopen(path, "r");
    text[f ? fread(text, 1, sizeof text - 1, f) : 0] = '\0';
    if (f) fclose(f);
    return text;
}
static void write_text(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f)) exit(2);
}
static int64_t lines_of(const char *text) {
    int64_t n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static void in_memory(void) {
    add(1, 11);
    add(2, 22);
    add(1, 33);
    expect(known(1) == 33 && known(2) == 22 && known(3) == 0, "the last choice of a shape counts");
    char *text = strdup(cuda_gemm_choices()), *line = strstr(text, "\t2,") + 1;
    expect(lines_of(text) == 3, "a title and a line a shape");
    static const char form[] = "pgrun gemm choices 1\n130100\tNVIDIA H200\t1,-5,0,";
    expect(!strncmp(text, form, strlen(form)), "the form");
    add(2, 44);
    expect(cuda_gemm_adopt(text) == PG_OK && known(2) == 22 && forgotten == 1, "adopting");
    expect(cuda_gemm_adopt("") == PG_OK, "nothing to adopt");
    expect(cuda_gemm_adopt("x") == PG_EINVAL, "no title");
    text[strlen(text) - 9] = 'x'; /* a digit that is none */
    expect(cuda_gemm_adopt(text) == PG_EINVAL && strstr(pg_errmsg(), "line 3"), "a bad digit");
    text[strlen(text) - 30] = '\0';
    expect(cuda_gemm_adopt(text) == PG_EINVAL && strstr(pg_errmsg(), "line 3"), "a cut line");
    *line = 'z';
    expect(cuda_gemm_adopt(text) == PG_EINVAL, "a bad number");
    free(text);
}

static void in_a_file(const char *folder) {
    char path[4096], other[2048];
    snprintf(path, sizeof path, "%s/kept", folder);
    char *mine = strdup(cuda_gemm_choices()), *line = strstr(mine, "130100");
    snprintf(other, sizeof other, "pgrun gemm choices 1\n130101%.*s",
             (int)(strchr(line, '\n') - line - 5), line + 6);
    write_text(path, other); /* another version's choice of m = 1 */
    expect(pg_gemm_cache(path) == PG_OK && known(1) == 33, "lines of other versions do not count");
    add(5, 55);
    expect(lines_of(text_of(path)) == 5, "all lines are there: theirs and ours");
    expect(strstr(text_of(path), "130101\t") && strstr(text_of(path), "\t5,-5,"),
           "theirs and ours");
    free(mine);

    snprintf(path, sizeof path, "%s/broken", folder);
    write_text(path, "pgrun gemm choices 1\nwhat?\n");
    expect(pg_gemm_cache(path) == PG_OK && known(5) == 55, "a bad file is passed over");
    add(6, 66);
    expect(lines_of(text_of(path)) == 5, "and written anew");

    snprintf(path, sizeof path, "%s/none/choices", folder);
    expect(pg_gemm_cache(path) == PG_OK, "a folder that is not there");
    add(7, 77);
    add(8, 88); /* told of once */
    expect(known(7) == 77 && known(8) == 88, "choices hold without a file");
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    in_memory();
    in_a_file(argv[1]);
    printf("%d failures\n", failures);
    return failures > 0;
}
