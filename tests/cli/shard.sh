#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The benchmark of sharded casts, small: it runs, and with 16x16 blocks reduces 4 bytes per 256 elements, no more, under
# every scale rule and whatever the number of ranks.

set -e
report=$("$BUILD/bench/shard" 2)
echo "$report"
test "$(echo "$report" | grep -c '^16x16.* 4\.0000 ')" = 6
