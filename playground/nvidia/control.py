"""A mistake for each tool to find. A tool that does not see it sees nothing: its silence about a variant is then no result."""

import torch

NAME = "playground_control"

CUDA = r"""
#include <cuda_runtime.h>

// `one` is a single float, which the third kernel must be the first to touch.
__global__ void playground_control_memcheck(float* one) { one[16] = 1.0f; }

__global__ void playground_control_racecheck(float* one) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    if (shared[63 - threadIdx.x] < -1.0f) *one = 1.0f;  // no barrier in between
}

__global__ void playground_control_initcheck(float* one) {
    if (*one == 12345.0f) *one = 1.0f;
}

__global__ void playground_control_synccheck(float* one) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    __syncthreads();  // here the others wait
    *one = 1.0f;
}

void launch_control(int tool, float* one) {
    if (tool == 0) playground_control_memcheck<<<1, 1>>>(one);
    if (tool == 1) playground_control_racecheck<<<1, 64>>>(one);
    if (tool == 2) playground_control_initcheck<<<1, 1>>>(one);
    if (tool == 3) playground_control_synccheck<<<1, 64>>>(one);
}
"""

BINDING = r"""
#include <ATen/core/Tensor.h>
#include <torch/library.h>

void launch_control(int tool, float* one);

void control(int64_t tool, const at::Tensor& one) { launch_control(tool, one.mutable_data_ptr<float>()); }

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("control(int tool, Tensor(a!) one) -> ()", &control); }
"""

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def kernel_of(tool):
    """Return the name of the kernel that holds the tool's mistake."""
    return f"{NAME}_{tool}"


def build(load_inline, device="cuda"):
    """Return the function control(tool) that makes the tool's mistake on the device. `load_inline` is torch's."""
    load_inline(NAME, BINDING, CUDA, extra_cuda_cflags=["-lineinfo"], is_python_module=False, no_implicit_headers=True)

    def control(tool):
        torch.ops.playground_control.control(_TOOLS.index(tool), torch.empty(1, device=device))
        if device == "cuda":
            torch.cuda.synchronize()

    return control
