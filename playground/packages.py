"""Says whether this Python will do and which packages it lacks; an older Python can read it, too."""

import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = (3, 11)
NEEDED = ("torch", "numpy", "rich", "pygments", "psutil", "filelock")


def missing() -> str | None:
    """Return one line that says which packages this Python lacks, or that it is too old, and what to do; or None."""
    if sys.version_info < OLDEST:
        found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
        how = "make a virtual environment with a newer one, such as `python3.12 -m venv .venv`"
        return f"{sys.executable} is Python {found}, and this needs {needed} or newer: {how}"
    absent = [name for name in NEEDED if find_spec(name) is None]
    if not absent:
        return None
    what = "-r requirements.txt" if (Path(__file__).parents[1] / "requirements.txt").is_file() else " ".join(absent)
    how = f"{sys.executable} -m pip install {what}"
    return f"no {', '.join(absent)} in {sys.executable}: install with `{how}`"


def require() -> None:
    """End the program with status 2, as for everything that this machine cannot do, where something is missing."""
    line = missing()
    if line:
        print(line, file=sys.stderr)
        sys.exit(2)
