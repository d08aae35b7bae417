"""Fast mode: values, launches of every form, blocks that wait for one another, and loops that never end."""

from pathlib import Path

import pytest
import torch

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

TEXT = r"""
__constant__ float weights[4];
__device__ unsigned ticket;
template <typename T, int N = 2>
__global__ void scale(T* out, const T* in, T by, int n, const T* more = nullptr) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * by * N + (more ? more[i] : T(0));
}
__global__ void __launch_bounds__(64) weighted(float* out, const float* in) {
    out[threadIdx.x] = in[threadIdx.x] * weights[threadIdx.x % 4];
}
struct Item {
    float value;
    int index;
};
__global__ void shared_forms(float* out, int n) {
    extern __shared__ __align__(16) unsigned char raw[];
    __shared__ float a[2][32], b, c[3];
    __shared__ Item items[32];
    float* dynamic = reinterpret_cast<float*>(raw);
    const int t = threadIdx.x;
    dynamic[t] = t;
    a[t & 1][t / 2] = t;
    if (t < 32) items[t] = {float(t), t};
    if (t < 3) c[t] = t;
    if (t == 0) b = 100;
    __syncthreads();
    out[t] = dynamic[n - 1 - t] + a[1][t / 2] + b + c[t % 3] + items[t % 32].value - items[t % 32].index;
}
// The last block to finish adds up what all have written.
__global__ void last_block(float* out, float* partial) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = blockIdx.x + 1;
        __threadfence();
        last = atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += partial[i];
        *out = sum;
    }
}
// Block 0 waits for all others by looking at a flag of each.
__global__ void wait_for_all(float* out, volatile int* flags) {
    if (blockIdx.x > 0) {
        if (threadIdx.x == 0) flags[blockIdx.x] = 1;
        return;
    }
    for (int i = 1 + threadIdx.x; i < gridDim.x; i += blockDim.x)
        while (flags[i] == 0) continue;
    __syncthreads();
    if (threadIdx.x == 0) *out = gridDim.x;
}
__global__ void forever(float* out) {
    int i = 0;
    while (true) {
        asm volatile("" ::: "memory");
        if (i < 0) out[0] = i;
    }
}
__global__ void barriers_forever(float* out) {
    while (true) __syncthreads();
}
extern "C" {
void run_scale(float* out, float* in, float by, int n) {
    scale<float><<<(n + 31) / 32, 32>>>(out, in, by, n);
    scale<float, 3><<<dim3((n + 31) / 32), dim3(32), 0, 0>>>(out, out, 1.0f, n, 0);
    scale<<<(n + 31) / 32, 32, 0, nullptr>>>(out, in, by, n, (const float*)out);
}
void run_weighted(float* out, float* in) {
    const float values[4] = {1, 2, 3, 4};
    cudaMemcpyToSymbol(weights, values, sizeof values);
    weighted<<<1, 64>>>(out, in);
}
void run_shared(float* out, int n) { shared_forms<<<1, n, n * sizeof(float)>>>(out, n); }
void run_last_block(float* out, float* partial, int blocks) { last_block<<<blocks, 32>>>(out, partial); }
void run_wait(float* out, int* flags, int blocks) { wait_for_all<<<blocks, 64>>>(out, flags); }
void run_many(float* out, int blocks) { forever<<<blocks, 64>>>(out); }
void run_forever(float* out) { forever<<<2, 64>>>(out); }
void run_barriers_forever(float* out) { barriers_forever<<<1, 64>>>(out); }
}
"""


@pytest.fixture(scope="module", params=["fast", "check"])
def library(request):
    library = KernelLibrary(TEXT, request.param, "fast_mode")
    yield library
    library.close()


def test_launch_forms(library):
    given, out = torch.rand(100), torch.empty(100)
    library.call("run_scale", out, given, 0.5, 100)
    torch.testing.assert_close(out, given * 0.5 * 2 + given * 0.5 * 2 * 3)


def test_constant_memory(library):
    given, out = torch.rand(64), torch.empty(64)
    library.call("run_weighted", out, given)
    torch.testing.assert_close(out, given * torch.tensor([1.0, 2, 3, 4]).repeat(16))


def test_shared_forms(library):
    out, t = torch.empty(64), torch.arange(64.0)
    library.call("run_shared", out, 64)
    torch.testing.assert_close(out, 63 - t + (t.div(2, rounding_mode="floor") * 2 + 1) + 100 + t % 3)


@pytest.mark.parametrize("schedule", ["forward", "reversed", "random"])
def test_blocks_wait_for_one_another(library, schedule):
    for blocks in (1, 7, 64):
        out = torch.zeros(1)
        library.call("run_last_block", out, torch.empty(blocks), blocks, schedule=schedule)
        assert out.item() == blocks * (blocks + 1) / 2
    for blocks in (2, 9):
        library.call("run_wait", out, torch.zeros(blocks, dtype=torch.int32), blocks, schedule=schedule, time_limit=30)
        assert out.item() == blocks


def test_endless_loop(library):
    with pytest.raises(Finding, match=r"time limit: the launch has not ended in time: [12] of its 2 blocks were begun"):
        library.call("run_forever", torch.zeros(1), time_limit=0.3)
    out = torch.empty(64)
    library.call("run_shared", out, 64)  # and the next launch runs as if nothing had happened
    assert out.isfinite().all()


def test_barriers_without_end(library):
    loop = 1 + Path(__file__).read_text().split("\n").index("    while (true) __syncthreads();")
    for _ in range(3):  # a starved machine's time may be over while a thread is still in front of the loop
        with pytest.raises(Finding, match="time limit: the launch has not ended in time: 1 of its 1 blocks") as found:
            library.call("run_barriers_forever", torch.zeros(1), time_limit=0.3)
        if found.value.line != loop - 1:
            break
    assert found.value.line == loop


def test_a_launch_that_is_too_large_for_its_time(library):
    with pytest.raises(
        Finding, match=r"time limit: .* of its 1000000000 blocks were begun, so that smaller sizes or more time"
    ):
        library.call("run_many", torch.ones(1), 1_000_000_000, time_limit=0.3)


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_debug_build(mode):
    library = KernelLibrary(TEXT, mode, "debug", debug=True)
    given, out = torch.rand(100), torch.empty(100)
    library.call("run_scale", out, given, 0.5, 100)
    torch.testing.assert_close(out, given * 0.5 * 2 + given * 0.5 * 2 * 3)
    library.close()
