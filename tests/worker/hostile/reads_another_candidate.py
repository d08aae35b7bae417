"""It reads the file beside its own.

Verdict: error: FileNotFoundError: .*
"""

from pathlib import Path

raise RuntimeError(Path("@NEIGHBOUR@").read_text())
