import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from playground.machine import ceilings, requirements

ROOT = Path(__file__).resolve().parents[2]
GPU_MISSING = requirements.missing_gpu()

# Each setting puts the flags in a state that a program may have left, in the older or the newer way; a process apiece.
SETTINGS = [
    "pass",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.fp32_precision = 'ieee'",
]
FLAGS = """
import os, sys, torch
from playground.machine import ceilings

CUDA, ONEDNN, CONVOLUTION = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv

def state():
    def read(flag):
        try:
            return flag()
        except RuntimeError:
            return "mixed"
    return [read(flag) for flag in (lambda: CUDA.allow_tf32, torch.get_float32_matmul_precision,
            lambda: CUDA.fp32_precision, lambda: ONEDNN.fp32_precision, lambda: CONVOLUTION.fp32_precision,
            lambda: torch.backends.fp32_precision,
            lambda: torch.backends.cudnn.allow_tf32, lambda: torch.backends.cudnn.conv.fp32_precision)]

def check(setting):
    exec(setting)
    before = state()
    for matmul in (CUDA, ONEDNN, CONVOLUTION):
        for precision in ("ieee", "tf32"):
            try:
                with ceilings._setting(matmul, "fp32_precision", precision):
                    assert matmul.fp32_precision == precision
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                pass
            assert state() == before, (setting, precision, before, state())
    print("put back", setting, flush=True)

for setting in sys.argv[1:]:
    if os.fork() == 0:
        check(setting)
        os._exit(0)
    os.wait()
"""


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
def test_precision_flags_are_put_back_after_an_exception():
    command = [sys.executable, "-c", FLAGS, *SETTINGS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == [f"put back {setting}" for setting in SETTINGS], result.stderr


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
