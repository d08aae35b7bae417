"""It says for itself that it was built, and is right.

Verdict: error: its reply to candidate.load lacks .*
Needs: a process of its own
"""

import os
import sys
import time

os.write(int(sys.argv[2]), b'{"result": {"verdict": "pass", "complaint": null}}\n')
time.sleep(1e6)
