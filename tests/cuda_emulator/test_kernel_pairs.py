"""Every wrong kernel of the pairs is reported as what it is, at its line, in every schedule where it shows; no right one is."""

import contextlib
from pathlib import Path

import kernel_pairs
import pytest
import torch

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

N = 150
SOURCE = Path(kernel_pairs.__file__)


@pytest.fixture(scope="module")
def library():
    library = KernelLibrary(kernel_pairs.whole_text(), "check", "kernel_pairs", str(SOURCE))
    yield library
    library.close()


def run(library, name, schedule):
    out, given = torch.empty(N), torch.rand(N)
    library.call(name, out, given, N, schedule=schedule, time_limit=2 if "endless" in name or "nobody" in name else 60)


@pytest.mark.parametrize("schedule", kernel_pairs.ALL)
@pytest.mark.parametrize("pair", kernel_pairs.PAIRS, ids=lambda pair: pair.name)
def test_pair(library, pair, schedule):
    run(library, pair.name + "_right", schedule)
    if schedule in pair.schedules:
        with pytest.raises(Finding) as caught:
            run(library, pair.name + "_wrong", schedule)
        finding = caught.value
        assert finding.kind in pair.kind.split("|"), str(finding)
        assert finding.file == str(SOURCE)
        marked = kernel_pairs.lines_marked(pair)
        assert marked & {finding.line, *finding.callers}, str(finding)
        if "race" in finding.kind:
            assert marked & {finding.other.line, *finding.other.callers}, str(finding)


READ_TWICE = r"""
__global__ void kernel(float* out) {
    __shared__ float sums[2];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = 1;
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = threadIdx.x < 2 ? sums[threadIdx.x] : 0;
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        if (threadIdx.x == 0) sums[0] = sum;
    }
    out[threadIdx.x] = sums[0];
}
extern "C" void run(float* out) { kernel<<<1, 64>>>(out); }
"""


@pytest.mark.parametrize("schedule", kernel_pairs.ALL)
def test_the_other_party_of_a_race_is_another_thread(schedule):
    """Also where the thread that writes is itself the first of several that have read."""
    library = KernelLibrary(READ_TWICE, "check", "read_twice", "read_twice.cu")
    with contextlib.closing(library), pytest.raises(Finding) as caught:
        library.call("run", torch.empty(N), schedule=schedule)
    found = caught.value
    assert found.kind == "shared memory race", str(found)
    assert found.other is None or found.other.thread != found.thread, str(found)
