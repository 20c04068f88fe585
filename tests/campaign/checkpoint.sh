#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Bounded memory and speed on a checkpoint of 8 GB: one 2-D tensor of 3 GB, a transposed stack of experts of 2 GB, and
# so many small tensors that the index has 25 MB. States the peak of resident memory, which must stay below 600 MB and
# must not grow with the number of files, and MB/s beside a plain copy of the same files. Takes 20 GB of disk for some
# minutes.
#
#   NIB_SCALE=16    a sixteenth of it
#   NIB_FOLDER=...  where the files go, by default below the build directory
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
scale=${NIB_SCALE:-1}
folder=${NIB_FOLDER:-$BUILD}/campaign-checkpoint
rm -rf "$folder"
mkdir -p "$folder"
trap 'rm -rf "$folder"' EXIT
free=$(df -m --output=avail "$folder" | tail -1)
if [ "$free" -lt $((28000 / scale)) ]; then
    echo "needs $((28000 / scale)) MB of disk in $folder, there are $free"
    exit 77
fi
failures=0
limit=600
measure() { python3 tests/campaign/measure.py "$@" 2>"$folder/errors" | tail -1; }

# make SHARDS FOLDER
make() {
    "$BUILD/examples/make_checkpoint" --family qwen3-vl-moe --layers 1 --hidden 2048 --intermediate 1024 --heads 16 \
        --experts $((256 / scale)) --small $((216000 / scale)) --shards "$1" \
        --linear model.language_model.layers.0.mlp.wide:$((32768 / scale))x49152 "$2"
}

# quantize NAME FOLDER OPTION...: sets seconds and memory
quantize() {
    name=$1
    in=$2
    shift 2
    rm -rf "$folder/out"
    sync
    read -r seconds memory < <(measure "$NIB" quantize -q "$@" "$in" "$folder/out") || true
    if [ ! -s "$folder/out/config.json" ]; then
        echo "FAILED: $name: $(cat "$folder/errors")"
        failures=$((failures + 1))
    fi
    awk -v name="$name" -v mb="$megabytes" -v s="$seconds" -v rss="$memory" -v copy="$copied" \
        'BEGIN { printf "%-28s %7.1f s  %6.0f MB/s  %.2f of a copy  peak %4d MB\n", name, s, mb / s, copy / s, rss }'
    if [ "$memory" -ge $limit ]; then
        echo "FAILED: $name: $memory MB is not below $limit"
        failures=$((failures + 1))
    fi
}

make 4 "$folder/in"
megabytes=$(du -sm --apparent-size "$folder/in" | cut -f1)
echo "index $(wc -c <"$folder/in/model.safetensors.index.json" | awk '{ printf "%.1f MB", $1 / 1e6 }')"

# What is read comes from the page cache or not in the same way for all: read it once, then copy.
cat "$folder"/in/* >/dev/null
sync
read -r copied _ < <(measure sh -c "cp -r '$folder/in' '$folder/copy' && sync -f '$folder/copy'")
awk -v mb="$megabytes" -v s="$copied" 'BEGIN { printf "%-28s %7.1f s  %6.0f MB/s\n", "copy and sync", s, mb / s }'
rm -rf "$folder/copy"
quantize "rtn, 4 files" "$folder/in" --scale rtn
quantize "sweep, 4 files" "$folder/in"
few=$memory
rm -rf "$folder/in" "$folder/out"
make 32 "$folder/in"
quantize "sweep, 32 files" "$folder/in"
if [ "$memory" -gt $((few + 40)) ]; then
    echo "FAILED: $few MB with 4 files, $memory MB with 32"
    failures=$((failures + 1))
fi
[ $failures = 0 ]
