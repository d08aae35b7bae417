"""It writes to the folder in which another candidate's library is built.

Verdict: error: (FileNotFoundError|OSError): .*
"""

from pathlib import Path

(Path("@BUILDS@") / "honest.so").write_bytes(b"poison")
