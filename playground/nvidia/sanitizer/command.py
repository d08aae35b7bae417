"""Where compute-sanitizer is, and the command line of each of its tools.

The options are those of NVIDIA's manual (https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer), since its release 2023.
"""

import os
import shutil
from pathlib import Path

from playground.machine.requirements import Missing

PROGRAM = "compute-sanitizer"
PADDING = 4096  # bytes behind each allocation in which every access is out of bounds: next to it may lie another one
UNFILTERED_LIMIT = 10_000  # reports; the kernels of others count among them

# Tool -> its own options.
TOOLS = {
    "memcheck": ("--padding", str(PADDING), "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": ("--print-limit", str(UNFILTERED_LIMIT)),
    "synccheck": (),
}
# initcheck must see every kernel: a tensor that a PyTorch kernel wrote would count as never written.
FILTERED = ("memcheck", "racecheck", "synccheck")
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or all tensors would lie in one large allocation, which has no bounds


def find():
    """The program's path: on PATH, or in the toolkit that CUDA_HOME names; None where there is none."""
    if found := shutil.which(PROGRAM):
        return found
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [Path(home) / "bin", Path(home) / PROGRAM] if home else []
    return next((path for folder in folders if (path := shutil.which(PROGRAM, path=str(folder)))), None)


def missing():
    """What keeps this machine from sanitizing, as a playground.machine.requirements.Missing; None if nothing does."""
    if find():
        return None
    remedy = (
        "it is part of the CUDA toolkit (https://developer.nvidia.com/cuda-downloads; conda install -c nvidia "
        "cuda-sanitizer-api): put the folder that holds it on PATH, or name the toolkit in CUDA_HOME"
    )
    return Missing(f"no {PROGRAM} on this machine", remedy)


def command(program, tool, kernels, log, target):
    """The command line, a list, that runs the command `target` under a tool, whose text goes to the file `log`.

    `kernels` are names of __global__ functions: only kernels whose mangled names hold one of them are looked at, by the tools
    that can leave the others out.
    """
    # A kernel ends at its first mistake, but the program goes on, so that the next kernel is looked at too.
    options = ["--tool", tool, *TOOLS[tool], "--destroy-on-device-error", "kernel"]
    options += ["--target-processes", "application-only"]  # not compilers
    options += ["--launch-timeout", "120"]  # seconds until the target is there; importing torch takes its time
    options += ["--show-backtrace", "device", "--strip-paths", "no", "--log-file", str(log)]
    if tool in FILTERED:
        options += [each for name in sorted(kernels) for each in ("--kernel-name", f"kns={name}")]
    return [program, *options, *target]
