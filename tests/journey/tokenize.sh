# pgrun tokenize: bytes come back as they were, time grows with size alone, and whatever goes wrong leaves the
# output as it was (CASES.md C30, C31, C32).
set -u
. tests/journey.sh
verb=tokenize

# Every byte of awkward files, back through a token file.
printf '\357\273\277BOM\r\nCRLF\rlone CR\0NUL \360\237\231\202  \t \377\376 <|endoftext|> \n\n' >odd.txt
head -c 5000000 /dev/urandom >noise.txt
printf x >one.txt
cat >back.lua <<'LUA'
local ffi = require "ffi"
local path, out = ...
local stream = pg.data.open { tokens = path, context = 1, vocab = 259 }.train
local ids = ffi.new("int32_t[?]", stream.tokens)
stream:read(0, stream.tokens, ids)
assert(ids[0] == 256 and ids[stream.tokens - 1] == 257, "no BOS or EOS")
pg.fs.write(out, pg.data.tokeniser.bytes:decode(ids, stream.tokens))
LUA
for file in odd noise one; do
    expect 0 " tokens of 1 file, vocabulary 259 (bytes)" $file.txt -o $file.bin
    "$PGRUN" back.lua $file.bin $file.back && cmp $file.txt $file.back || complain "$file did not come back"
done
: >empty.txt
expect 0 "all.bin: 111 tokens of 3 files (2 empty, skipped)" empty.txt odd.txt one.txt empty.txt odd.txt -o all.bin

# C32: one huge word; ten times the size, at most 15 times the time (in milliseconds, floor 100).
milliseconds() {
    from=$(date +%s%N)
    "$PGRUN" tokenize "$1" -o big.bin >/dev/null || complain "tokenize $1"
    echo $(( ($(date +%s%N) - from) / 1000000 ))
}
head -c 5000000 /dev/zero | tr '\0' a >five.txt
head -c 50000000 /dev/zero | tr '\0' a >fifty.txt
small=$(milliseconds five.txt)
large=$(milliseconds fifty.txt)
[ "$small" -ge 100 ] || small=100
[ "$large" -le $((15 * small)) ] || complain "5 MB in $small ms, 50 MB in $large ms"
[ "$(wc -c <big.bin)" = 100001028 ] || complain "50 MB gave $(wc -c <big.bin) bytes"

# What is asked in a wrong way.
mkdir folder
expect 2 "no files named"
expect 2 "no output named; add -o OUT.bin" odd.txt
expect 2 "-o needs a file name" odd.txt -o
expect 2 "unknown option --nope" --nope odd.txt -o x.bin
expect 2 "would be written over itself" odd.txt -o ./odd.txt
expect 1 'tokeniser "gpt9" is unknown' odd.txt -o x.bin --tokenizer=gpt9
expect 1 "none.txt: No such file" odd.txt none.txt -o x.bin
expect 1 "folder: Is a directory" folder -o x.bin
expect 1 "nothing but empty files (2)" empty.txt empty.txt -o x.bin
expect 1 "nowhere/" odd.txt -o nowhere/x.bin
expect 1 "folder is a folder" odd.txt -o folder
expect 1 "names no file" odd.txt -o folder/
expect 0 "usage: pgrun tokenize FILE" --help
mkfifo pipe # stands for /dev/full and the like: no file may take the place of a device
expect 1 "pipe is a device, pipe or socket" odd.txt -o pipe
[ -p pipe ] || complain "a file took the place of a pipe"
if [ "$(id -u)" != 0 ]; then # root may read and write everything
    cp one.txt secret.txt && chmod 0 secret.txt
    expect 1 "secret.txt: Permission denied" secret.txt -o x.bin
    mkdir locked && chmod 500 locked
    expect 1 "Permission denied" odd.txt -o locked/x.bin
fi
[ ! -e x.bin ] || complain "a failed run left x.bin"

# A disk that is full, and a signal: the old output stays, and nothing lies beside it.
cp one.bin kept.bin
(ulimit -f 1000 && expect 1 "kept.bin at byte" fifty.txt -o kept.bin && exit $failed) || failed=1
"$PGRUN" tokenize fifty.txt fifty.txt fifty.txt fifty.txt -o kept.bin >/dev/null 2>&1 &
pid=$!
i=0 # from the moment its output is under way
until ls .kept.bin.tmp-* >/dev/null 2>&1 || [ $i -ge 100 ]; do sleep 0.05; i=$((i + 1)); done
kill -TERM $pid
wait $pid
code=$?
[ $code -ne 0 ] || complain "SIGTERM: exit code 0"
cmp one.bin kept.bin || complain "a failed run changed the output"
left=$(ls -A | grep tmp-)
[ -z "$left" ] || complain "left behind: $left"
exit $failed
