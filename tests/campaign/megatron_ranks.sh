#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# megatron-core 0.19 with fp4 parameters and its distributed optimizer: tests/campaign/megatron_ranks.py. It wants Python
# 3.12 or later: $NIB_PYTHON312, or one of the machine's (Debian 13 and Ubuntu 24.04 have it, and pyenv). PyTorch and
# megatron-core come from PyPI into the build directory, 5 GB.
set -eu
: "${BUILD:?the build directory}"
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$BUILD/campaign-megatron
mkdir -p "$work"
own=$work/venv

recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

if [ ! -x "$own/bin/python" ]; then
    python=
    for one in "${NIB_PYTHON312:-}" python3 python3.14 python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[2-9].*/bin/python; do
        if recent "$one"; then python=$one && break; fi
    done
    [ -n "$python" ] || { echo "there is no Python 3.12 or later: NIB_PYTHON312 names one"; exit 77; }
    "$python" -m venv "$own"
fi
"$own/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy packaging ||
    { echo "PyTorch cannot be had"; exit 77; }
[ -d "$work/core" ] || "$own/bin/python" -m pip install -q --disable-pip-version-check --no-deps --target "$work/core" \
    'megatron-core==0.19.*' || { echo "megatron-core 0.19 cannot be had"; exit 77; }
"$own/bin/python" "$root/tests/campaign/megatron_ranks.py" "$BUILD/libnib.so" "$work/core" cpu
"$own/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || exit 0
for library in "$BUILD/cuda-stage/libnib_cuda.so" "$BUILD/cuda/libnib_cuda.so"; do # of the stage `cuda`, of -DNIB_CUDA=ON
    [ -e "$library" ] || continue
    NIB_CUDA_LIBRARY=$library exec "$own/bin/python" "$root/tests/campaign/megatron_ranks.py" "$BUILD/libnib.so" "$work/core" cuda
done
echo "there is a GPU, but no libnib_cuda in $BUILD"
exit 1
