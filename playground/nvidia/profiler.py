"""Nsight Compute on a variant: the few figures that say what bounds its kernels, from one forward pass on a GPU."""

import re
import tempfile

from playground.catalog import Impossible
from playground.judge.text import Text
from playground.nvidia import metrics
from playground.nvidia.tool import Program, Run

PROGRAM = Program(
    "ncu",
    "Nsight Compute (ncu)",
    "install Nsight Compute (https://developer.nvidia.com/nsight-compute; with NVIDIA's package repository: "
    "apt install cuda-nsight-compute-13-0, or another release's) and put the folder that holds ncu on PATH",
    ("usr/local/cuda/bin", "opt/nvidia/nsight-compute/*", "usr/local/cuda*/nsight-compute*"),
)
NOT_PERMITTED = "ERR_NVGPUCTRPERM"
PERMISSION = (
    f"Nsight Compute may not read the GPU's counters ({NOT_PERMITTED}): run it as root, or start the container with "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
    f"(https://developer.nvidia.com/{NOT_PERMITTED})"
)
SEED = 0

missing = PROGRAM.missing


class ProfilerError(Exception):
    """Nothing was measured, because of the variant."""


def profile(model, variant, settings, time_limit):
    """Return [kernel figures] of one forward pass of the variant, as metrics.kernels gives them.

    `settings` change the model's constants; each of the processes may take `time_limit` seconds. Raises ProfilerError, and
    Impossible where the machine is the reason.
    """
    text = Text(variant.path)
    names = text.cuda_kernels | text.triton_kernels
    if not names:
        raise ProfilerError(f"{variant.name}: there is no CUDA kernel in its text, so there is nothing to profile")
    load = {"problem": str(model.path), "variant": str(variant.path), "settings": settings, "place": "cuda"}
    request = {"load": load | {"weights": None, "seed": SEED}, "inputs": None, "tool": None, "limit": time_limit}
    with tempfile.TemporaryDirectory(prefix="playground-") as folder:
        run = _run("no tool", request, folder, variant)  # it builds: under ncu nothing but the forward pass is left to do
        reply = run.reply()
        if reply is None or reply["error"]:
            raise ProfilerError(f"{variant.name}: its forward pass fails: {reply['error'] if reply else run.last_words()}")
        return metrics.kernels(_launches(request, folder, names, variant))


def command(program, names, wanted=metrics.ALL):
    """Return the command line, a list, that has Nsight Compute measure the kernels `names` of the command put behind it."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(wanted)]
    options += ["--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(sorted(names))})$"]
    options += ["--clock-control", "none", "--target-processes", "all"]
    return [program, *options]


def _launches(request, folder, names, variant):
    """What was measured, launch by launch. Metrics that this GPU does not have are left out in a second attempt."""
    wanted = metrics.ALL
    for _ in range(2):
        run = _run(PROGRAM.name, request, folder, variant, command(PROGRAM.find(), names, wanted))
        if launches := metrics.launches(run.log()):
            return launches
        complaints = "\n".join(re.findall("^==(?:ERROR|WARNING)==.*", run.said(), re.MULTILINE))
        known = tuple(metric for metric in wanted if not re.search(rf"{re.escape(metric)}(?![\w.])", complaints))
        if known == wanted:
            break
        wanted = known
    if NOT_PERMITTED in run.said():
        raise Impossible(PERMISSION)
    if "No kernels were profiled" in run.said() and run.exit_status == 0:
        raise ProfilerError(f"{variant.name}: its forward pass launched none of its kernels ({', '.join(sorted(names))})")
    raise Impossible(f"Nsight Compute measured nothing (exit status {run.exit_status}): {run.last_words()}")


def _run(name, request, folder, variant, under=()):
    """The Run, which has ended. Raises ProfilerError where it does not end in time."""
    with Run(name, request, folder, under) as run:
        run.wait()
    if run.timed_out:
        raise ProfilerError(f"{variant.name}: no end after {request['limit']:g} s; --time-limit sets how long it may take")
    return run
