"""It overwrites a file of who judges it.

Verdict: error: (FileNotFoundError|OSError|RuntimeError: written)
"""

from pathlib import Path

Path("@OUTSIDE@").write_text("overwritten")
raise RuntimeError("written")  # to what is called so in its own /tmp
