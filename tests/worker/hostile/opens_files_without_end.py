"""It opens as many files as there can be.

Verdict: error: OSError: .*Too many open files.* \\(the sandbox allows \\d+ open files\\)
"""

import os

opened = []
try:
    while True:
        opened.append(os.open("/dev/null", os.O_RDONLY))
finally:
    for descriptor in opened:
        os.close(descriptor)
