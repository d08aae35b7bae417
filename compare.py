# PYTHON_ARGCOMPLETE_OK
"""Judge and time the variants of one model, in depth: python compare.py --model NAME_OR_PATH [--variant ...] [--set ...]."""

import sys

from playground.command.entry import enter

if __name__ == "__main__":
    sys.exit(enter("compare"))
