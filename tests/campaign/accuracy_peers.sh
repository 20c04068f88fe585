#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# SmolLM2-135M as llm-compressor and ModelOpt calibrate it, each in its own virtual environment (PyPI), beside nib's A+B and A+B+C from
# the same tokens: KL of each, and nib's is the least. NIB_ACCURACY is the directory that `bench/accuracy.py prepare` made.
# NIB_TOKENS (16384) are calibrated on, NIB_WINDOWS (3) of each document evaluated; hours on a CPU, minutes with NIB_DEVICE=cuda.
# ModelOpt's AWQ quantizes while it searches, which its kernels do on a GPU alone.
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
root=$(cd "$(dirname "$0")/../.." && pwd)
data=${NIB_ACCURACY:-}
[ -n "$data" ] || { echo "NIB_ACCURACY is not set: it is the directory that bench/accuracy.py prepare makes"; exit 77; }
shared=$BUILD/venv/bin/python
[ -x "$shared" ] || { echo "there is no $BUILD/venv: TORCH=1 make test makes it"; exit 77; }
device=${NIB_DEVICE:-cpu} tokens=${NIB_TOKENS:-16384}
work=$BUILD/campaign-peers
rm -rf "$work"
mkdir -p "$work"
export PYTHONPATH=$root/python NIB_LIBRARY=$BUILD/libnib.so
texts=("$data/anarchism.txt" "$data/developers-reference.txt" "$data/python-doc.txt")
environment() { # PACKAGE: its Python
    local own=$BUILD/venv-$1
    [ -x "$own/bin/python" ] || "$shared" -m venv "$own"
    "$own/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 >&2 &&
        "$own/bin/python" -m pip install -q --disable-pip-version-check "$2" >&2 || return 1
    echo "$own/bin/python"
}
rows=()
peers=(llm-compressor llm-compressor-gptq modelopt)
[ "$device" = cpu ] || peers+=(modelopt-awq)
for peer in "${peers[@]}"; do
    case $peer in llm*) python=$(environment llm-compressor llmcompressor) ;; *) python=$(environment modelopt "nvidia-modelopt[hf]") ;; esac ||
        { echo "the package of $peer cannot be had"; exit 77; }
    "$python" "$root/bench/accuracy_peers.py" "$peer" "$data/smollm2" "$work/$peer" --text "${texts[@]}" --tokens "$tokens" \
        --device "$device" >"$work/$peer.log" 2>&1 || { tail -5 "$work/$peer.log"; exit 1; }
    tail -1 "$work/$peer.log"
    case $peer in *-gptq) name="llm-compressor GPTQ" ;; modelopt) name=ModelOpt ;; *-awq) name="ModelOpt AWQ" ;; *) name=$peer ;; esac
    rows+=("$name=$work/$peer")
done
"$shared" -m nib.calibrate "$data/smollm2" --text "${texts[@]}" --tokens "$tokens" --device "$device" -q --out "$work/stats" \
    --hessians "$work/stats.hessians"
common=(-q --scheme nvfp4 --activations statistics --imatrix "$work/stats")
"$NIB" quantize "${common[@]}" --fold "$data/smollm2" "$work/ab"
"$NIB" quantize "${common[@]}" --fold --gptq "$data/smollm2" "$work/abc"
"$NIB" quantize "${common[@]}" --scale rtn --tensor-scale exact "$data/smollm2" "$work/rtn"
"$shared" "$root/bench/accuracy_directories.py" measure "$data" "$work/figures.json" "rtn=$work/rtn" "A+B=$work/ab" "A+B+C=$work/abc" \
    "${rows[@]}" --device "$device" --windows "${NIB_WINDOWS:-3}"
"$shared" "$root/bench/accuracy_directories.py" table "$work/figures.json"
"$shared" - "$work/figures.json" <<'PYTHON'
import json, sys
kl = {(row["method"], row["activations"]): row["kl"] for row in json.load(open(sys.argv[1]))["directories"]}
assert all(kl["A+B+C", bits] <= value for (method, bits), value in kl.items() if not method.startswith("A+")), kl
PYTHON
