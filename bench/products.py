#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put the section on products into docs/performance.md, from the JSON of `nib bench --gemm`, a machine or instruction set each.

    products.py docs/performance.md REPORT.json [MORE.json...]
"""
import json
import sys

from performance import put, table

INTRODUCTION = """## Products

An NVFP4 weight by NVFP4 activations (W4A4) and by plain ones (W4A16), packing and unpacking included, from weights that no
cache holds (`nib bench --gemm`). One thread by its processor time, several by the clock. GB/s are those of packed weights. Ratios are
against the FP32 FMA peak of one thread and the read bandwidth of the same run.
"""


def section(reports):
    yield INTRODUCTION
    for r in reports:
        yield (f"### Products by {r['isa']}, {r['machine']}\n\n{r['cpus']} processors, {r['compiler']}; FMA peak {r['fma_gflop_s']:.0f} GFLOP/s; "
               f"read {r['read_gb_s']:.1f} GB/s, all threads {r['read_all_gb_s']:.1f} GB/s.\n")
        yield table(["bar", "is", "at least", "goal", ""],
                    [[f["what"], f"{f['value']:.2f}", f"{f['target']:.2f}", f"{f['goal']:.2f}",
                      "**does not hold**" if not f["holds"] else "reaches the goal" if f["value"] >= f["goal"] else
                      f"holds; {f['value'] / f['goal']:.2f} of the goal"] for f in r["floors"]]) + "\n"
        rows = {}
        for g in r["gemm"]:
            rows.setdefault((g["product"], g["threads"]), []).append(
                f"{g['weights_gb_s']:.1f} GB/s" if g["m"] == 1 else f"{g['gflop_s']:.0f}")
        yield table(["product", "threads", "M = 1"] + [f"M = {m}" for m in sorted({g["m"] for g in r["gemm"]})[1:]],
                    [[name, str(threads), *cells] for (name, threads), cells in rows.items()]) + "\n\nGFLOP/s but for M = 1.\n"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    reports = []
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as file:
            reports.append(json.load(file))
    put(sys.argv[1], "\n".join(section(reports)))


if __name__ == "__main__":
    main()
