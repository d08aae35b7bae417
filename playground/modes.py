"""PyTorch's modes: what uninitialised memory holds, determinism, and the precision of float32."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

WARN = 1  # torch.get_deterministic_debug_mode's number for "warn"


@contextlib.contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Have torch fill what it would leave uninitialised with NaN (or the largest integer), without slow imports."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("warn")
    _modes.append(mode)
    set_mode = torch._C._set_deterministic_algorithms

    def go_on_filling(mode: bool, *, warn_only: bool = False) -> None:
        if not mode:
            _modes[:] = [0] * len(_modes)
        set_mode(True, warn_only=warn_only or not mode)

    torch._C._set_deterministic_algorithms = go_on_filling
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms = set_mode
        _modes.pop()
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def set_fp32_precision(values: dict[Any, str]) -> None:
    """Set `fp32_precision` of some of torch.backends, and the older flags, which must agree."""
    cudnn, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    if cudnn in values:
        torch._C._set_cudnn_allow_tf32(values[cudnn] == "tf32")
    if products in values:
        torch._C._set_cublas_allow_tf32(values[products] == "tf32")
    for place, value in values.items():
        place.fp32_precision = value


_modes: list[int] = []  # of torch's determinism, as they were before


def deterministic_mode() -> int:
    """Return torch's mode, as it would be without uninitialised_is_nan: a file may set the usual one after its call."""
    mode = torch.get_deterministic_debug_mode()
    return _modes[0] if _modes and mode == WARN else mode
