"""python -m playground.emulator FILE.cu: the same as python -m cuda_emulator FILE.cu."""

import sys

from cuda_emulator.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
