"""It ends the process that judges it.

Verdict: error: ProcessLookupError: .*
"""

import os
import signal

os.kill(int("@DRIVER@"), signal.SIGKILL)
