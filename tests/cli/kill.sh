#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib quantize killed at random moments, again and again, then resumed: the same bytes as an undisturbed run, and nothing
# left behind. KILLS runs are killed, 5 without it.
set -u
NIB=${NIB:?the path of the tool}
BUILD=${BUILD:?the build folder}
KILLS=${KILLS:-5}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
RANDOM=${NIB_SEED:-20261115}

"$BUILD/examples/make_checkpoint" --family demo --hidden 512 --intermediate 1536 --layers 4 --shards 3 "$work/in" || exit 1
began=$(date +%s%N)
"$NIB" quantize -q --shard-size 4M "$work/in" "$work/whole" || exit 1
span=$((($(date +%s%N) - began) / 1000000)) # ms

killed=0 resumed=0
for ((i = 0; i < KILLS; i++)); do
    rm -rf "$work/out"
    # Up to three kills before the run may end.
    for ((again = RANDOM % 3; again >= 0; again--)); do
        "$NIB" quantize -q --resume --shard-size 4M -t $((1 + RANDOM % 3)) "$work/in" "$work/out" &
        process=$!
        sleep "$(printf '%d.%03d' $((span * (RANDOM % 1100) / 1000 / 1000)) $((span * (RANDOM % 1100) / 1000 % 1000)))"
        if kill -KILL $process 2>/dev/null; then killed=$((killed + 1)); fi
        wait $process 2>/dev/null
        # Before the end nothing has a final name; after it, everything.
        if [ -d "$work/out/.nib-partial" ] && [ ! -e "$work/out/.nib-partial/complete" ]; then
            resumed=$((resumed + 1))
            if [ -n "$(ls "$work/out")" ]; then
                echo "FAILED: kill $i left final names: $(ls "$work/out")"
                exit 1
            fi
        fi
    done
    if ! "$NIB" quantize -q --resume --shard-size 4M "$work/in" "$work/out"; then
        echo "FAILED: kill $i: it cannot be resumed"
        exit 1
    fi
    if ! diff -r "$work/whole" "$work/out"; then
        echo "FAILED: kill $i: other bytes"
        exit 1
    fi
done
[ "$resumed" -gt 0 ] || { echo "FAILED: no kill met a run at work ($killed kills in runs of $span ms)"; exit 1; }
echo "$KILLS runs, $killed kills, $resumed resumed: the same bytes"
