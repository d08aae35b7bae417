"""What a result was measured on: a description to store beside it, without the names and paths of the machine."""

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import cuda_emulator
from playground.run_record import CpuDetails, Environment

from . import requirements

PROJECT = Path(__file__).resolve().parents[2]


def describe() -> Environment:
    """Return the Environment of a report, None for what the machine lacks. Initialises CUDA where there is a GPU."""
    commit, dirty = _git_state()
    import torch

    gpus = _gpus()
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git={"commit": commit, "dirty": dirty},
        os=_os_name(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=_cudnn_version(),
        nvcc=_nvcc_release(),
        driver=requirements.ask_gpu("driver_version"),
        gpu=gpus[0]["name"] if gpus else None,
        gpus=gpus,
        cpu=cpu_name(),
        cpu_details=CpuDetails(
            cores=psutil.cpu_count(logical=False),
            logical_cores=os.cpu_count(),
            usable_logical_cores=len(os.sched_getaffinity(0)),
            capability=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
        ),
        memory_mib=psutil.virtual_memory().total // 2**20,
    )


def _gpus() -> list[dict[str, Any]]:
    import torch

    gpus = []
    for found in map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if torch.cuda.is_available() else 0)):
        sizes = {"memory_mib": found.total_memory // 2**20, "multiprocessors": found.multi_processor_count}
        gpus.append({"name": found.name, "compute_capability": f"{found.major}.{found.minor}"} | sizes)
    return gpus


def _cudnn_version() -> str | None:
    """torch gives major * 10000 + minor * 100 + patch (before cuDNN 9: major * 1000)."""
    import torch

    if not (number := torch.backends.cudnn.version()):
        return None
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _nvcc_release() -> str | None:
    home = requirements.named_home()
    toolkit = requirements.toolkit_at(Path(home)) if home else requirements.find_toolkit(cuda_emulator.torch_version().cuda)
    return toolkit.release if toolkit else None


def cpu_name() -> str | None:
    """Return what the processor calls itself."""
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        name = None
    return name.group(1) if name else platform.processor() or platform.machine() or None


def _os_name() -> str:
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"] + ", "
    except (OSError, KeyError):
        distribution = ""
    release = platform.release().partition("-")[0]  # what follows names a distributor's or a host's build
    return f"{distribution}{platform.system()} {release}, {platform.machine()}"


def _git_state() -> tuple[str | None, bool | None]:
    top = requirements.output("git", "-C", str(PROJECT), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != PROJECT:  # a copy of the project inside another repository
        return None, None
    commit = requirements.output("git", "-C", str(PROJECT), "rev-parse", "HEAD")
    changes = requirements.output("git", "-C", str(PROJECT), "status", "--porcelain")
    return commit, None if changes is None else changes != ""
