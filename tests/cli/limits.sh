#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Memory and time follow the size of a file, not what it claims: tests/cli/limits.py.
set -u
NIB=${NIB:?the path of the tool}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
limit=48
nm "$NIB" 2>/dev/null | grep -qm1 __asan_init && limit=0 # a sanitizer has memory of its own
python3 tests/cli/limits.py "$NIB" "$work" $limit
