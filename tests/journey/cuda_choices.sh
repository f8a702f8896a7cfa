# Choices of GEMM algorithms as text and in a file, without a GPU (tests/cuda/choices.c).
set -eu
cuda=${CUDA_HOME:-/usr/local/cuda}
[ -e "$cuda/include/cublasLt.h" ] || { echo "skipped: no cuBLASLt here"; exit 0; }
${CC:-gcc} -std=gnu11 -D_GNU_SOURCE= -O1 -g -Wall -Wextra -fsanitize=address,undefined -isystem "$cuda/include" \
    tests/cuda/choices.c kernels/choices_cublas.c runtime/base/settings.c runtime/base/status.c runtime/base/types.c \
    -o "$SCRATCH/choices" -lm
"$SCRATCH/choices" "$SCRATCH" 2>"$SCRATCH/said" || { cat "$SCRATCH/said"; exit 1; }
[ "$(grep -c 'broken: ignored: gemm choices: line 2 ' "$SCRATCH/said")" = 1 ] || { echo "a bad file must be told of once"; exit 1; }
[ "$(grep -c 'none/choices: choices .* cannot be written' "$SCRATCH/said")" = 1 ] || { echo "a lost file must be told of once"; exit 1; }
