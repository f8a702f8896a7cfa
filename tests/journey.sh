# journey.sh: what the journeys share; each begins, in the source tree, with
#   set -u            or -eu: the first mistake ends it
#   . tests/journey.sh
cd "$SCRATCH"
failed=0 # a journey that goes on after a mistake ends with: exit $failed
complain() { echo "$*"; failed=1; }

# text LINES [END]: text.txt, with some order in it
text() { seq -f "the quick brown fox number %g jumps over ${2-the lazy dog}" 0 $(($1 - 1)) >text.txt; }

# expect CODE PART ARGUMENTS...: `pgrun $verb ARGUMENTS` ends with CODE and says PART ("": anything)
verb=
expect() {
    code=$1 part=$2
    shift 2
    said=$("$PGRUN" $verb "$@" 2>&1 </dev/null)
    got=$?
    [ "$got" = "$code" ] || complain "pgrun $verb $*: exit code $got (not $code), said: $said"
    [ -z "$part" ] || printf '%s' "$said" | grep -qF -- "$part" || complain "pgrun $verb $*: said: $said   (without: $part)"
}
