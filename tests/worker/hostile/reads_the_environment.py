"""It reads the keys in the environment, its own and its parents'.

Verdict: error: RuntimeError: \\[\\]
"""

import contextlib
import os
from pathlib import Path

found = [name for name, value in os.environ.items() if "@KEY@" in value]
for environ in Path("/proc").glob("[0-9]*/environ"):
    with contextlib.suppress(OSError):
        found += [str(environ)] if b"@KEY@" in environ.read_bytes() else []
raise RuntimeError(found)
