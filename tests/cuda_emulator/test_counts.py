"""Counters against counts made by hand."""

from pathlib import Path

import pytest
import torch

from cuda_emulator import counts, reset_counts
from cuda_emulator.kernels import KernelLibrary

TEXT = r"""
template <int PITCH>
__global__ void transpose(float* to, const float* from, int n) {
    __shared__ float tile[32][PITCH];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32;
    for (int j = threadIdx.y; j < 32; j += 8) tile[j][threadIdx.x] = from[(y + j) * n + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32;
    for (int j = threadIdx.y; j < 32; j += 8) to[(y + j) * n + x] = tile[threadIdx.x][j];
}
__global__ void strided(float* to, const float* from, int stride) { to[threadIdx.x] = from[threadIdx.x * stride]; }
__global__ void vectors(float4* to, const float4* from) { to[threadIdx.x] = from[threadIdx.x]; }
__global__ void shared_vectors(float4* to) {
    __shared__ float4 row[64];
    row[threadIdx.x] = make_float4(1, 2, 3, 4);
    __syncthreads();
    to[threadIdx.x] = row[63 - threadIdx.x];
}
__global__ void histogram(int* bins, const float* from) { atomicAdd(&bins[threadIdx.x % 4], (int)from[threadIdx.x]); }
extern "C" {
void run_padded(float* to, float* from, int n) { transpose<33><<<dim3(n / 32, n / 32), dim3(32, 8)>>>(to, from, n); }
void run_unpadded(float* to, float* from, int n) { transpose<32><<<dim3(n / 32, n / 32), dim3(32, 8)>>>(to, from, n); }
void run_strided(float* to, float* from, int stride) { strided<<<1, 32>>>(to, from, stride); }
void run_vectors(float4* to, float4* from) { vectors<<<1, 64>>>(to, from); }
void run_shared_vectors(float4* to) { shared_vectors<<<1, 64>>>(to); }
void run_histogram(int* bins, float* from) { histogram<<<1, 64>>>(bins, from); }
}
"""


@pytest.fixture(scope="module")
def library():
    library = KernelLibrary(TEXT, "count", "counted")
    yield library
    library.close()


def count(library, function, *arguments):
    reset_counts()
    library.call(function, *arguments)
    ((_, found),) = counts(by_line=True).items()
    return found


def test_transposes(library):
    # 64 x 64: 4 tiles of 32 rows; each row is one request to device memory of 4 sectors, and one to shared memory.
    for name, conflicts in (("run_padded", 1), ("run_unpadded", 32)):
        found = count(library, name, torch.empty(64, 64), torch.rand(64, 64), 64)
        for traffic in (found.global_read, found.global_write):
            assert (traffic.requests, traffic.transactions, traffic.ideal, traffic.bytes) == (128, 512, 512, 64 * 64 * 4)
        assert (found.shared_write.requests, found.shared_write.transactions) == (128, 128)
        assert (found.shared_read.requests, found.shared_read.transactions, found.shared_read.ideal) == (
            128,
            128 * conflicts,
            128,
        )
        assert found.barriers == 4


@pytest.mark.parametrize("stride, sectors", [(0, 1), (1, 4), (2, 8), (3, 12), (8, 32), (32, 32)])
def test_strides(library, stride, sectors):
    found = count(library, "run_strided", torch.empty(32), torch.rand(32 * 32), stride)
    assert found.global_read.transactions == sectors
    assert found.global_read.ideal == (1 if stride == 0 else 4)


def test_vectors(library):
    found = count(library, "run_vectors", torch.empty(64, 4), torch.rand(64, 4))
    assert (found.global_read.requests, found.global_read.transactions) == (2, 32)
    found = count(library, "run_shared_vectors", torch.empty(64, 4))
    assert (found.shared_write.requests, found.shared_write.transactions, found.shared_write.ideal) == (2, 8, 8)
    assert (found.shared_read.requests, found.shared_read.transactions) == (2, 8)


def test_atomics(library):
    found = count(library, "run_histogram", torch.zeros(4, dtype=torch.int32), torch.rand(64))
    assert found.atomics == 64


def test_lines_and_repetition(library):
    runs = [count(library, "run_unpadded", torch.empty(64, 64), torch.rand(64, 64), 64) for _ in range(2)]
    assert runs[0] == runs[1]
    worst = max(runs[0].lines, key=lambda key: runs[0].lines[key].transactions)
    text_line = 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if "tile[threadIdx.x][j]" in line)
    assert worst == (text_line, "shared_read")
