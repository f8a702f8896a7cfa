/* usable_cudnn.c: which attention calls go to cuDNN; the others go to our own kernels. */
#include "attention_cudnn.h"

static int aligned(const void *p) { return ((uintptr_t)p & 15) == 0; }

/* Errors of versions, as their notes and reports name them. */
static const char *version_fault(const pg_attn_args *a, int backward, size_t version) {
    if (version < 91100) return "cuDNN older than 9.11 does not know these graphs";
    if (!backward) return NULL;
    if (version <= 91500 && a->keys % 128)
        return "cuDNN up to 9.15 has wrong gradients where keys are no multiple of 128";
    if (version < 92600 && !a->causal && !a->lengths && a->keys % 128 == 64)
        return "cuDNN below 9.26 gives NaN in dq where keys mod 128 is 64 and nothing is masked "
               "(pytorch issue 196678)";
    return NULL;
}

int cudnn_attention_usable(const pg_attn_args *a, int backward, size_t version, const char **why) {
    *why = NULL;
    if (a->dtype != PG_BF16 && a->dtype != PG_F16) *why = "only f16 and bf16";
    else if (a->dropout > 0) *why = "dropout's masks must be ours";
    else if (a->batch < 1 || a->rows < 2 || a->keys < 2) *why = "a single row or key";
    else if (a->causal && a->rows != a->keys) *why = "causal with fewer rows than keys";
    else if (a->width % 8 || a->width > 256) *why = "head widths are multiples of 8 up to 256";
    else if (a->q_stride % a->width || a->kv_stride % a->width) *why = "rows of whole heads";
    else if (!aligned(a->q) || !aligned(a->k) || !aligned(a->v)) *why = "16-byte borders";
    else *why = version_fault(a, backward, version);
    return *why == NULL;
}
