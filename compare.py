"""Judge and time the variants of one model, in depth: python compare.py --model NAME_OR_PATH [--variant ...] [--set ...]."""

import sys

from playground import packages

if __name__ == "__main__":
    packages.require()
    from playground.command.main import compare

    sys.exit(compare())
