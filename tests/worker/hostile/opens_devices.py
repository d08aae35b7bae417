r"""It opens memory and disks as devices.

Verdict: error: RuntimeError: \[\]
"""

from pathlib import Path

usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
nodes = [path for path in Path("/dev").iterdir() if not path.is_symlink() and not path.is_dir()]
raise RuntimeError(sorted(path.name for path in nodes if path.name not in usual and not path.name.startswith("nvidia")))
