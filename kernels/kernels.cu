/* kernels.cu: the table of the CUDA kernels, and what their launchers share;
 * prototypes in cuda.h. */
#include "common.cuh"

static const pg_kernels table = {
    .fill = cuda_fill,
    .cast = cuda_cast,
    .random_uniform = cuda_random_uniform,
    .random_normal = cuda_random_normal,
    .unary = cuda_unary,
    .unary_grad = cuda_unary_grad,
    .binary = cuda_binary,
    .axpby = cuda_axpby,
    .dropout = cuda_dropout,
    .gemm = cuda_gemm,
    .gemm_choices = cuda_gemm_choices,
    .gemm_adopt = cuda_gemm_adopt,
    .rmsnorm = cuda_rmsnorm,
    .rmsnorm_grad_scratch = cuda_rmsnorm_grad_scratch,
    .rmsnorm_grad = cuda_rmsnorm_grad,
    .layernorm = cuda_layernorm,
    .layernorm_grad_scratch = cuda_layernorm_grad_scratch,
    .layernorm_grad = cuda_layernorm_grad,
    .rope_table = cuda_rope_table,
    .rope = cuda_rope,
    .attention_scratch = cuda_attention_scratch,
    .attention = cuda_attention,
    .attention_grad_scratch = cuda_attention_grad_scratch,
    .attention_grad = cuda_attention_grad,
    .swiglu = cuda_swiglu,
    .swiglu_grad = cuda_swiglu_grad,
    .softmax = cuda_softmax,
    .softmax_grad = cuda_softmax_grad,
    .check_ids = cuda_check_ids,
    .embedding = cuda_embedding,
    .embedding_grad_scratch = cuda_embedding_grad_scratch,
    .embedding_grad = cuda_embedding_grad,
    .cross_entropy_scratch = cuda_cross_entropy_scratch,
    .cross_entropy = cuda_cross_entropy,
    .cross_entropy_grad = cuda_cross_entropy_grad,
    .vocab_stats = cuda_vocab_stats,
    .vocab_loss = cuda_vocab_loss,
    .sample_scratch = cuda_sample_scratch,
    .sample = cuda_sample,
    .argmax = cuda_argmax,
    .reduce = cuda_reduce,
    .expand = cuda_expand,
    .reduce_grad = cuda_reduce_grad,
    .move = cuda_move,
    .permute = cuda_permute,
    .sumsq = cuda_sumsq,
    .clip = cuda_clip,
    .count_nonfinite = cuda_count_nonfinite,
    .adamw = cuda_adamw,
    .sgd = cuda_sgd,
    .master_join = cuda_master_join,
    .master_split = cuda_master_split,
};

const pg_kernels *pg_kernels_cuda(void) { return &table; }

int cuda_check(const char *op, int cuda_error) {
    if (cuda_error == cudaSuccess) return PG_OK;
    return pg_fail(PG_EDEVICE, "%s: %s", op, cudaGetErrorString((cudaError_t)cuda_error));
}

int cuda_launched(const char *op) { return cuda_check(op, cudaGetLastError()); }

int cuda_sm_count(void) {
    static int count; /* a process has one device */
    int device;
    if (!count && (cudaGetDevice(&device) ||
                   cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)))
        count = 0;
    return count ? count : 1; /* the launch that follows tells what is wrong */
}

void *cuda_kept(const char *op, int64_t bytes) {
    static void *block;
    static int64_t size;
    if (bytes <= size) return block;
    void *larger_block;
    if (cuda_check(op, cudaMalloc(&larger_block, (size_t)bytes)) < 0) return NULL;
    if (block) cudaFree(block); /* waits for those who still use it */
    block = larger_block;
    size = bytes;
    return block;
}
