"""Judge and time every variant of every model: python run_all.py [--device ...] [--models a,b] [--json FILE] [--quick]."""

import sys

from playground import packages

if __name__ == "__main__":
    packages.require()
    from playground.command.main import run_all

    sys.exit(run_all())
