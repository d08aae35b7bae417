"""How fast the emulator is: three textbook kernels in its three modes, in millions of multiply-adds a second on one core.

    python -m cuda_emulator.speed

Each mode has a process of its own, as libraries of one mode do. Every result is compared with PyTorch before it is timed.
"""

import json
import subprocess
import sys
import time

import torch

TEXT = r"""
#include <cstdint>

// A thread an output; a grid's third dimension is the output channel.
__global__ void convolution(const float* x, const float* weight, float* y, int channels, int size) {
    const int side = size - 2, column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    const int out = blockIdx.z;
    if (row >= side || column >= side) return;
    float sum = 0;
    for (int c = 0; c < channels; ++c)
        for (int u = 0; u < 3; ++u)
            for (int v = 0; v < 3; ++v)
                sum += weight[(out * channels + c) * 9 + u * 3 + v] * x[(c * size + row + u) * size + column + v];
    y[(out * side + row) * side + column] = sum;
}

__global__ void product(const float* a, const float* b, float* c, int n) {
    __shared__ float left[16][16], right[16][16];
    const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        left[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
        __syncthreads();
        for (int i = 0; i < 16; ++i) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}

__device__ void multiply(float (&d)[4], const float (&a)[4], float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// One warp a tile of 16 x 8.
__global__ void tensor_core(const float* a, const float* b, float* c, int n) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
    float d[4] = {};
    for (int k = 0; k < n; k += 8) {
        const float* const p = a + row * n + k + t;
        const float part[4] = {p[0], p[8 * n], p[4], p[8 * n + 4]};
        multiply(d, part, b[(k + t) * n + column + g], b[(k + t + 4) * n + column + g]);
    }
    for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * n + column + 2 * t + i % 2] = d[i];
}

extern "C" {
void run_convolution(float* x, float* weight, float* y, int channels, int size, int outputs) {
    const dim3 blocks((size - 2 + 31) / 32, (size - 2 + 7) / 8, outputs);
    convolution<<<blocks, dim3(32, 8)>>>(x, weight, y, channels, size);
}
void run_product(float* a, float* b, float* c, int n) { product<<<dim3(n / 16, n / 16), dim3(16, 16)>>>(a, b, c, n); }
void run_tensor_core(float* a, float* b, float* c, int n) { tensor_core<<<dim3(n / 8, n / 16), 32>>>(a, b, c, n); }
}
"""

MODES = ("fast", "check", "count")
KERNELS = {
    "convolution": "direct convolution",
    "product": "16 x 16 tiled matrix product in shared memory",
    "tensor_core": "`mma.sync` m16n8k8 TF32",
}
SIZES = {"fast": 256, "check": 128, "count": 64}  # of the matrices
REPEATS = 5


def measure(mode, repeats=REPEATS):
    """{kernel: millions of multiply-adds a second}, the best of some runs, in this process."""
    from cuda_emulator.kernels import KernelLibrary

    torch.manual_seed(0)
    library = KernelLibrary(TEXT, mode)
    try:
        n, channels, outputs, size = SIZES[mode], 32, 16, SIZES[mode] // 8 + 2
        x, weight, y = (
            torch.randn(channels, size, size),
            torch.randn(outputs, channels, 3, 3),
            torch.empty(outputs, size - 2, size - 2),
        )
        a, b, c = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
        calls = {
            "convolution": ((x, weight, y, channels, size, outputs), y.numel() * channels * 9),
            "product": ((a, b, c, n), n**3),
            "tensor_core": ((a, b, c, n), n**3),
        }
        expected = {"convolution": torch.conv2d(x[None], weight)[0], "product": a @ b, "tensor_core": a @ b}
        speeds = {}
        for name, (arguments, work) in calls.items():
            seconds = []
            for _ in range(repeats):
                began = time.process_time()
                library.call(f"run_{name}", *arguments, processors=1)
                seconds.append(time.process_time() - began)
            error = (arguments[2] - expected[name]).abs().max() / expected[name].std()
            if not error < 1e-2:
                raise ArithmeticError(f"{name} in {mode} mode is off by {error:.1e}")
            speeds[name] = work / min(seconds) / 1e6
        return speeds
    finally:
        library.close()


def table():
    """The rows, as text in Markdown."""
    speeds = {}
    for mode in MODES:
        command = [sys.executable, "-m", "cuda_emulator.speed", mode]
        speeds[mode] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    lines = ["| | " + " | ".join(MODES) + " |", "|---" * (1 + len(MODES)) + "|"]
    for name, title in KERNELS.items():
        lines.append(f"| {title} | " + " | ".join(f"{float(f'{speeds[mode][name]:.2g}'):.0f}" for mode in MODES) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])) if sys.argv[1:] else table())
