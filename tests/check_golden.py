#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the golden vectors of compressed-tensors and ModelOpt once more: every byte must be as in tests/golden.

    check_golden.py LIBNIB NIB [DIRECTORY]     DIRECTORY keeps the files; tests/golden replaces those of the repository

nib has no part in making them; `nib conform` compares. The packages may be newer than those that the files name.
"""
import os
import platform
import sys
import tempfile

from check_dialects import write
from make_vectors import read

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
FILES = {"compressed_tensors": "compressed-tensors", "modelopt": "modelopt"}
SHAPES = [(2, 80), (1, 272), (2, 41)]


def load(path):
    """What the file has, but for the versions of the packages."""
    metadata, tensors = read(path)
    return metadata.pop("about"), (metadata, tensors)


def main():
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = sys.argv[3] if len(sys.argv) > 3 else temporary
        for stem, dialect in FILES.items():
            path = os.path.join(GOLDEN, f"{stem}.safetensors")
            made_by, expected = load(path) if os.path.exists(path) else ("nothing", None)
            made = os.path.join(directory, f"{stem}.safetensors")
            try:
                about, count = write(made, dialect, SHAPES, SHAPES[:1])
            except ImportError as error:
                if os.environ.get("CI") == "true":
                    failed += 1
                else:
                    skipped += 1
                print(f"skipped {stem}: {error}")
                continue
            same = load(made)[1] == expected
            passed, failed = passed + same, failed + (not same)
            print(f"{stem}: {count} cases by {about}: {'as' if same else 'not as'} by {made_by}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    if platform.machine() != "x86_64":
        print("skipped: ModelOpt's scale of a tensor of zeros is a NaN with the sign that x86-64 gives it\n"
              "0 passed, 0 failed, 1 skipped")
        sys.exit(0)
    sys.exit(main())
