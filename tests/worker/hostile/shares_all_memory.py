r"""Many processes take memory, each less than one may.

Verdict: error: (was ended: |crashed \(SIGKILL.*\) \()the sandbox allows .* of memory
Needs: a process of its own
"""

import os
import time

for _ in range(8):
    if os.fork() == 0:
        taken = bytearray(b"1") * (3 << 28)
        time.sleep(1e6)
time.sleep(1e6)
