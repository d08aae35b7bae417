"""It reads what `~` is.

Verdict: error: FileNotFoundError: .*
"""

from pathlib import Path

raise RuntimeError([path.read_text() for path in (Path.home() / ".ssh").iterdir()])
