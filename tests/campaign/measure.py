#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""measure.py COMMAND...: run it, then print a line with its seconds and its largest resident memory in MB."""
import os
import sys
import time

start = time.monotonic()
pid = os.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(f"{time.monotonic() - start:.2f} {usage.ru_maxrss / 1024:.0f}")
sys.exit(os.waitstatus_to_exitcode(status))
