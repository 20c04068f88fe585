#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put the figures of `nib bench` and the counts of bench/instructions.py into docs/performance.md.

    performance.py docs/performance.md INSTRUCTIONS.json REPORT.json [MORE.json...]

The first report is shown whole; of the others, which are of other instruction sets or machines, what must hold and the operations.
Sections that no script measures, such as predictions that failed, stay as they are.
"""
import json
import re
import sys

INTRODUCTION = """# Performance

`make bench` makes this page. Figures are medians; the spread is the distance between the quartiles as a
share of the median. *Floor* is the share of the speed of a loop that reads and writes the same bytes as the operation
and does nothing else, over the same numbers with vectors as wide as the kernels', measured in turn with it: 1 is as fast
as memory allows. *Scalar* says how often faster than the scalar kernels the operation is. One thread is bound to one
processor.
"""


FLOORS = """## What must hold

From memory on one core, but for what is said to be in the cache. *Its plain loop* is the loop of *floor* above; for
dequantize it writes around the caches. A pair of operations is what the two take one after the other. Two threads are
compared with one, and with what two of the plain loops gain where that is less. AVX-512 is compared with AVX2 in the
cache, where it should be 1.5 times as fast, or reach 0.9 of the plain loop, if that is less: a decoder that AVX2 already
makes nearly as fast as the cache takes stores cannot gain so much. The kernels of the two run in many short processes in turn;
the figure is the median of the ratios.
"""


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def sections_of(text):
    """A page by its headings of the second order; what comes before the first of them, if anything does, is under ""."""
    parts = [part.strip("\n") for part in re.split(r"^(?=## )", text, flags=re.M)]
    return {part.partition("\n")[0] if part.startswith("## ") else "": part for part in parts if part}


def put(path, text):
    """Replace those sections of a page that the text has; one that the page lacks comes last."""
    with open(path, encoding="utf-8") as file:
        sections = sections_of(file.read())
    sections.update(sections_of(text))
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n\n".join(sections.values()) + "\n")


def result_row(r, shape=True):
    scalar = f"{r['scalar_ratio']:.1f}" if r["scalar_ratio"] else "-"
    row = [r["operation"], f"{r['gelem_s']:.2f}", f"{r['gb_s']:.1f}", f"{r['floor_share']:.2f}", scalar,
           f"{100 * r['spread']:.0f} %"]
    return row[:1] + [f"{r['rows']}x{r['cols']}"] + row[1:] if shape else row


def by_operation(results, key, cell):
    """Operations down, the key across."""
    keys = sorted({key(r) for r in results})
    rows = {}
    for r in results:
        rows.setdefault(r["operation"], {})[key(r)] = cell(r)
    return keys, [[name] + [cells.get(k, "") for k in keys] for name, cells in rows.items()]


def size_name(elements):
    size = elements * 4
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size //= 1024
    return f"{size} {unit}"


def described(report):
    return (f"{report['machine']}, {report['cpus']} processors; {report['isa']} kernels by {report['compiler']}; "
            f"nib {report['version']}, {report['threads']} thread(s)")


def floors_of(report):
    rows = [[f["what"], f"{f['value']:.3f}", f"{f['target']:.3f}", "holds" if f["holds"] else "**does not hold**"]
            for f in report["floors"]]
    return table(["speed", "is", "at least", ""], rows) + "\n"


def operations_of(report):
    """Every operation on its first shape."""
    first = {}
    for r in report["results"]:
        if r["part"] == "shape":
            first.setdefault(r["operation"], r)
    return first


def page(instructions, report, *others):
    results = report["results"]
    shapes = [r for r in results if r["part"] == "shape"]
    first = operations_of(report)
    yield INTRODUCTION
    yield f"Machine: {described(report)}.\n"
    yield FLOORS
    for one in (report, *others):
        yield f"### {one['isa']}, {one['machine']}\n"
        yield f"{described(one)}.\n"
        yield floors_of(one)
    yield "## Memory\n"
    yield table(["access", "GB/s"], [[name, f"{rate:.1f}"] for name, rate in report["memory_gb_s"].items()]) + "\n"
    yield "## Operations\n"
    yield table(["operation", "shape", "Gelem/s", "GB/s", "floor", "scalar", "spread"],
                [result_row(r) for r in first.values()]) + "\n"
    for one in others:
        yield f"With {one['isa']}, {one['machine']}:\n"
        yield table(["operation", "shape", "Gelem/s", "GB/s", "floor", "scalar", "spread"],
                    [result_row(r) for r in operations_of(one).values()]) + "\n"
    yield "## Shapes of models\n"
    rest = [r for r in shapes if r is not first[r["operation"]]]
    yield table(["operation", "of", "shape", "Gelem/s", "GB/s", "floor", "scalar", "spread"],
                [[row[0], r["model"], *row[1:]] for r in rest for row in [result_row(r)]]) + "\n"
    yield "## Sizes\n\nGelem/s by the bytes of an FP32 input of so many elements.\n"
    keys, rows = by_operation([r for r in results if r["part"] == "size"], lambda r: r["rows"] * r["cols"],
                              lambda r: f"{r['gelem_s']:.2f}")
    yield table(["operation"] + [size_name(k) for k in keys], rows) + "\n"
    yield "## Threads\n\nGelem/s.\n"
    keys, rows = by_operation([r for r in results if r["part"] == "threads"], lambda r: r["threads"],
                              lambda r: f"{r['gelem_s']:.2f}")
    yield table(["operation"] + [str(k) for k in keys], rows) + "\n"
    yield "![Throughput against size and threads](performance.svg)\n"
    if instructions:
        yield (f"## Instructions\n\nPer element, by {instructions['compiler']}: what a call takes on a larger matrix more "
               f"than on a smaller one ({instructions['shape']}), so that a call's own\ncost is not in it. For scalar and "
               "AVX2 valgrind's callgrind counts; for AVX-512, which it does not have, the processor stops after\neach "
               "instruction of the library, and `bench/instructions.py build/bench/count --where avx512 quantize.f32` finds them in the "
               "disassembly, by function\nand by loop. They show a regression without a quiet machine: `make test` compares "
               "them.\n")
        isas = list(instructions["counts"])
        names = list(instructions["counts"][isas[0]])
        yield table(["operation", *isas],
                    [[name] + [f"{instructions['counts'][isa][name]:.2f}" if name in instructions["counts"][isa]
                               else "" for isa in isas] for name in names]) + "\n"


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    documents = []
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as file:
            documents.append(json.load(file))
    put(sys.argv[1], "\n".join(page(*documents)))


if __name__ == "__main__":
    main()
