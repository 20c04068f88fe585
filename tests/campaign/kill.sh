#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Fifty runs that are killed and resumed.
KILLS=50 exec bash tests/cli/kill.sh
