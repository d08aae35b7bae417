"""It fills the driver's memory with a reply.

Verdict: error: wrote something else than a reply .*
Needs: a process of its own
"""

import os
import sys

while True:
    os.write(int(sys.argv[2]), b"[" * (1 << 20))
