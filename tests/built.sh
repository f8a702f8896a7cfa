# built.sh: for scripts that run where the source tree is, or what `make dist DIST_TESTS=1` made; begin with
#   cd "$(dirname "$0")/.." || exit 1
#   . tests/built.sh
# $build: the folder of pgrun, its plug-in and tests/.  LD_LIBRARY_PATH has that, and the libraries of CUDA that the
# loader does not know of, as in Python packages.
# shellcheck shell=bash
if [ -x ./pgrun ] && [ ! -L ./pgrun ]; then build=.; else build=build; fi
for library in libcublasLt.so.13 libcudnn.so.9 libnccl.so.2; do
    ldconfig -p 2>/dev/null | grep -q "$library" && continue
    [ -e "$build/$library" ] && continue
    found=$(find /usr/local /opt /usr/lib -xdev -name "$library" 2>/dev/null | head -1)
    if [ -n "$found" ]; then LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$found")
    else echo "no $library on this machine"; fi
done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$PWD/$build
