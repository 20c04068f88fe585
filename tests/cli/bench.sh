#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib bench: its report parses, its plot is well-formed, wrong usage is refused. No figure is judged.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
CC=${CC:-cc}

run 0 "$NIB" bench --list
empty err
cp "$work/out" "$work/names"
has out quantize.f32
has out dequantize.bf16

run 0 "$NIB" bench --quick --json --svg "$work/plot.svg"
empty err
python3 - "$work/out" "$work/plot.svg" "$work/names" <<'END' || fail "the report or the plot is not as it should be"
import json, sys
import xml.etree.ElementTree as tree
report = json.load(open(sys.argv[1]))
names = open(sys.argv[3]).read().split()
for key in ("version", "machine", "compiler", "isa", "cpus", "threads", "memory_gb_s", "floors", "results"):
    assert key in report, key
assert set(report["memory_gb_s"]) == {"read", "write", "non-temporal write", "copy"}
assert all(rate > 0 for rate in report["memory_gb_s"].values())
wider = [f for f in report["floors"] if "of AVX2" in f["what"]]
assert len(wider) == (13 if report["isa"] in ("avx512", "amx") else 0) and all(f["target"] <= 1.5 for f in wider), wider
assert len(report["floors"]) >= 11 and all(f["value"] > 0 and f["target"] > 0 for f in report["floors"])
by_shape = [r for r in report["results"] if r["part"] == "shape"]
assert [r["operation"] for r in by_shape] == names, "every operation, in order"
assert {r["part"] for r in report["results"]} == {"shape", "size", "threads"}
def traffic(name):
    """Bytes that are read and written for an element: its own, twice where the amax is looked for, codes and scales."""
    kind, dtype = name.split(".")
    coded = {"amax": 0, "float8": 1, "mxfp8": 33 / 32, "mxfp4": 17 / 32}.get(kind, 9 / 16) * (1 + ("both" in kind))
    return (4 if dtype == "f32" else 2) * (1 + (kind in ("whole", "row-scaled"))) + coded
for r in report["results"]:
    assert r["gelem_s"] > 0 and r["gb_s"] > 0 and r["floor_share"] > 0 and 0 < r["seconds"] < 60, r
    assert r["scalar_ratio"] > 0 and r["rows"] > 0 and r["cols"] > 0 and r["threads"] >= 1, r
    assert abs(r["gelem_s"] * r["seconds"] / (r["rows"] * r["cols"] * 1e-9) - 1) < 1e-3, r
    assert abs(r["gb_s"] / r["gelem_s"] / traffic(r["operation"]) - 1) < 1e-3, r
    assert r["threads"] > 1 or r["floor_share"] < 1000, r  # threads may wait long for a processor
names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
assert report["machine"] == (names[0] if names else "unknown"), report["machine"]
svg = tree.parse(sys.argv[2]).getroot()
assert svg.tag.endswith("svg"), svg.tag
plots = [[r["operation"] for r in report["results"] if r["part"] == part] for part in ("size", "threads")]
drawn = [len(line.get("points").split()) for line in svg.findall("{http://www.w3.org/2000/svg}polyline")]
assert drawn == [plot.count(name) for plot in plots for name in dict.fromkeys(plot)], "a line for each operation"
END

run 0 "$NIB" bench --quick --no-scalar --shape 64x256 quantize.bf16
empty err
has out "memory non-temporal write"
[ "$(grep -c '^quantize.bf16  *64x256 ' "$work/out")" = 1 ] || fail "one line for one operation"
[ "$(wc -l <"$work/out")" = 6 ] || fail "four streams, a heading and a line"

run 0 "$NIB" bench --gemm --quick --json --threads 2
empty err
python3 - "$work/out" <<'END' || fail "the report of products is not as it should be"
import json, sys
report = json.load(open(sys.argv[1]))
assert report["read_gb_s"] > 0 and report["read_all_gb_s"] > 0 and report["fma_gflop_s"] > 0
found = [(r["product"], r["m"], r["threads"]) for r in report["gemm"]]
assert found == [(p, m, t) for t in (1, 2) for p in ("W4A4", "W4A16") for m in (1, 4, 16, 64, 512)], found
for r in report["gemm"]:  # a weight of 256 x 1024, with a scale for 16 codes
    assert abs(r["gflop_s"] * r["seconds"] / (2e-9 * r["m"] * 256 * 1024) - 1) < 1e-3, r
    assert abs(r["weights_gb_s"] * r["seconds"] / (1e-9 * 9 / 16 * 256 * 1024) - 1) < 1e-3, r
assert len(report["floors"]) == 5 and all(0 < f["target"] < f["goal"] and f["value"] > 0 for f in report["floors"])
END
run 0 "$NIB" bench --gemm --quick --shape 64x256 --size-limit 65536
has out "FP32 FMA of one thread"
has out "W4A4, M = 16: of M = 512"

# The processors are those that it was given, before it binds itself to one of them.
if command -v taskset >/dev/null; then
    run 0 taskset -c "$(taskset -cp $$ | sed 's/.*: *//; s/[-,].*//')" "$NIB" bench --quick --no-scalar --json quantize.f32
    grep -q '"cpus": 1,' "$work/out" || fail "one processor"
    ! grep -q '"threads": 2' "$work/out" || fail "no more threads than processors"
fi

# Where there is no memory, sizes are left out.
echo 'MemAvailable:       0 kB' >"$work/meminfo"
if unshare -m mount --bind "$work/meminfo" /proc/meminfo 2>/dev/null; then
    run 0 unshare -m bash -c 'mount --bind "$1" /proc/meminfo && exec "$0" bench --quick --no-scalar quantize.bf16' "$NIB" "$work/meminfo"
    has err "nib: bench: quantize.bf16 of 16x16 is left out: it takes 0 MB of memory, and 0 MB are free"
    lines 0 '^quantize.bf16 +16x'
fi

# A GPU that is the host, by a clock that always says a nanosecond: the copy moves 4 x 2 x 256 KiB in it, and an operation's
# share is its bytes by those.
cat >"$work/gpu.c" <<'C'
#include <stdio.h>
#include "nib.h"
nib_status nib_cuda_count(int *count) { return *count = 1, NIB_OK; }
nib_status nib_cuda_describe(int ordinal, char *text, size_t bytes) { return snprintf(text, bytes, "GPU %d", ordinal), NIB_OK; }
nib_status nib_cuda_create_stream(int ordinal, nib_device **out) { return nib_host_create(1, out); }
nib_status nib_cuda_synchronize(nib_device *device) { return NIB_OK; }
nib_status nib_cuda_measure(nib_device *device, nib_status (*enqueue)(void *context), void *context, int repetitions, double *seconds)
{
    return *seconds = 1e-9, enqueue(context);
}
C
"$CC" -shared -fPIC -Iinclude -o "$work/gpu.so" "$work/gpu.c" || exit 1
run 0 env NIB_CUDA_LIBRARY="$work/gpu.so" "$NIB" bench --device cuda --quick --json
empty err
python3 - "$work/out" "$work/gpu-names" <<'END' || fail "the report of a GPU is not as it should be"
import json, sys
report = json.load(open(sys.argv[1]))
names = [r["operation"] for r in report["results"]]
open(sys.argv[2], "w").write("\n".join(names) + "\n")
assert report["device"] == "GPU 0" and len(names) == len(set(names)) == 22, names
assert abs(report["copy_bytes_s"] / (8 * 256 * 1024 * 1e9) - 1) < 1e-9, report["copy_bytes_s"]
for r in report["results"]:
    kind, dtype = r["operation"].split(".")
    plain, coded = 4 if dtype == "f32" else 2, 9 / 16 * (1 + kind.startswith("both"))
    passes = {"fake": 2, "fake-whole": 3}.get(kind, 2 if "whole" in kind else 1)
    wanted = plain * passes + (0 if kind.startswith(("amax", "fake")) else coded)
    assert (r["rows"], r["cols"], r["bytes"]) == (256, 512, wanted * 256 * 512), r
    assert abs(r["share"] / (r["bytes"] / (8 * 256 * 1024)) - 1) < 1e-9 and r["seconds"] == 1e-9, r
END
run 0 env NIB_CUDA_LIBRARY="$work/gpu.so" "$NIB" bench --device cuda --quick rows.f sweep
has out "GPU 0; a copy of 1 GiB moves 2097152 GB/s"
[ "$(sed 1,2d "$work/out" | cut -d' ' -f1 | tr '\n' ' ')" = "sweep.bf16 rows.f32 rows.f16 " ] || fail "the operations of two names"
for name in amax.bf16 "$(tail -n 1 "$work/gpu-names")"; do # the first one, and the last one
    run 0 env NIB_CUDA_LIBRARY="$work/gpu.so" "$NIB" bench --device cuda --quick "$name"
    has out "$name "
done
for names in no-such-operation "sweep no-such-operation"; do
    run 2 env NIB_CUDA_LIBRARY="$work/gpu.so" "$NIB" bench --device cuda --quick $names
    empty out
    has err "nib: bench: no operation of a GPU begins with 'no-such-operation'"
done

for names in no-such-operation "no-such-operation amax" "amax no-such-operation" "--list amax no-such-operation"; do
    run 2 "$NIB" bench --quick $names
    empty out
    has err "nib: bench: no operation begins with 'no-such-operation'; see nib bench --list"
done
run 0 "$NIB" bench --device host --list amax # the host by its name is no GPU, which lists nothing
has out amax.f32
run 2 "$NIB" bench --shape 17x16
has err "nib: bench: --shape takes ROWSxCOLS"
run 2 "$NIB" bench --shape 16
run 2 "$NIB" bench --shape 1048576x1048576
has err "is beyond --size-limit"
run 2 "$NIB" bench --threads 0
run 2 "$NIB" bench --size-limit 1

# What would be without effect is rejected.
run 2 "$NIB" bench --gemm --quick --svg "$work/products.svg"
empty out
has err "nib: bench: --svg does not go with --gemm"
run 2 "$NIB" bench --gemm --quick quantize
has err "nib: bench: a NAME does not go with --gemm"
for option in --floors --no-scalar --list; do
    run 2 "$NIB" bench --gemm --quick "$option"
    empty out
    has err "nib: bench: $option does not go with --gemm"
done
for option in "--svg $work/gpu.svg" --floors --no-scalar --list --gemm "--threads 2" "--size-limit 65536" "--shape 16x16"; do
    # shellcheck disable=SC2086
    run 2 "$NIB" bench --device cuda:1 --quick $option
    empty out
    has err "nib: bench: ${option%% *} does not go with --device cuda:1"
done
[ ! -e "$work/products.svg" ] && [ ! -e "$work/gpu.svg" ] || fail "a plot of nothing"

# Whether a plot can be written is known before anything is measured, and one that cannot leaves what there was.
plot=(bench --quick --no-scalar --shape 16x16 quantize.f32 --svg)
run 2 "$NIB" "${plot[@]}" "$work/no/such/folder.svg"
empty out
has err "nib: bench: cannot write '$work/no/such/folder.svg': No such file or directory"
run 2 "$NIB" "${plot[@]}" ''
empty out
has err "nib: bench: cannot write '': No such file or directory"
run 2 "$NIB" "${plot[@]}" "$work"
empty out
has err "Is a directory"
mkfifo "$work/pipe.svg"
run 2 timeout 60 "$NIB" "${plot[@]}" "$work/pipe.svg"
empty out
has err "pipe.svg': it is not a regular file"
[ -p "$work/pipe.svg" ] || fail "a pipe was replaced"
echo precious >"$work/full.svg"
run 2 bash -c 'ulimit -f 1; exec "$0" "$@"' "$NIB" "${plot[@]}" "$work/full.svg"
has err "full.svg': File too large"
[ "$(cat "$work/full.svg")" = precious ] || fail "a plot is gone for one that could not be written"
[ "$(find "$work" -name '*.tmp-*')" = "" ] || fail "a part of a plot is left"

[ $failures = 0 ]
