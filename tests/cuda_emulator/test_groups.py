"""Blocks that wait for one another: clusters and their shared memory, and barriers of the whole grid."""

import pytest
import torch

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

TEXT = r"""
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <stdint.h>
namespace cg = cooperative_groups;

// Each block of a cluster of four adds up its part, and its first thread adds the parts of all by reading their memory.
template <bool SYNCHRONISED>
__global__ void __cluster_dims__(4, 1, 1) cluster_sums(float* out, const float* in) {
    __shared__ float part;
    cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x == 0) {
        part = 0;
        for (int i = 0; i < 8; ++i) part += in[blockIdx.x * 8 + i];  // written
    }
    if (SYNCHRONISED) cluster.sync();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int rank = 0; rank < 4; ++rank) sum += *cluster.map_shared_rank(&part, rank);  // read
        out[blockIdx.x] = sum + 100 * cluster.block_rank();
    }
    cluster.sync();
}
__device__ uint32_t remote(const void* shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(rank));
    return address;
}
// Block 1 of each pair gives its values to block 0 through its shared memory and an mbarrier there.
__global__ void hand_over(float* out, const float* in, int announce) {
    __shared__ float inbox[32];
    __shared__ uint64_t full;
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(&full);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(32));
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (rank == 1) {
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote(&inbox[threadIdx.x], 0)), "f"(in[threadIdx.x]) : "memory");
        if (announce)
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote(&full, 0)) : "memory");
    } else {
        if (announce)
            asm volatile("{\n.reg .pred p;\nL1:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
                         "@!p bra L1;\n}" ::"r"(barrier) : "memory");
        out[blockIdx.x / 2 * 32 + threadIdx.x] = inbox[31 - threadIdx.x];
    }
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Block 0 ends without waiting for the one that writes to its memory.
__global__ void __cluster_dims__(2) writes_to_the_dead(float* out) {
    __shared__ float value[32];
    value[threadIdx.x] = 0;
    if (blockIdx.x % 2 == 0) return;
    for (int i = 0; i < 4; ++i) __nanosleep(100);
    *cg::this_cluster().map_shared_rank(&value[threadIdx.x], 0) = 1;
    out[0] = 1;
}
__global__ void rotate(float* values, int steps) {
    cg::grid_group grid = cg::this_grid();
    const int n = grid.size(), i = grid.thread_rank();
    for (int s = 0; s < steps; ++s) {
        const float next = values[(i + 1) % n];
        grid.sync();
        values[i] = next;
        grid.sync();
    }
}
extern "C" {
void run_cluster_sums(float* out, float* in, int synchronised) {
    synchronised ? cluster_sums<true><<<8, 32>>>(out, in) : cluster_sums<false><<<8, 32>>>(out, in);
}
void run_hand_over(float* out, float* in, int announce) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(6);
    config.blockDim = dim3(32);
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = 2;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, hand_over, out, (const float*)in, announce);
}
void run_dead(float* out) { writes_to_the_dead<<<2, 32>>>(out); }
void run_odd(float* out, float* in) { cluster_sums<true><<<6, 32>>>(out, in); }
void run_rotate(float* values, int steps, int blocks, int cooperative) {
    void* arguments[] = {&values, &steps};
    if (cooperative)
        cudaLaunchCooperativeKernel((void*)rotate, dim3(blocks), dim3(32), arguments, 0, nullptr);
    else
        rotate<<<blocks, 32>>>(values, steps);
}
}
"""

SCHEDULES = ["forward", "reversed", "random"]


@pytest.fixture(scope="module")
def checked():
    library = KernelLibrary(TEXT, "check", "groups")
    yield library
    library.close()


@pytest.fixture(scope="module", params=["fast", "check"])
def library(request):
    library = KernelLibrary(TEXT, request.param, "groups")
    yield library
    library.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster_shares_memory(library, schedule):
    given, out = torch.rand(64), torch.empty(8)
    library.call("run_cluster_sums", out, given, 1, schedule=schedule, time_limit=30)
    expected = given.view(2, 32).sum(1).repeat_interleave(4) + 100 * torch.arange(4).repeat(2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_remote_stores_and_arrivals(library, schedule):
    given, out = torch.rand(32), torch.empty(96)
    library.call("run_hand_over", out, given, 1, schedule=schedule, time_limit=30)
    assert torch.equal(out, given.flip(0).repeat(3))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_grid_barrier(library, blocks, schedule):
    values = torch.rand(32 * blocks)
    expected = values.roll(-3)
    library.call("run_rotate", values, 3, blocks, 1, schedule=schedule, time_limit=30)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("function", ["run_cluster_sums", "run_hand_over"])
def test_missing_order_within_a_cluster(checked, function, schedule):
    with pytest.raises(Finding) as caught:
        checked.call(function, torch.empty(96), torch.rand(64), 0, schedule=schedule, time_limit=30)
    assert caught.value.kind in ("shared memory race", "uninitialised shared read", "race between blocks"), str(caught.value)


def test_block_that_ended(checked):
    with pytest.raises(Finding, match="has ended"):
        checked.call("run_dead", torch.empty(1), time_limit=30)


def test_invalid_launches(checked):
    with pytest.raises(Finding, match="no multiple of the cluster"):
        checked.call("run_odd", torch.empty(8), torch.rand(64))
    with pytest.raises(Finding, match="not cooperative"):
        checked.call("run_rotate", torch.rand(64), 1, 2, 0)
    with pytest.raises(Finding, match="more blocks than a cooperative launch"):
        checked.call("run_rotate", torch.rand(32 * 1000), 1, 1000, 1)
