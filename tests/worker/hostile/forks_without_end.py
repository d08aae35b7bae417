r"""A fork bomb.

Verdict: error: (was ended: the sandbox allows \d+ processes and threads|BlockingIOError: .*the sandbox allows \d+ processes.*)
Needs: a process of its own
"""

import os

while True:
    os.fork()
