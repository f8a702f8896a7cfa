#!/bin/bash
# two_hosts.sh: two hosts rehearsed on one machine with two GPUs: a launcher for each card, in a network
# namespace of its own (as root; else over the loopback), NCCL over sockets alone.
#
#   bash tests/bench/two_hosts.sh [FOLDER]          STEPS=20 TEXT=FILE LIMIT=180 (seconds a run)
#
# From the source tree, or from what `make dist DIST_TESTS=1` made.  Trains models/tiny.lua with dp 2 and pp 2:
# on one card, on two cards as one host, on two hosts; then kills a rank of the second host.  Runs, logs and
# NCCL's own go to FOLDER.  Prints what agrees; exit code 0: all of it, 2: cannot be done here.
set -u
out=${1:-build/two-hosts-$(date +%Y%m%d-%H%M%S)} steps=${STEPS:-20} limit=${LIMIT:-180} port=29513
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/../.." || exit 2
. tests/built.sh
pgrun=${PGRUN:-$build/pgrun}
failed=0
say() { echo "$*" | tee -a "$out/verdict.txt"; }
cannot() { say "two_hosts: $*"; exit 2; }
: >"$out/verdict.txt"

text=${TEXT:-build/demo/jargon.txt}
[ -s "$text" ] || cannot "no text at $text; give TEXT=FILE"
device=${DEVICE:-cuda} # cpu: for the logic of this script alone, with a PGRUN that stands in for hosts
if [ "$device" = cuda ]; then
    cards=$(timeout 60 "$pgrun" --version 2>&1 | grep -c '^GPU [0-9]')
    [ "$cards" -ge 2 ] || cannot "two GPUs are needed, $cards answer"
fi
visible=${CUDA_VISIBLE_DEVICES:-0,1}
first=${visible%%,*} second=${visible#*,} second=${second%%,*}

# ---- the hosts ----
keep0='' keep1='' launcher0='' launcher1=''
clean_up() {
    for p in $launcher0 $launcher1; do end "$p"; done
    for p in $keep0 $keep1; do kill -KILL "$p" 2>/dev/null; done
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
# gone PID SECONDS: it has ended by then (the dead that nobody has waited for count as ended)
gone() {
    local end=$((SECONDS + $2))
    while [ "$(awk '{ sub(/.*\) /, ""); print $1 }' "/proc/$1/stat" 2>/dev/null || echo Z)" != Z ]; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}
end() { # PID: it has 12 s to end when it is asked
    kill -TERM "$1" 2>/dev/null
    gone "$1" 12 || kill -KILL "$1" 2>/dev/null
}
here=$(readlink /proc/self/ns/net)
# apart: two namespaces and a cable between them
apart() {
    command -v unshare nsenter ip >/dev/null && unshare -n true || return 1
    unshare -n sleep 3600 & keep0=$!
    unshare -n sleep 3600 & keep1=$!
    for _ in $(seq 50); do
        [ "$(readlink /proc/$keep0/ns/net)" != "$here" ] && [ "$(readlink /proc/$keep1/ns/net)" != "$here" ] && break
        sleep 0.1
    done
    [ "$(readlink /proc/$keep0/ns/net)" != "$here" ] && [ "$(readlink /proc/$keep1/ns/net)" != "$here" ] || return 1
    local in0="nsenter -t $keep0 -n" in1="nsenter -t $keep1 -n"
    $in0 ip link add cable type veth peer name cable netns $keep1 || return 1
    $in0 ip addr add 10.77.0.1/24 dev cable && $in0 ip link set cable up && $in0 ip link set lo up || return 1
    $in1 ip addr add 10.77.0.2/24 dev cable && $in1 ip link set cable up && $in1 ip link set lo up
}
if apart 2>"$out/namespaces.log"; then
    in0="nsenter -t $keep0 -n" in1="nsenter -t $keep1 -n" master=10.77.0.1:$port interface=cable
    say "two network namespaces, joined by a veth pair"
else
    in0='' in1='' master=127.0.0.1:$port interface=lo
    say "no network namespaces here ($(head -1 "$out/namespaces.log")): over the loopback"
fi
export PGRUN_TIMEOUT=60
PGRUN_SECRET=$(head -c 24 /dev/urandom | base64)
export PGRUN_SECRET
# host NUMBER CARD NAME ARGUMENTS...: its launcher in the background, as this shell's child; $!
host() {
    local number=$1 card=$2 name=$3 enter=$in0
    shift 3
    [ "$number" = 0 ] || enter=$in1
    $enter env CUDA_VISIBLE_DEVICES="$card" NCCL_HOSTID="host$number" NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 \
        NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_SOCKET_IFNAME=$interface NCCL_DEBUG=INFO \
        NCCL_DEBUG_FILE="$out/$name.nccl.$number" "$pgrun" -n 1 --device "$device" --nnodes 2 --node-rank "$number" \
        --master $master models/tiny.lua "$@" >"$out/$name.log.$number" 2>&1 &
}
arguments() { # STEPS NAME
    echo "--steps=$1 --data.text=$text --eval.batches=2 --sample.tokens=20 --log.every=1 --run=$out/$2"
}
# hosts NAME ARGUMENTS...: both; 0 when both end well in time
hosts() {
    local name=$1; shift
    # shellcheck disable=SC2046
    host 1 "$second" "$name" $(arguments "$steps" "$name") "$@"; launcher1=$!
    host 0 "$first" "$name" $(arguments "$steps" "$name") "$@"; launcher0=$!
    local code0 code1
    gone $launcher0 "$limit" || end $launcher0
    gone $launcher1 15 || end $launcher1
    wait $launcher0; code0=$?
    wait $launcher1; code1=$?
    launcher0='' launcher1=''
    [ $code0 = 0 ] && [ $code1 = 0 ] && return 0
    say "FAIL $name: the hosts end with $code0 and $code1; the ends of their logs:"
    tail -n 3 "$out/$name.log.0" "$out/$name.log.1"
    failed=1
    return 1
}
# alone NAME RANKS ARGUMENTS...: as one host, NCCL as it likes
alone() {
    local name=$1 ranks=$2; shift 2
    # shellcheck disable=SC2046
    CUDA_VISIBLE_DEVICES=$first,$second timeout -k 10 "$limit" "$pgrun" --device "$device" -n "$ranks" models/tiny.lua \
        $(arguments "$steps" "$name") "$@" >"$out/$name.log" 2>&1 && return 0
    say "FAIL $name: exit code $?; the end of its log:"
    tail -n 3 "$out/$name.log"
    failed=1
    return 1
}
agree() { # RUN REFERENCE
    local told
    if told=$(timeout 60 "$pgrun" tests/agreement.lua "$out/$1" "$out/$2" fp32 2>&1); then
        say "ok   ${told//"$out/"/}"
    else
        say "FAIL ${told//"$out/"/}"
        failed=1
    fi
}
# What NCCL says of its way.
transport() {
    local name=$1 sockets others
    sockets=$(cat "$out/$name".nccl.* 2>/dev/null | grep -c 'via NET/Socket')
    others=$(cat "$out/$name".nccl.* 2>/dev/null | grep -cE 'via (P2P|SHM|NVLS)')
    if [ "$others" -gt 0 ]; then say "FAIL $name: NCCL took another way than sockets $others times"; failed=1; fi
    if [ "$sockets" -gt 0 ]; then say "ok   $name: NCCL tells of $sockets channels by sockets"
    elif [ "$device" = cuda ]; then say "FAIL $name: NCCL does not tell of sockets"; failed=1; fi
}

alone one 1 || exit 1
for layout in dp pp; do
    more=--layout.$layout=2
    [ $layout = dp ] || more="$more --micro=4"
    # shellcheck disable=SC2086
    if alone "two-$layout" 2 $more; then agree "two-$layout" one; fi
    # shellcheck disable=SC2086
    if hosts "hosts-$layout" $more; then
        agree "hosts-$layout" "two-$layout"
        agree "hosts-$layout" one
        transport "hosts-$layout"
    fi
done

# ---- a death ----
# shellcheck disable=SC2046
host 1 "$second" death $(arguments 1000000 death); launcher1=$!
# shellcheck disable=SC2046
host 0 "$first" death $(arguments 1000000 death); launcher0=$!
lines() { [ -e "$out/death/metrics.jsonl" ] && wc -l <"$out/death/metrics.jsonl" || echo 0; }
for _ in $(seq $((10 * limit))); do
    [ "$(lines)" -ge 5 ] && break
    gone $launcher0 0 && break
    sleep 0.1
done
victim=$(cat /proc/[0-9]*/stat 2>/dev/null | awk -v parent=$launcher1 '
    { pid = $1; sub(/.*\) /, ""); if ($2 == parent && $1 != "Z") print pid }' | head -1)
if [ "$(lines)" -lt 5 ] || [ -z "$victim" ]; then
    say "FAIL death: the training did not get under way"
    tail -n 3 "$out/death.log.0" "$out/death.log.1"
    failed=1
else
    kill -KILL "$victim"
    began=$SECONDS
    gone $launcher0 20; gone $launcher1 20
    took=$((SECONDS - began))
    for p in $launcher0 $launcher1; do gone "$p" 0 || end "$p"; done
    if [ $took -le 10 ]; then say "ok   death: both hosts ended within $took s"
    else say "FAIL death: the hosts took $took s to end"; failed=1; fi
    for h in 0 1; do
        told=$(grep -m1 '^pgrun: host' "$out/death.log.$h")
        case $told in
            'pgrun: host 1 ('*'): rank 1 was killed by SIGKILL at step '*) say "ok   death: host $h: $told" ;;
            *) say "FAIL death: host $h: ${told:-names no host}"; failed=1 ;;
        esac
    done
    [ ! -d "/proc/$victim" ] || { say "FAIL death: the rank is still there"; failed=1; }
fi
if [ $failed = 0 ]; then say "two hosts: all agrees"; else say "two hosts: FAILED"; fi
exit $failed
