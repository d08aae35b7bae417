"""`// emulator: benign race` on a line: a race there is counted and no finding; without it, it is one that names the rule."""

from pathlib import Path

import pytest
import torch

import cuda_emulator as emulator
from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

TEXT = """
__global__ void same_value(int* out) {
    __shared__ int warps[2];
    warps[threadIdx.x / 32] = 7;  MARK
    __syncthreads();
    out[threadIdx.x] = warps[threadIdx.x / 32];
}
__device__ void add(unsigned* sum, unsigned value) {
    const unsigned before = *sum;  MARK
    atomicAdd(sum, before < 1000 ? value : 0);
}
__global__ void sum_up(unsigned* out) { add(out, threadIdx.x); }
extern "C" void run_same_value(int* out) { same_value<<<1, 64>>>(out); }
extern "C" void run_sum_up(unsigned* out) { sum_up<<<1, 32>>>(out); }
"""
ACCEPTED = TEXT.replace("MARK", "// emulator: benign race")
REPORTED = TEXT.replace("MARK", "// benign")
LINES = Path(__file__).read_text().splitlines()
MARKED = dict(
    zip(("run_same_value", "run_sum_up"), (n for n, line in enumerate(LINES, 1) if line.endswith(";  MARK")), strict=True)
)
RULES = {"run_same_value": "also if both write the same value", "run_sum_up": "an atomic operation orders no plain access"}


def run(text, function):
    library = KernelLibrary(text, "check", "accepted_races")
    out = torch.zeros(64, dtype=torch.int32)
    try:
        library.call(function, out, time_limit=60)
    finally:
        library.close()
    return out


@pytest.mark.parametrize("function", MARKED)
def test_reported_with_its_rule(function):
    with pytest.raises(Finding, match=RULES[function]) as caught:
        run(REPORTED, function)
    assert caught.value.line == MARKED[function]


@pytest.mark.parametrize("function", MARKED)
def test_accepted_and_counted(function):
    before = emulator.accepted_races().get(MARKED[function], 0)
    out = run(ACCEPTED, function)
    assert emulator.accepted_races()[MARKED[function]] > before
    assert out.tolist() == [7] * 64 if function == "run_same_value" else out[0] == sum(range(32))
