r"""It leaves a file of 10 GB beside its results.

Verdict: error: OSError: \[Errno 27\] File too large.* \(the sandbox allows files of up to .*\)
"""

import os
from pathlib import Path

folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
with (folder / "large").open("wb") as file:
    file.truncate(10 << 30)
