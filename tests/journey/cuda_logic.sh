# Our C code around cuBLASLt and cuDNN on stand-ins for them (tests/cuda/fake.h), without a GPU: the
# twin tests of products and of attention.
# limit: 200
set -eu
cuda=${CUDA_HOME:-/usr/local/cuda}
[ -e "$cuda/include/cublasLt.h" ] && [ -e "$cuda/include/cudnn.h" ] || { echo "skipped: no cuBLASLt and cuDNN here"; exit 0; }
cp "$(dirname "$PGRUN")/tests/test_twins_gemm" "$(dirname "$PGRUN")/tests/test_twins_cudnn" "$SCRATCH"
${CC:-gcc} -std=gnu11 -D_GNU_SOURCE= -O1 -g -Wall -Wextra -DWORTH_FLOPS=4e6f -fPIC -shared -isystem "$cuda/include" \
    tests/cuda/fake_plugin.c tests/cuda/fake_cublas.c tests/cuda/fake_cudnn.c kernels/*_cublas.c \
    kernels/attention_cudnn.c kernels/usable_cudnn.c -o "$SCRATCH/libpg_cuda.so" -lm
unset PG_GEMM_TUNE
export PG_TWINS_STANDIN=1 OMP_NUM_THREADS=1
for test in gemm cudnn; do
    "$SCRATCH/test_twins_$test" >"$SCRATCH/$test.log" 2>&1 || { tail -n 40 "$SCRATCH/$test.log"; exit 1; }
    ! grep -q SKIPPED "$SCRATCH/$test.log" || { tail -n 20 "$SCRATCH/$test.log"; exit 1; }
done
