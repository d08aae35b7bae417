"""What is global in PyTorch, Python and NumPy, and could be left changed by a call."""

import gc
import inspect
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy
import torch

from playground import modes

ROOTS: dict[str, Any] = {"time": time, "torch": torch}
NAMES = """
    time.perf_counter time.perf_counter_ns time.time time.time_ns time.monotonic time.monotonic_ns time.process_time
    time.process_time_ns torch.allclose torch.isclose torch.testing.assert_close torch.equal torch.cuda.Event torch.Tensor.copy_
    torch.cuda.Event.record torch.cuda.Event.elapsed_time torch.cuda.Event.synchronize torch.cuda.synchronize"""
TIMERS_AND_CHECKS = NAMES.split()
BACKENDS = """
    cudnn.enabled cudnn.benchmark cudnn.deterministic mkldnn.enabled fp32_precision cuda.matmul.fp32_precision
    cudnn.fp32_precision cudnn.conv.fp32_precision cudnn.rnn.fp32_precision mkldnn.matmul.fp32_precision
    mkldnn.conv.fp32_precision cuda.matmul.allow_fp16_accumulation
"""

FILL = "fill_uninitialized_memory"
FLAGS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the grad mode": torch.is_grad_enabled,
    "the inference mode": torch.is_inference_mode_enabled,
    "autocast on the CPU": lambda: torch.is_autocast_enabled("cpu"),
    "autocast on CUDA": lambda: torch.is_autocast_enabled("cuda"),
    "autocast's type on the CPU": lambda: torch.get_autocast_dtype("cpu"),
    "autocast's type on CUDA": lambda: torch.get_autocast_dtype("cuda"),
    "autocast's cache": torch.is_autocast_cache_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "the deterministic mode": modes.deterministic_mode,
    f"torch.utils.deterministic.{FILL}": partial(attrgetter(FILL), torch.utils.deterministic),
    "the number of threads": torch.get_num_threads,
    **{f"torch.backends.{name}": partial(attrgetter(name), torch.backends) for name in BACKENDS.split()},
    "reduced precision sums of fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced precision sums of bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled,
    "math attention": torch.backends.cuda.math_sdp_enabled,
    "reduced precision sums of math attention": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "Python's garbage collector": gc.isenabled,
    "whether numbers below 1.2e-38 become zero": lambda: (torch.tensor(1e-40, device="cpu") * 1).item() == 0,
    "the function modes": lambda: torch._C._len_torch_function_stack(),
    "the dispatch modes": lambda: torch._C._len_torch_dispatch_stack(),
}

# Settings that make PyTorch's own operators faster: check -> {flag: its value then}. Baselines can be timed under them, too.
FAVOURING: dict[str, dict[str, Any]] = {
    "cudnn.benchmark": {"torch.backends.cudnn.benchmark": True},
    "TF32": {name: "tf32" for name in FLAGS if name.endswith("fp32_precision")},
}


def flags() -> dict[str, Any]:
    """Return {what: value} of everything global in torch that a variant could leave changed, timers and checks included."""
    state = {name: read() for name, read in FLAGS.items()}
    for name in TIMERS_AND_CHECKS:
        first, *path, last = name.split(".")
        owner = attrgetter(".".join(path))(ROOTS[first]) if path else ROOTS[first]
        state[name] = inspect.getattr_static(owner, last, None)
    if torch.cuda.is_initialized():
        state["the current device"] = torch.cuda.current_device()
        state["the current stream"] = torch.cuda.current_stream()
    return state


def random_state() -> dict[str, Any]:
    """Return {whose: state} of the generators."""
    known: Any = numpy.random.get_state()
    _, words, position, *kept = known
    state: dict[str, Any] = {
        "PyTorch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": (words.tobytes(), position, *kept),
    }
    if torch.cuda.is_initialized():
        state["CUDA's random numbers"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def complaints_about_flags(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Return {check: one line} of the flags that differ between two states: "global state", and those of FAVOURING."""
    names = _differing(before, after)
    found: dict[str, str | None] = {}
    for check, values in FAVOURING.items():
        favoured = [name for name in names if name in values and after[name] == values[name]]
        names = [name for name in names if name not in favoured]
        found[check] = changed(before, after, favoured)
    found["global state"] = changed(before, after, names)
    return {check: line for check, line in found.items() if line}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after.get(name) is not value and after.get(name) != value]


def changed(before: dict[str, Any], after: dict[str, Any], names: Sequence[str] | None = None) -> str | None:
    """Return one line on what differs between two states, or on those of `names`; None when nothing does."""
    names = _differing(before, after) if names is None else names
    if not names:
        return None
    first = names[0]
    replaced = "replaces" if first in TIMERS_AND_CHECKS else "changes"
    readable = all(isinstance(state[first], (bool, int, str, torch.dtype, torch.device)) for state in (before, after))
    values = f" from {before[first]} to {after[first]}" if readable else ""
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{replaced} {first}{values}{more}"
