#!/bin/sh
# deps.sh: what a fresh Debian 12+ or Ubuntu 24.04+ machine needs to build and test pgrun.
#
#   sh scripts/deps.sh          for make, make demo and make test
#   sh scripts/deps.sh lint     also luacheck and clang-format, for make check
#
# Silent when nothing is missing.  As root it installs; otherwise it prints the one line to run and
# ends with 1.  OpenBLAS is the OpenMP build: the pthread one is half as fast beside OpenMP loops.
set -eu
packages="gcc make libc6-dev libluajit-5.1-dev libopenblas-openmp-dev libjansson-dev libxxhash-dev
          libedit-dev libcmocka-dev lua-unit"
[ "${1:-}" = lint ] && packages="$packages lua-check clang-format"

if ! command -v dpkg-query >/dev/null; then
    echo "deps: no dpkg here; on another system install what these Debian packages hold:" $packages >&2
    exit 1
fi
missing=
installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $packages 2>/dev/null || true)
for package in $packages; do
    case "
$installed
" in *"
installed $package
"*) ;; *) missing="$missing $package" ;; esac
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ]; then
    echo "sudo apt-get install -y$missing"
    exit 1
fi
echo "deps: installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get -q update && apt-get -q install -y --no-install-recommends $missing; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "deps: apt-get could not install$missing" >&2
    exit 1
fi
