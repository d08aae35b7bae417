"""What is said of a CUDA text's registers, spills and shared memory, and why where nothing can be said."""

import pytest

from playground.machine import ptxas
from playground.machine.ptxas import DeviceCode
from playground.subject import Unknown

NEEDS_NVCC = pytest.mark.skipif(ptxas.find_nvcc() is None, reason="needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")
TEXT = """
__global__ void shares(float* p) { __shared__ float s[32]; s[threadIdx.x] = p[threadIdx.x]; p[0] = s[31 - threadIdx.x]; }
"""


@NEEDS_NVCC
def test_kernels_for_the_architecture_that_is_known_best():
    (kernel,) = ptxas.describe([DeviceCode(TEXT)], "9.0")["sm_90"]
    assert kernel.name == "shares" and kernel.shared == 128 and kernel.registers > 0
    assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0
    assert list(ptxas.describe([DeviceCode(TEXT, ("-gencode=arch=compute_90a,code=sm_90a",))], "8.0")) == ["sm_90a"]
    two = ptxas.describe([DeviceCode(TEXT), DeviceCode(TEXT.replace("shares", "other"))])
    assert tuple(two) == ptxas.ARCHITECTURES
    assert all([kernel.name for kernel in kernels] == ["shares", "other"] for kernels in two.values())


@NEEDS_NVCC
def test_a_text_that_nvcc_refuses():
    unknown = ptxas.describe([DeviceCode("int f() { return undeclared_thing; }")], "8.0").unknown
    assert "nvcc does not compile the text by itself" in unknown and "undeclared_thing" in unknown


@pytest.mark.parametrize("codes", [[], [DeviceCode("  ")]])
def test_no_cuda_text(codes):
    assert ptxas.describe(codes) == Unknown("no CUDA text was given to load_inline")


def test_a_text_with_the_headers_of_torch():
    assert "PyTorch's headers" in ptxas.describe([DeviceCode("#include <torch/extension.h>\n" + TEXT)]).unknown


def test_no_nvcc(monkeypatch):
    monkeypatch.setattr(ptxas, "find_nvcc", lambda: None)
    assert ptxas.describe([DeviceCode(TEXT)]) == Unknown("nvcc is not installed")
