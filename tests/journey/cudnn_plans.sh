# Without a GPU: cuDNN makes Hopper's kernels of our attention graphs (tests/cuda/plans.c).
# limit: 200
set -eu
cuda=${CUDA_HOME:-/usr/local/cuda}
first_with() { # first_with FILE FOLDER... : the first folder that holds it
    file=$1; shift
    for folder in "$@"; do [ ! -e "$folder/$file" ] || { echo "$folder"; return; }; done
}
cudnn=${CUDNN_HOME:-$cuda}
include=$(first_with cudnn.h "$cudnn/include" "$cuda/include" /usr/include /usr/include/x86_64-linux-gnu)
library=$(first_with libcudnn.so.9 "$cudnn/lib" "$cudnn/lib64" "$cuda/lib64" /usr/lib/x86_64-linux-gnu)
runtime=$(first_with cuda_runtime.h "$cuda/include" /usr/include)
[ -n "$include" ] && [ -n "$library" ] && [ -n "$runtime" ] || { echo "skipped: no cuDNN here"; exit 0; }
case "${BUILD:-}" in *san-*) echo "skipped: cuDNN does not run under sanitizers"; exit 0;; esac
${CC:-gcc} -O1 -Wall -Wextra -shared -fPIC -Wl,-soname,libcuda.so.1 tests/cuda/fake_driver.c -o "$SCRATCH/libcuda.so.1"
${CC:-gcc} -std=gnu11 -D_GNU_SOURCE= -O1 -Wall -Wextra -isystem "$include" -isystem "$runtime" tests/cuda/plans.c \
    kernels/graph_cudnn.c kernels/library_cudnn.c kernels/plan_cudnn.c kernels/sdpa_cudnn.c kernels/usable_cudnn.c \
    runtime/base/status.c runtime/base/types.c -o "$SCRATCH/plans" -ldl -lm \
    -Wl,--disable-new-dtags,-rpath,"$library:$cuda/lib64:$cuda/lib"
LD_LIBRARY_PATH="$SCRATCH" "$SCRATCH/plans" tests/cuda/h200.json
