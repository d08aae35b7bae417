"""It reads a key in the home folder of who judges it.

Verdict: error: FileNotFoundError: .*No such file or directory
"""

from pathlib import Path

raise RuntimeError(Path("@SECRET@").read_text())
