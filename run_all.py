# PYTHON_ARGCOMPLETE_OK
"""Judge and time every variant of every model: python run_all.py [--device ...] [--models a,b] [--json FILE] [--quick]."""

import sys

from playground.command.entry import enter

if __name__ == "__main__":
    sys.exit(enter("run_all"))
