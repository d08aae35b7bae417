r"""It has every Python from now on run a text of its own.

Verdict: error: OSError: \[Errno 30\] Read-only file system|PermissionError:
"""

import sysconfig
from pathlib import Path

(Path(sysconfig.get_path("purelib")) / "sitecustomize.py").write_text("raise SystemExit")
