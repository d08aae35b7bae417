"""It ends all that it can.

Verdict: error: (RuntimeError: nobody is left|ProcessLookupError: )
"""

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(-1, signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
raise RuntimeError("nobody is left")
