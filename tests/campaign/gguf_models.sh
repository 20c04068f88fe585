#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# GGUF files of tiny models against llama.cpp's own converter, and in llama.cpp: tests/campaign/gguf_models.py. Needs
# build/venv (TORCH=1 make test); fetches the converter (the source package llama-cpp-python) and llama.cpp itself (the
# package xllamacpp) from PyPI, about 100 MB, into the build directory.
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
shared=$BUILD/venv
own=$BUILD/venv-gguf
work=$BUILD/campaign-gguf
[ -x "$shared/bin/python" ] || { echo "there is no $shared: TORCH=1 make test makes it"; exit 77; }
mkdir -p "$work"
if [ ! -x "$own/bin/python" ]; then
    "$shared/bin/python" -m venv "$own"
    "$shared/bin/python" -c 'import site; print(site.getsitepackages()[0])' \
        >"$("$own/bin/python" -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
fi
"$own/bin/python" -m pip install -q --disable-pip-version-check sentencepiece protobuf pyyaml xllamacpp ||
    { echo "sentencepiece or xllamacpp cannot be had"; exit 77; }
if [ ! -d "$work/llama.cpp" ]; then
    "$own/bin/python" - "$work" <<'PYTHON' || { echo "the source of llama-cpp-python cannot be had"; exit 77; }
import json, os, sys, tarfile, urllib.parse, urllib.request
page = "https://pypi.org/pypi/llama-cpp-python/json"
files = json.load(urllib.request.urlopen(page, timeout=60))["urls"]
source = next(f["url"] for f in files if f["packagetype"] == "sdist")
path = os.path.join(sys.argv[1], "source.tar.gz")
urllib.request.urlretrieve(urllib.parse.urljoin(page, source), path)
with tarfile.open(path) as tar:
    root = tar.getnames()[0].split("/")[0]
    wanted = root + "/vendor/llama.cpp/"
    tar.extractall(sys.argv[1], [m for m in tar.getmembers() if m.name.startswith(wanted)], filter="data")
os.rename(os.path.join(sys.argv[1], root, "vendor", "llama.cpp"), os.path.join(sys.argv[1], "llama.cpp"))
PYTHON
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} "$own/bin/python" tests/campaign/gguf_models.py "$NIB" "$work/llama.cpp" "$work"
