"""Shared memory that some warps hand to others at mbarriers: which ways to arrive are right, and which are a race."""

import pytest
import torch
from on_device import DeviceLibrary

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

# WARPS warps write what as many read, through a ring of two places.
TEXT = r"""
#include <cuda_runtime.h>
#include <cstdint>

constexpr int WARP = 32, WARPS = 4, SIZE = WARP * WARPS, PLACES = 2, ROUNDS = 6;
enum Way { LANES_ARRIVE, ONE_ARRIVES, ONE_ARRIVES_TOO_EARLY, WRITERS_DO_NOT_WAIT };

__device__ void init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ void arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
__device__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
template <int WAY>
__device__ void hand_on(uint32_t barrier) {
    if (WAY == LANES_ARRIVE) return arrive(barrier);
    if (WAY != ONE_ARRIVES_TOO_EARLY) __syncwarp();
    if (threadIdx.x % WARP == 0) arrive(barrier);
}

template <int WAY>
__global__ void ring(int* out) {
    __shared__ int data[PLACES][SIZE];
    __shared__ uint64_t barriers[2 * PLACES];
    const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers)), empty = full + 8 * PLACES;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2 * PLACES; ++i) init(full + 8 * i, WAY == LANES_ARRIVE ? SIZE : WARPS);
    __syncthreads();
    const int mine = threadIdx.x % SIZE;
    int sum = 0;
    for (int n = 0; n < ROUNDS; ++n) {
        const int place = n % PLACES, parity = n / PLACES & 1;
        if (threadIdx.x >= SIZE) {
            if (WAY != WRITERS_DO_NOT_WAIT) wait(empty + 8 * place, parity ^ 1);
            data[place][mine] = n + mine;
            hand_on<WAY>(full + 8 * place);
        } else {
            wait(full + 8 * place, parity);
            sum += data[place][(5 * mine + 7) % SIZE];
            hand_on<WAY>(empty + 8 * place);
        }
    }
    if (threadIdx.x < SIZE) out[mine] = sum;
}

extern "C" void run_ring(int way, int* out) {
    if (way == LANES_ARRIVE) ring<LANES_ARRIVE><<<1, 2 * SIZE>>>(out);
    if (way == ONE_ARRIVES) ring<ONE_ARRIVES><<<1, 2 * SIZE>>>(out);
    if (way == ONE_ARRIVES_TOO_EARLY) ring<ONE_ARRIVES_TOO_EARLY><<<1, 2 * SIZE>>>(out);
    if (way == WRITERS_DO_NOT_WAIT) ring<WRITERS_DO_NOT_WAIT><<<1, 2 * SIZE>>>(out);
}
"""
SIZE, ROUNDS = 128, 6
RIGHT = {"lanes arrive": 0, "one arrives": 1}
RACES = {"one arrives too early": 2, "writers do not wait": 3}
SCHEDULES = ["forward", "reversed", "random"]


@pytest.fixture(scope="module", params=["fast", "check", "device"])
def library(request, tmp_path_factory):
    if request.param == "device":
        library = DeviceLibrary(TEXT, tmp_path_factory.mktemp("rings"))
    else:
        library = KernelLibrary(TEXT, request.param, "rings")
    yield library
    library.close()


@pytest.fixture(scope="module")
def checked():
    library = KernelLibrary(TEXT, "check", "rings")
    yield library
    library.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", RIGHT)
def test_every_lane_or_one_behind_syncwarp(library, way, schedule):
    """racecheck of compute-sanitizer 2025.3 and 2026.4 calls the second a race."""
    out = torch.zeros(SIZE, dtype=torch.int32)
    library.call("run_ring", RIGHT[way], out, schedule=schedule, time_limit=30)
    expected = ROUNDS * ((5 * torch.arange(SIZE) + 7) % SIZE) + sum(range(ROUNDS))
    assert torch.equal(out, expected.int())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", RACES)
def test_a_race_is_found(checked, way, schedule):
    with pytest.raises(Finding, match="race"):
        checked.call("run_ring", RACES[way], torch.zeros(SIZE, dtype=torch.int32), schedule=schedule, time_limit=30)
