"""It stops another candidate.

Verdict: error: ProcessLookupError: .*
"""

import os
import signal

os.kill(int("@SIBLING@"), signal.SIGSTOP)
