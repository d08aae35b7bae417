"""Index arithmetic beyond 2^31 elements, of tensors that take no memory: 32 bits wrap, and show; 64 do not."""

import ctypes

import pytest
import torch

from playground.emulator import Finding, runtime
from playground.emulator.kernels import KernelLibrary

TEXT = """
template <class Index>
__global__ void fill(float* out, long long n) {
    const Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 1;  // below zero after a wrap
}
extern "C" void fill_int(float* out, long long n) { fill<int><<<(n + 255) / 256, 256>>>(out, n); }
extern "C" void fill_long(float* out, long long n) { fill<long long><<<(n + 255) / 256, 256>>>(out, n); }
"""
ELEMENTS = (1 << 31) + 1000


@pytest.fixture
def library():
    library = KernelLibrary(TEXT, "check", "extents")
    runtime.library().emulator_extents(1)
    yield library
    runtime.library().emulator_extents(0)
    library.close()


def test_32_bits_wrap(library):
    with pytest.raises(Finding, match="global memory out of bounds"):
        library.call("fill_int", torch.empty(ELEMENTS), ctypes.c_longlong(ELEMENTS), time_limit=60)


def test_64_bits_do_not(library):
    out = torch.empty(ELEMENTS)
    library.call("fill_long", out, ctypes.c_longlong(ELEMENTS), time_limit=60)
    assert out[0] == out[-1] == 1  # the first and the last block have run
    assert out[1 << 20] == 0  # most have not
