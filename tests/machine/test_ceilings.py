import contextlib
import multiprocessing
import os
import time

import pytest
import torch

from playground.machine import ceilings, requirements

GPU_MISSING = requirements.missing_gpu()

# Each setting puts the flags in a state that a program may have left, in the older or the newer way; a process apiece.
SETTINGS = [
    "pass",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.fp32_precision = 'ieee'",
]


def state():
    """Of all flags that say a precision, in the older and the newer way."""
    backends = torch.backends
    newer = [backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv, backends, backends.cudnn.conv]
    found = [place.fp32_precision for place in newer]
    older = (lambda: backends.cuda.matmul.allow_tf32), torch.get_float32_matmul_precision, (lambda: backends.cudnn.allow_tf32)
    for read in older:
        try:
            found.append(read())
        except RuntimeError:
            found.append("mixed")
    return found


def put_back(setting):
    """In a process of its own: raise an exception in each precision, and compare the flags with those before."""
    exec(setting)
    before = state()
    for place in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv):
        for precision in ("ieee", "tf32"):
            with contextlib.suppress(KeyboardInterrupt), ceilings._setting(place, "fp32_precision", precision):
                assert place.fp32_precision == precision
                raise KeyboardInterrupt
            assert state() == before, (setting, precision)


def test_cpu():
    torch.manual_seed(7)
    state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        begin = time.perf_counter()
        measured = ceilings.measure("cpu")
        assert time.perf_counter() - begin < 15  # about 2 on an idle machine
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(dtype)
    assert 1e8 < measured.read_bytes_per_second < 1e13
    assert 1e8 < measured.copy_bytes_per_second < 1e13
    assert 1e9 < measured.fp32_flops < 1e14
    assert measured.tf32_flops is None
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers changed"
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("setting", SETTINGS)
def test_precision_flags_are_put_back_after_an_exception(setting):
    process = multiprocessing.get_context("fork").Process(target=put_back, args=(setting,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.skipif(GPU_MISSING is not None, reason=str(GPU_MISSING))
class TestCuda:
    def test_rates(self):
        before = torch.backends.cuda.matmul.fp32_precision
        begin = time.perf_counter()
        measured = ceilings.measure("cuda")
        assert time.perf_counter() - begin < 10
        assert 5e10 < measured.read_bytes_per_second < 3e13
        assert 5e10 < measured.copy_bytes_per_second < 3e13
        assert 5e11 < measured.fp32_flops < 1e15
        if torch.cuda.get_device_capability() >= (8, 0):
            assert measured.fp16_flops > measured.tf32_flops > measured.fp32_flops
        else:
            assert measured.tf32_flops is None
        assert torch.backends.cuda.matmul.fp32_precision == before
        assert torch.cuda.memory_reserved() < 2**28
