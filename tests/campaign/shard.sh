#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A thousand million master weights over 1, 2 and 4 ranks. They take 4 GB, the parameters of all ranks 2.5 GB more.

set -e
"$BUILD/bench/shard" 1000
