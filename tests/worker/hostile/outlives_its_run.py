r"""It leaves a daemon behind.

Verdict: error: ended the process \(exit status 0\)
Needs: a process of its own
"""

import os
import subprocess
import sys

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1e6)", "@MARK@"])
os._exit(0)
