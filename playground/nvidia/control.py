"""A mistake for each tool to find. A tool that does not see it sees nothing: its silence about a variant is then no result."""

import ctypes

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

extern "C" void launch_control(int tool, float* one) {
    if (tool == 0) playground_control_memcheck<<<1, 1>>>(one);
    if (tool == 1) playground_control_racecheck<<<1, 64>>>(one);
    if (tool == 2) playground_control_initcheck<<<1, 1>>>(one);
    if (tool == 3) playground_control_synccheck<<<1, 64>>>(one);
}
"""

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def kernel_of(tool):
    """Return the name of the kernel that holds the tool's mistake."""
    return f"{NAME}_{tool}"


def build(load_inline, device="cuda"):
    """Return the function control(tool) that makes the tool's mistake on the device. `load_inline` is torch's."""
    import torch

    options = {"extra_cuda_cflags": ["-lineinfo"], "is_python_module": False, "no_implicit_headers": True}
    library = ctypes.CDLL(load_inline(NAME, "", CUDA, **options))

    def control(tool):
        one = torch.empty(1, device=device)
        library.launch_control(_TOOLS.index(tool), ctypes.c_void_p(one.data_ptr()))
        if device == "cuda":
            torch.cuda.synchronize()

    return control
