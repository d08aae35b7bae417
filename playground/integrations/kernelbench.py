"""KernelBench's `eval_kernel_against_ref`, judged by this project: a harness changes the line that imports it.

    from playground.integrations.kernelbench import eval_kernel_against_ref

Signature and fields are those of src/kernelbench/eval.py (ScalingIntelligence/KernelBench, commit 423217d).
"""

import contextlib
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from playground.api import compare
from playground.machine import requirements
from playground.report.suite import eval_entry
from playground.run_record import load_result

PRECISIONS = {torch.float32: "default", torch.float16: "fp16", torch.bfloat16: "bf16"}
VISIBLE = "CUDA_VISIBLE_DEVICES"
_device_lock = threading.Lock()


@dataclass
class KernelExecResult:
    """What came of a solution. Times are in milliseconds, -1 where nothing was timed or may be claimed.

    `correctness` is the standard `forward`. `runtime` is the median of the calls, `runtime_stats` has median, p20 and p80 where
    KernelBench's has mean, std, min and max. `metadata` has the verdict, the caveats' tags and the reason: "correctness_issue",
    or "compilation_error" or "runtime_error", each of these with "..._name" and "..._traceback"; "excessive_speedup" where the
    speed-up over eager is above the threshold.
    """

    compiled: bool = False
    correctness: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    runtime: float = -1.0
    runtime_stats: dict[str, Any] = field(default_factory=dict)
    ref_runtime: float = -1.0
    ref_runtime_stats: dict[str, Any] = field(default_factory=dict)


def eval_kernel_against_ref(
    original_model_src: str,
    custom_model_src: str,
    seed_num: int = 42,
    num_correct_trials: int = 1,
    num_perf_trials: int = 10,
    measure_performance: bool = False,
    timing_method: str = "cuda_event",
    verbose: bool = False,
    build_dir: str | os.PathLike | None = None,
    device: torch.device | int | None = None,
    backend: str = "cuda",
    precision: torch.dtype = torch.float32,
    check_for_excessive_speedup: bool = True,
    excessive_speedup_threshold: float = 10,
) -> KernelExecResult:
    """Judge the text of a solution against the text of its problem, and time it where `measure_performance` asks for it.

    `device` is the index of a GPU or a torch.device; None: the GPU where there is one, else the emulator. `precision` is that
    of model and inputs. The judge draws inputs from secret seeds, makes as many trials as it needs and builds in a folder of
    its own: `seed_num`, `num_correct_trials`, `num_perf_trials`, `timing_method` and `build_dir` change nothing. Triton and
    other languages within Python need no `backend`. Calls that name a GPU's index wait for one another.

    A solution's faults are in the result. Raises CatalogError for a problem that does not run, ValueError for a device, a
    backend or a precision that cannot be judged, CannotCompare where the machine lacks what `device` needs.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision}, expected one of {', '.join(map(str, PRECISIONS))}")
    if backend.lower() == "hip":
        raise ValueError("backend is 'hip', for AMD's GPUs; the judge knows NVIDIA's")
    place, index = _place(device)
    with _only_visible(index):
        found = compare(
            original_model_src + "\n",  # a line alone would be a name
            custom_model_src + "\n",
            device=place,
            standard="forward",
            precision=PRECISIONS[precision],
            check_only=not measure_performance,
        )
    hardware = requirements.ask_gpu("name") if found.ran_on == "cuda" else found.ran_on
    told = KernelExecResult(**eval_entry(load_result(found.result), hardware))
    eager = found.speedups.get("eager")
    if check_for_excessive_speedup and eager and eager.ratio > excessive_speedup_threshold:
        told.metadata["excessive_speedup"] = True
    if verbose:
        print(f"{found.verdict}: {found.reason or found.milliseconds or 'right'}")
    return told


def _place(device):
    """Return (device of `compare`, index of the GPU or None)."""
    if device is None:
        return "auto", None
    if isinstance(device, int) and not isinstance(device, bool):
        return "cuda", device
    if isinstance(device, torch.device) and device.type in ("cuda", "cpu"):
        return device.type, device.index if device.type == "cuda" else None
    raise ValueError(f"device is {device!r}, expected the index of a GPU, a torch.device of type cuda or cpu, or None")


@contextlib.contextmanager
def _only_visible(index):
    """Let processes that start meanwhile see this GPU alone, of those that this process may see; None: all of them."""
    if index is None:
        yield
        return
    with _device_lock:
        before = os.environ.get(VISIBLE)
        names = before.split(",") if before else None
        if names and index >= len(names):
            raise ValueError(f"device is {index}, and {VISIBLE}={before} has GPUs 0 to {len(names) - 1}")
        os.environ[VISIBLE] = names[index] if names else str(index)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(VISIBLE)
            else:
                os.environ[VISIBLE] = before
