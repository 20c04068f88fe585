# SPDX-License-Identifier: Apache-2.0
# What the scripts here share; they source it. $work is a directory that goes when the script ends, and a script's last
# line is [ $failures = 0 ].
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# run STATUS COMMAND...: runs it into $work/out and $work/err and compares the exit status.
run() {
    local expected=$1 status=0
    shift
    "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
    [ "$status" = "$expected" ] || fail "$*: exit $status, not $expected"
}

# fail MESSAGE: with what the last command printed, control characters made visible.
fail() {
    local stream
    failures=$((failures + 1))
    {
        echo "FAILED: $1"
        for stream in out err; do
            [ ! -f "$work/$stream" ] || head -40 "$work/$stream" | sed "s/^/    $stream: /"
        done
    } | cat -v
}

# Of out and err: has a text, matches an extended expression, is empty; of out: has so many lines that match.
has() { grep -qF -- "$2" "$work/$1" || fail "std$1 lacks: $2"; }
matches() { grep -qE -- "$2" "$work/$1" || fail "std$1 lacks: $2"; }
empty() { [ ! -s "$work/$1" ] || fail "std$1 should be empty"; }
lines() { [ "$(grep -cE -- "$2" "$work/out")" = "$1" ] || fail "not $1 lines with: $2"; }

# Of files: not there; the same, directories with all that is in them.
absent() { [ ! -e "$1" ] || fail "$1 should not be there"; }
same() { diff -r "$1" "$2" >"$work/out" 2>&1 || fail "$1 and $2 differ"; }
