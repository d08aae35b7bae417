"""Where Nsight Compute is, how it is called, and what its complaints mean."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playground import catalog
from playground.judge.work import Text
from playground.machine.requirements import Missing
from playground.worker.process import kill_family

from . import metrics, reading, target

PROGRAM = "ncu"
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda*/nsight-compute*")
NOT_PERMITTED = "ERR_NVGPUCTRPERM"
PERMISSION = (
    f"Nsight Compute may not read the GPU's counters ({NOT_PERMITTED}): run it as root, or start the container with "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
    f"(https://developer.nvidia.com/{NOT_PERMITTED})"
)


class ProfilerError(Exception):
    """Nothing was measured. `is_machine` says whether the machine is the reason, and not the variant."""

    def __init__(self, text, is_machine=False):
        super().__init__(text)
        self.is_machine = is_machine


def find():
    """The program's path: on PATH, in the toolkit that CUDA_HOME names, or where NVIDIA installs it; None without one."""
    if found := shutil.which(PROGRAM):
        return found
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = [path for pattern in FOLDERS for path in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)]
    folders = [*([Path(home) / "bin"] if home else []), *usual]
    return next((path for folder in folders if (path := shutil.which(PROGRAM, path=str(folder)))), None)


def missing():
    """What keeps this machine from profiling, as a playground.machine.requirements.Missing; None if nothing does."""
    if find():
        return None
    remedy = (
        "install Nsight Compute (https://developer.nvidia.com/nsight-compute; with NVIDIA's package repository: "
        "apt install cuda-nsight-compute-13-0, or another release's) and put the folder that holds ncu on PATH"
    )
    return Missing(f"no Nsight Compute ({PROGRAM}) on this machine", remedy)


def profile(model, variant, settings, time_limit):
    """[kernel figures] of one forward pass of the variant, as playground.nvidia.profiler.reading.kernels gives them.

    `settings` change the model's constants; each of the two processes may take `time_limit` seconds. Raises ProfilerError.
    """
    names = _kernel_names(variant)
    if not names:
        raise ProfilerError(f"{variant.name}: there is no CUDA kernel in its text, so there is nothing to profile")
    passes = [sys.executable, *target.arguments_for(model, variant, settings)]
    _run(passes, variant, time_limit)  # builds, so that under ncu nothing but the forward pass is left to do
    return reading.kernels(_launches(passes, names, variant, time_limit))


def command(program, names, log, passes, wanted=metrics.ALL):
    """The command line, a list, that has Nsight Compute measure the kernels `names` of the command `passes`."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(wanted)]
    options += ["--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(sorted(names))})$"]
    options += ["--clock-control", "none", "--target-processes", "all", "--log-file", str(log)]
    return [program, *options, *passes]


def _kernel_names(variant):
    texts = Text(variant.path)
    return texts.cuda_kernels | texts.triton_kernels


def _launches(passes, names, variant, time_limit):
    """What was measured, launch by launch. Metrics that this GPU does not have are left out in a second attempt."""
    wanted = metrics.ALL
    with tempfile.TemporaryDirectory(prefix="playground-") as folder:
        for _ in range(2):
            log = Path(folder) / "ncu.csv"
            log.unlink(missing_ok=True)
            done = _run(command(find(), names, log, passes, wanted), variant, time_limit, check=False)
            said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            said += f"\n{done.stdout}\n{done.stderr}" if not _has_rows(said) else ""
            if _has_rows(said):
                return reading.launches(said)
            unknown = _unknown(said, wanted)
            if not unknown:
                break
            wanted = tuple(metric for metric in wanted if metric not in unknown)
    raise _complaint(said, done, names, variant)


def _has_rows(text):
    """Whether the text holds a table with at least one launch."""
    try:
        return bool(reading.launches(text))
    except reading.NoTable:
        return False


def _unknown(said, wanted):
    """The metrics that an error names."""
    errors = "\n".join(line for line in said.splitlines() if line.startswith(("==ERROR==", "==WARNING==")))
    return {metric for metric in wanted if re.search(rf"{re.escape(metric)}(?![\w.])", errors)}


def _complaint(said, done, names, variant):
    if NOT_PERMITTED in said:
        return ProfilerError(PERMISSION, is_machine=True)
    if "No kernels were profiled" in said and not done.returncode:
        return ProfilerError(f"{variant.name}: its forward pass launched none of its kernels ({', '.join(sorted(names))})")
    errors = [line.removeprefix("==ERROR==").strip() for line in said.splitlines() if line.startswith("==ERROR==")]
    last = errors[-1] if errors else (said.strip().splitlines() or ["it printed nothing"])[-1]
    return ProfilerError(f"Nsight Compute measured nothing (exit status {done.returncode}): {last}", is_machine=True)


def _run(command, variant, time_limit, check=True):
    """The CompletedProcess of a command, which takes `time_limit` seconds at most. Leaves nothing running that it started.

    Raises ProfilerError where it does not end in time and, with `check`, where it fails.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=catalog.ROOT, **pipes, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            complaint = f"{variant.name}: no end after {time_limit:g} s; --time-limit sets how long it may take"
            raise ProfilerError(complaint) from None
        finally:
            kill_family(process)  # of ncu, above all the Python that it profiles
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check and done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ProfilerError(f"{variant.name}: its forward pass fails: {last}")
    return done
