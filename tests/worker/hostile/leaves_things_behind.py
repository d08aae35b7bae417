"""It prepares what the next candidate would load: sitecustomize, LD_PRELOAD, PYTHONPATH, a build.

Verdict: error: RuntimeError: all is written
"""

import os
import site
from pathlib import Path

RAISES = "raise SystemExit('poisoned')"
user = Path(site.getusersitepackages())
user.mkdir(parents=True)
for folder in (user, Path("/tmp"), Path(os.environ["TORCH_EXTENSIONS_DIR"])):
    (folder / "sitecustomize.py").write_text(RAISES)
    (folder / "torch.py").write_text(RAISES)
os.environ.update(LD_PRELOAD="/tmp/mine.so", PYTHONPATH="/tmp", PYTHONSTARTUP="/tmp/torch.py")
library = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "honest" / "honest.so"
library.parent.mkdir()
library.write_bytes(b"poison")
raise RuntimeError("all is written")
