#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measure the library and make docs/performance.md, docs/performance.svg and bench/instructions.json: make bench.
# NIB is the tool; NIB_BENCH_FLAGS go to `nib bench`; NIB_MODEL is a directory of `bench/model.py prepare`. It wants a quiet machine, 3 GiB of memory for the largest size, and no
# taskset: what one thread does is bound to one processor, what several do is not.
set -eu
cd "$(dirname "$0")/.."
nib=${NIB:-build/nib}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "measuring; this takes several minutes"
# shellcheck disable=SC2086
NIB_MAX_ISA=${NIB_MAX_ISA:-avx2} "$nib" bench --json --svg "$work/performance.svg" ${NIB_BENCH_FLAGS:-} >"$work/report.json"
more=
if grep -qw avx512dq /proc/cpuinfo; then
    # shellcheck disable=SC2086
    "$nib" bench --json ${NIB_BENCH_FLAGS:-} >"$work/wider.json"
    more=$work/wider.json
fi

# Instructions do not depend on what else the machine does.
if command -v valgrind >/dev/null 2>&1; then
    python3 bench/instructions.py "$(dirname "$nib")/bench/count" >"$work/instructions.json"
    cp "$work/instructions.json" bench/instructions.json # what the tests compare with
else
    echo "there is no valgrind: instructions are not counted" >&2
    echo '{}' >"$work/instructions.json"
fi

# With AVX-512 the kernels of AVX2 are shown whole and the others beside them.
cp docs/performance.md "$work/"
# shellcheck disable=SC2086
python3 bench/performance.py "$work/performance.md" "$work/instructions.json" "$work/report.json" $more
products=
for isa in avx2 avx512 amx; do
    NIB_MAX_ISA=$isa "$nib" bench --gemm --json --threads "$(nproc)" >"$work/gemm.$isa.json"
    grep -q "\"isa\": \"$isa\"" "$work/gemm.$isa.json" && products="$products $work/gemm.$isa.json"
done
# shellcheck disable=SC2086
[ -z "$products" ] || python3 bench/products.py "$work/performance.md" $products
if [ -n "${NIB_MODEL:-}" ]; then
    python3 bench/model.py measure "$NIB_MODEL" "$work/model.json"
    python3 bench/model.py table "$work/model.json" "$work/performance.md"
fi
mv "$work/performance.md" "$work/performance.svg" docs/
echo "wrote docs/performance.md and docs/performance.svg"
