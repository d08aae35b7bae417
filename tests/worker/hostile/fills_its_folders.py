"""It leaves files beside its results until the disk is full.

Verdict: error: was ended: the sandbox allows .* files in the folders of its own
Needs: a process of its own
"""

import itertools
import os
from pathlib import Path

folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
for number in itertools.count():
    (folder / str(number)).write_bytes(bytes(1 << 14))
