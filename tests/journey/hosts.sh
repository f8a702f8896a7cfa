# limit: 120
# Two hosts, each a network namespace, joined by a cable (a veth pair): the launchers meet, and only with
# the same secret; a death, a signal or a lost network on one ends both with the reason; nothing stays.
set -u
if [ "${1:-}" != inside ]; then
    cd "$SCRATCH" || exit 1
    for way in -n -rn; do # as root; else in a user namespace, where the system allows those
        unshare $way true 2>/dev/null && command -v ip nsenter >/dev/null || continue
        exec unshare $way --kill-child -f bash "$OLDPWD/$0" inside
    done
    echo "skipped: no network namespaces here (root, or user namespaces, with iproute2 and util-linux)"
    exit 0
fi
unshare -n sleep 1000 & other=$!
trap 'kill $other' EXIT
for _ in $(seq 50); do # until it has left our namespace
    [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.1
done
there() { nsenter -t $other -n "$@"; }
if ! ip link add cable type veth peer name cable netns $other 2>said; then
    echo "skipped: no veth pair here: $(head -1 said)"
    exit 0
fi
ip addr add 10.77.0.1/24 dev cable && ip link set cable up && ip link set lo up
there ip addr add 10.77.0.2/24 dev cable && there ip link set cable up && there ip link set lo up

export HOME=$PWD # the ranks' processes tell their numbers in pid.RANK
unset PGRUN_SECRET
mkdir -p .config/pgrun && (umask 077; echo "a secret of these two hosts" >.config/pgrun/secret)
cat >loop.lua <<'LUA'
local host = require "pg.host"
local f = assert(io.open("pid." .. host.rank, "w"))
f:write((io.open("/proc/self/stat"):read "*l"):match "^%d+")
f:close()
while true do end
LUA
printf 'print(("rank %%d of %%d, %%d here"):format(require("pg.host").rank, os.getenv "WORLD_SIZE", os.getenv "LOCAL_RANK"))\n' >well.lua
printf 'local r = require("pg.host").rank\nif r == 0 then error "boom" end\nwhile true do end\n' >raise.lua
failed=0 what=
complain() { echo "$what: $*"; sed 's/^/    0: /' said0; sed 's/^/    1: /' said1; failed=1; }
# host0 ARGUMENTS..., host1 ARGUMENTS...: start a launcher; $launcher0, $launcher1
start="env --default-signal=INT,TERM $PGRUN --no-jit --nnodes 2 --master 10.77.0.1:29500"
host0() { $start "$@" >said0 2>&1 & launcher0=$!; }
host1() { nsenter -t $other -n $start --node-rank 1 "$@" >said1 2>&1 & launcher1=$!; }
# both WHAT ARGUMENTS...: on each host; loop.lua: once all four ranks run
both() {
    what=$1; shift
    rm -f pid.?
    host1 "$@"; host0 "$@"
    for _ in $(seq 100); do
        case $* in *loop.lua) ;; *) break ;; esac
        [ -s pid.0 ] && [ -s pid.1 ] && [ -s pid.2 ] && [ -s pid.3 ] && break
        sleep 0.1
    done
    began=$SECONDS
}
# ended CODE0 CODE1 [SECONDS]: both launchers so, in time (10 s), and no rank lives
ended() {
    wait $launcher0 2>/dev/null; code=$?
    [ $code = "$1" ] || complain "host 0 ends with $code, not $1"
    wait $launcher1 2>/dev/null; code=$?
    [ $code = "$2" ] || complain "host 1 ends with $code, not $2"
    [ $((SECONDS - began)) -le "${3:-10}" ] || complain "took $((SECONDS - began)) s"
    sleep 0.1
    for f in pid.?; do
        [ -e "$f" ] || continue
        [ "$(awk '{ print $3 }' "/proc/$(cat $f)/stat" 2>/dev/null || echo Z)" = Z ] || complain "$f is left"
    done
    grep -q ":$(printf %04X 29500) .* 0A " /proc/net/tcp && complain "the port is left open"
}
# tells HOST TEXT: its output has a line that begins so (a basic regular expression)
tells() { grep -q "^$2" said$1 || complain "host $1 does not say: $2"; }

both "a run" -n 2 well.lua
ended 0 0
tells 0 'rank 0 of 4, 0 here'; tells 0 '\[rank 1\] rank 1 of 4, 1 here'
tells 1 '\[rank 2\] rank 2 of 4, 0 here'; tells 1 '\[rank 3\] rank 3 of 4, 1 here'

both "a rank of host 1 killed" -n 2 loop.lua
kill -KILL "$(cat pid.3)"; ended 1 137
for h in 0 1; do tells $h 'pgrun: host 1 (.*): rank 3 was killed by SIGKILL before the first step'; done
tells 0 '    then rank 0 is at its start'
both "a rank of host 0 killed" -n 2 loop.lua
kill -KILL "$(cat pid.0)"; ended 137 1
for h in 0 1; do tells $h 'pgrun: host 0 (.*): rank 0 was killed by SIGKILL'; done
both "a rank that raises" -n 2 raise.lua
ended 1 1
for h in 0 1; do tells $h 'pgrun: host 0 (.*): rank 0 failed before the first step: raise.lua:2: boom'; done

both "Ctrl-C on host 1" -n 2 loop.lua
kill -INT $launcher1; ended 130 130
tells 0 'pgrun: stopped by SIGINT on host 1 ('; tells 1 'pgrun: stopped by SIGINT$'
both "SIGTERM on host 0" -n 2 loop.lua
kill -TERM $launcher0; ended 143 143
tells 0 'pgrun: stopped by SIGTERM$'; tells 1 'pgrun: stopped by SIGTERM on host 0 ('
both "launcher 1 killed" -n 2 loop.lua
kill -KILL $launcher1; ended 1 137
tells 0 'pgrun: host 1 (.*) is gone'
both "launcher 0 killed" -n 2 loop.lua
kill -KILL $launcher0; ended 137 1
tells 1 'pgrun: host 0 (.*) is gone'
both "the cable cut" -n 2 loop.lua
ip link set cable down; ended 1 1 20
tells 0 'pgrun: host 1 (.*) is gone'; tells 1 'pgrun: host 0 (.*) is gone'
ip link set cable up

# who does not belong
export PGRUN_TIMEOUT=2
what="another secret"; began=$SECONDS; rm -f pid.?; : >said1
host0 -n 2 loop.lua
PGRUN_SECRET="the secret of somebody else" host1 -n 2 loop.lua
(sleep 0.5; printf 'GET / HTTP/1.0\r\n\r\n' >/dev/tcp/10.77.0.1/29500) 2>/dev/null # a stranger
ended 1 1
tells 1 'pgrun: store 10.77.0.1:29500: pgrun on host 0 has another secret'
tells 0 'pgrun: host 1 of 2 did not come to 10.77.0.1:29500 within 2 s'
[ ! -e pid.0 ] || complain "a rank started"
what="no secret"; HOME=/nowhere host0 -n 2 loop.lua; HOME=/nowhere host1 -n 2 loop.lua; ended 1 1
tells 0 'pgrun: secret: .*PGRUN_SECRET'; tells 1 'pgrun: .*10.77.0.1:29500\|pgrun: secret: .*PGRUN_SECRET'
chmod 644 .config/pgrun/secret
what="a secret for all to read"; host0 -n 2 loop.lua; host1 -n 2 loop.lua; ended 1 1
tells 0 'pgrun: secret: others can read'
chmod 600 .config/pgrun/secret
what="host 0 does not come"; began=$SECONDS; host1 -n 2 loop.lua; true & launcher0=$!; ended 0 1
tells 1 'pgrun: store: no word from pgrun on host 0 at 10.77.0.1:29500 within 2 s'
what="other numbers of ranks"; host0 -n 2 loop.lua; host1 -n 3 loop.lua; ended 1 1
for h in 0 1; do tells $h 'pgrun: .*host 1 counts 6 ranks, host 0 counts 4; give -n and --nnodes alike'; done

# collectives of the CPU end at the host
unset PGRUN_TIMEOUT
export PG_DEVICE=cpu
echo 'pg.barrier()' >meet.lua
both "a barrier on the CPU" -n 2 meet.lua
ended 1 1
tells 0 'pgrun: host [01] (.*): rank [0-3] failed .*the cpu backend joins the ranks of one host, several hosts need cuda'
exit $failed
