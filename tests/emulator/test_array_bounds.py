"""Indices beyond an array's type, which a build for debugging reports: also of arrays in registers, which no access shows."""

import pytest
import torch

from playground.emulator import Finding
from playground.emulator.kernels import KernelLibrary

TEXT = """
__global__ void square(int* out, int modulus) {
    int squares[8];
    for (int i = 0; i < 8; ++i) squares[i] = i * i;
    out[threadIdx.x] = squares[threadIdx.x % modulus];
}
extern "C" void run(int* out, int modulus) { square<<<1, 32>>>(out, modulus); }
"""


def test_local_array():
    library = KernelLibrary(TEXT, "check", "array_bounds", debug=True)
    out = torch.zeros(32, dtype=torch.int32)
    try:
        library.call("run", out, 8)
        assert out.tolist() == [(i % 8) ** 2 for i in range(32)]
        with pytest.raises(
            Finding, match=r"array index out of bounds: index 8 of an array of type 'int \[8\]'.*thread \(8, 0, 0\)"
        ):
            library.call("run", out, 9)
    finally:
        library.close()
