"""Launch functions that are called through ctypes: what the emulator finds in them reaches the caller."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import cuda_emulator as emulator

TEXT = r"""
#include <cstdint>
__global__ void twice(const float* x, float* y, int64_t size, int64_t too_far) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < size + too_far) y[i] = 2 * x[i];  // the mistake
}
extern "C" int launch_twice(const float* x, float* y, int64_t size, int64_t too_far, cudaStream_t stream) {
    twice<<<(size + 63) / 64, 64, 0, stream>>>(x, y, size, too_far);
    return cudaGetLastError();
}
"""
SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@pytest.fixture
def library():
    with emulator.install(mode="check"):
        path = cpp_extension.load_inline(
            "twice_in_c", cpp_sources="", cuda_sources=TEXT, is_python_module=False, no_implicit_headers=True
        )
        yield ctypes.CDLL(path)


def arguments(too_far):
    x = torch.rand(1000)
    return x, torch.empty(1000), too_far


def call(function, x, y, too_far):
    return function(x.data_ptr(), y.data_ptr(), len(x), too_far, None)


def test_a_finding_is_raised_when_the_function_returns(library):
    library.launch_twice.argtypes = SIGNATURE
    x, y, _ = arguments(0)
    assert call(library.launch_twice, x, y, 0) == 0
    assert torch.equal(y, 2 * x)
    with pytest.raises(emulator.Finding, match="out of bounds") as caught:
        call(library.launch_twice, x, y, 1)
    assert caught.value.file == __file__
    assert "the mistake" in Path(__file__).read_text().splitlines()[caught.value.line - 1]
    assert call(library.launch_twice, x, y, 0) == 0  # the finding has been taken


def test_a_caller_that_is_not_watched_gets_a_code_and_the_finding_is_kept(library):
    launch_twice = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURE)(("launch_twice", library))  # no attribute of the library
    x, y, _ = arguments(1)
    assert call(launch_twice, x, y, 1) == 719
    with pytest.raises(emulator.Finding, match="out of bounds"):
        emulator.active.raise_kept()
    emulator.active.raise_kept()  # nothing is left
