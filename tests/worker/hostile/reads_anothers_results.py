"""It reads what another candidate has answered.

Verdict: error: FileNotFoundError: .*
"""

from pathlib import Path

raise RuntimeError(Path("@RESULTS@").read_bytes())
