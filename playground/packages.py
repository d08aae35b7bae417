"""Says which Python packages are missing, before anything imports them. Imports nothing but the standard library."""

import sys
from importlib.util import find_spec

NEEDED = ("torch", "numpy", "rich", "pygments", "psutil")


def missing():
    """One line that says which packages this Python lacks and how to get them; None where it has all."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if not absent:
        return None
    how = f"{sys.executable} -m pip install -r requirements.txt"
    return f"no {', '.join(absent)} in {sys.executable}: install with `{how}`"


def require():
    """End the program with status 2, as for everything that this machine cannot do, where a package is missing."""
    line = missing()
    if line:
        print(line, file=sys.stderr)
        sys.exit(2)
