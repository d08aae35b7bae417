r"""It fills /tmp.

Verdict: error: OSError: \[Errno 28\] No space left on device \(the sandbox allows .* in /tmp and in /dev/shm\)
"""

from pathlib import Path

try:
    with Path("/tmp/full").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 24)) == 1 << 24:
            pass
        file.write(bytes(1 << 24))
finally:
    Path("/tmp/full").unlink()
