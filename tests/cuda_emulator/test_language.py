"""Groups, variables of the device, and which lanes are active; of instructions and intrinsics hardware_bits.npz has more."""

import pytest
import torch

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

TEXT = r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

__global__ void groups(float* out, const float* in) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<16> tile = cg::tiled_partition<16>(block);
    float v = in[block.thread_rank()];
    v = cg::reduce(tile, v, cg::plus<float>());
    block.sync();
    if (tile.thread_rank() == 0) out[tile.meta_group_rank()] = v;
}
__device__ unsigned sums[2][3] = {{1, 2, 3}, {4}}, count;
static __device__ __align__(16) float4 corner = {1, 2, 3, 4};
__device__ const int WIDTH = 3;
__device__ volatile int* nowhere;
__global__ void variables(int* out) {
    if (threadIdx.x < 2 * WIDTH) out[threadIdx.x] = atomicAdd(&sums[threadIdx.x / 3][threadIdx.x % 3], 10u);
    if (threadIdx.x == 6) out[6] = corner.w + count++ + (nowhere == nullptr) + sizeof sums;
}
__global__ void active(unsigned* out) {
    const int lane = threadIdx.x % 32;
    unsigned mask = 0, again = 0;
    if (lane % 3) {
        mask = __activemask();
        if (lane % 3 == 1) again = __activemask() + __shfl_sync(mask & 0x92492492u, lane, 4);
    }
    __syncthreads();
    out[threadIdx.x] = mask, out[64 + threadIdx.x] = again;
}
__global__ void leave(ulonglong2* cells, int* out, int last) {
    out[threadIdx.x] = 0;
    if (threadIdx.x % 2) asm volatile("exit;");
    if (last >= 0) __syncthreads();  // by then half of the threads have left
    unsigned long long a, b;
    asm volatile(
        "{ .reg .b128 e, v, s; mov.b128 e, {%2, %3}; mov.b128 v, {%4, %5}; atom.cas.b128 s, [%6], e, v; mov.b128 {%0, %1}, s; }"
        : "=l"(a), "=l"(b) : "l"(1ull), "l"(2ull), "l"(3ull + threadIdx.x), "l"(4ull), "l"(cells) : "memory");
    out[threadIdx.x] = int(a * 10 + b);
}
extern "C" {
void run_leave(ulonglong2* cells, int* out, int last) { leave<<<1, 4>>>(cells, out, last); }
void run_variables(int* out) { variables<<<1, 32>>>(out); }
void set_sums(unsigned* values) { cudaMemcpyToSymbol(sums, values, sizeof sums); }
void get_sums(unsigned* values) { cudaMemcpyFromSymbol(values, sums, sizeof sums); }
void run_active(unsigned* out) { active<<<1, 64>>>(out); }
void run_groups(float* out, float* in) { groups<<<1, 64>>>(out, in); }
}
"""


@pytest.fixture(scope="module", params=["fast", "check"])
def library(request):
    library = KernelLibrary(TEXT, request.param, "language")
    yield library
    library.close()


def test_groups(library):
    given, out = torch.rand(64), torch.empty(4)
    library.call("run_groups", out, given)
    torch.testing.assert_close(out, given.view(4, 16).sum(1))


def test_device_variables(library):
    values, out = torch.tensor([1, 2, 3, 4, 0, 0], dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    library.call("set_sums", values)
    library.call("run_variables", out)
    assert out.tolist()[:6] == values.tolist()
    assert out[6] == 4 + 0 + 1 + 24  # nothing else runs the kernel in this library
    library.call("get_sums", out)
    assert out.tolist()[:6] == [11, 12, 13, 14, 10, 10]


@pytest.mark.parametrize("schedule", ["forward", "reversed", "random"])
def test_active_mask(library, schedule):
    """The lanes that come to one place together, whatever the order in which they run."""
    out = torch.empty(128, dtype=torch.int32)
    library.call("run_active", out, schedule=schedule)
    rows = [value & 0xFFFFFFFF for value in out.tolist()]
    mask = sum(1 << lane for lane in range(32) if lane % 3)
    inner = sum(1 << lane for lane in range(32) if lane % 3 == 1)
    assert rows[:64] == [mask if t % 32 % 3 else 0 for t in range(64)]
    assert rows[64:] == [inner + 4 if t % 32 % 3 == 1 else 0 for t in range(64)]


def test_threads_that_leave_and_16_bytes_that_change_together(library):
    cells, out = torch.tensor([1, 2]), torch.empty(4, dtype=torch.int32)
    library.call("run_leave", cells, out, -1)
    assert out.tolist() == [12, 0, 34, 0] and cells.tolist() == [3, 4]
    if library.mode == "check":
        with pytest.raises(Finding, match="barrier"):
            library.call("run_leave", cells, out, 1)
