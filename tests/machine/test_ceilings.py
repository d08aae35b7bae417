import time

import pytest
import torch

from playground.machine import ceilings, requirements

GPU_MISSING = requirements.missing_gpu()


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
