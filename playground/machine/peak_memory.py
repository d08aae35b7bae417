"""How much memory a step takes."""

import ctypes
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_glibc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def peak_memory(step: Callable[[], Any], device: torch.device) -> tuple[Any, float | None]:
    """Return (result of step(), MiB at its peak above what was in use: torch's on CUDA, VmHWM on Linux, proc(5), or None)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step()
        torch.cuda.synchronize()
        return result, (torch.cuda.max_memory_allocated() - before) / 2**20
    if _glibc:
        _glibc.malloc_trim(0)  # or memory that was freed but kept would be taken without a trace
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_kib("VmRSS")
    except OSError:
        return step(), None
    result = step()
    # Linux sums both figures from counters of each processor: the later peak may come out below.
    return result, max(0, _resident_kib("VmHWM") - before) / 2**10


def _resident_kib(key: str) -> int:
    if found := re.search(rf"^{key}:\s*(\d+)", Path("/proc/self/status").read_text(), re.M):
        return int(found[1])
    raise OSError(f"/proc/self/status has no {key}")
