#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# demo.sh [BUILD] - what `make demo` runs: a made-up model is quantized, checked and compared with what it was.
# Everything is written to BUILD/demo.
set -eu
build=${1:-build}
folder=$build/demo
bold=
plain=
if [ -t 1 ]; then
    bold=$(printf '\033[1m')
    plain=$(printf '\033[0m')
fi

say() { printf '\n%s\n' "$1"; }

# show PROGRAM ARGUMENT...: the command as one would type it, and what it prints.
show()
{
    program=$1
    shift
    printf '\n%s$ %s%s\n' "$bold" "${program##*/} $*" "$plain"
    "$program" "$@"
}

rm -rf "$folder"
mkdir -p "$folder"
say "A model of Llama's shape with made-up weights: four layers, experts in one of them; two files,
and the queries of a layer are not in the file of its keys."
show "$build/examples/make_checkpoint" --family demo --varied --layers 4 --hidden 1024 --intermediate 2816 \
    --shards 2 "$folder/model"

say "To NVFP4, for vLLM. Weights that a server fuses get the same scale, across files too."
show "$build/nib" quantize --for vllm --report "$folder/report.html" "$folder/model" "$folder/model-NVFP4"

say "Would a server load it, and compute what it should?"
show "$build/nib" check "$folder/model-NVFP4" --against "$folder/model"

say "What it cost: the worst weights, and all of them together."
show "$build/nib" compare --top 5 "$folder/model" "$folder/model-NVFP4"

[ -s "$folder/report.html" ]
say "The same with charts, on a page of its own:
  file://$(cd "$folder" && pwd)/report.html"
