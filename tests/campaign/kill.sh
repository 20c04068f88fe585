#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# 50 kills at random moments of a quantisation, often of one that goes on from another kill: files that are there under their names are
# whole, --resume finishes to the bytes of an undisturbed run, and nothing temporary is left. NIB_KILLS: so many.
set -u
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
kills=${NIB_KILLS:-50}
work=$(mktemp -d "$BUILD/kill.XXXXXX")
trap 'rm -rf "$work"' EXIT
RANDOM=${NIB_SEED:-20261115}
failures=0
fail() {
    echo "FAILED after $done_kills kills: $1"
    failures=$((failures + 1))
}
done_kills=0

"$BUILD/examples/make_checkpoint" --family demo --layers 4 --hidden 1024 --intermediate 2816 --shards 3 "$work/in" || exit 1
options=(--shard-size 20M --max-memory 16M -q)
start=$(date +%s%N)
"$NIB" quantize "${options[@]}" "$work/in" "$work/whole" || exit 1
lasts=$(($(date +%s%N) - start))
(cd "$work/in" && cat -- *) | cksum >"$work/before"

# What is under its name must be whole.
look() {
    local file
    for file in "$work"/out/*; do
        [ -e "$file" ] || continue
        cmp -s "$file" "$work/whole/${file##*/}" || fail "${file##*/} is there and is not what it should be"
    done
}

missed=0
while [ $done_kills -lt "$kills" ] && [ $missed -lt $((10 * kills)) ]; do
    rm -rf "$work/out"
    resume=()
    for ((again = RANDOM % 3 + 1; again > 0 && done_kills < kills; again--)); do
        "$NIB" quantize "${options[@]}" "${resume[@]}" "$work/in" "$work/out" 2>"$work/errors" &
        pid=$!
        sleep "$(awk -v r=$RANDOM -v ns="$lasts" 'BEGIN { printf "%.4f", r / 32768 * ns * 1e-9 }')"
        if kill -KILL $pid 2>/dev/null; then
            done_kills=$((done_kills + 1))
        else
            missed=$((missed + 1))
        fi
        wait $pid 2>/dev/null
        look
        resume=(--resume)
        [ -e "$work/out/config.json" ] && break # it was done already
    done
    if [ ! -e "$work/out/config.json" ] || [ -e "$work/out/.nib-partial" ]; then
        "$NIB" quantize "${options[@]}" --resume "$work/in" "$work/out" 2>"$work/errors" || fail "--resume: $(cat "$work/errors")"
    fi
    diff -r "$work/whole" "$work/out" >"$work/errors" || fail "other bytes: $(cat "$work/errors")"
    [ "$(cd "$work/out" && ls -A)" = "$(cd "$work/whole" && ls -A)" ] || fail "something is left: $(ls -A "$work/out")"
done
[ $done_kills -ge "$kills" ] || fail "the runs were over before they could be killed"
(cd "$work/in" && cat -- *) | cksum | cmp -s - "$work/before" || fail "the input was changed"
echo "$done_kills kills ($missed came too late), a run lasts $((lasts / 1000000)) ms, $failures failures"
[ $failures = 0 ]
