#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Memory and time follow the size of a file, not what it claims: tests/cli/limits.py; and the number of what is in it: counts.py.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
limit=48
nm "$NIB" 2>/dev/null | grep -qm1 __asan_init && limit=0 # a sanitizer has memory of its own
python3 tests/cli/limits.py "$NIB" "$work" $limit
limits=$?
python3 tests/cli/counts.py "$NIB" "$work" && [ $limits = 0 ]
