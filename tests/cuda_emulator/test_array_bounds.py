"""Variables of a thread, which no access shows: an index beyond an array's type is reported by a build for debugging, and what
was never set has a value that shows."""

import pytest
import torch

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

TEXT = """
__global__ void square(int* out, int modulus) {
    int squares[8];
    for (int i = 0; i < 8; ++i) squares[i] = i * i;
    out[threadIdx.x] = squares[threadIdx.x % modulus];
}
__global__ void unset(int* out, int threads) {
    int value;
    if (threadIdx.x < threads) value = 1;
    out[threadIdx.x] = value;
}
extern "C" void run_unset(int* out, int threads) { unset<<<1, 32>>>(out, threads); }
extern "C" void run(int* out, int modulus) { square<<<1, 32>>>(out, modulus); }
"""


def test_local_array():
    library = KernelLibrary(TEXT, "check", "array_bounds", debug=True)
    out = torch.zeros(32, dtype=torch.int32)
    try:
        library.call("run", out, 8)
        assert out.tolist() == [(i % 8) ** 2 for i in range(32)]
        with pytest.raises(
            Finding, match=r"array index out of bounds: index 8 of an array of type 'int \[8\]'.*thread \(8,0,0\)"
        ):
            library.call("run", out, 9)
    finally:
        library.close()


def test_unset_variable():
    library = KernelLibrary(TEXT, "check", "array_bounds", debug=True)
    out = torch.zeros(32, dtype=torch.int32)
    try:
        library.call("run_unset", out, 8)
        assert out.tolist() == [1] * 8 + [int.from_bytes(b"\xfe" * 4, "little", signed=True)] * 24
    finally:
        library.close()
