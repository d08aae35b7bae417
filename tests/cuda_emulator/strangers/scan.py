import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

scan_source = """
#include <torch/extension.h>
namespace F = torch::nn::functional;
#include <cuda_runtime.h>

constexpr int BLOCK = 256;

__global__ void cumsum_kernel(const float* __restrict__ in, float* __restrict__ out, int n) {
    __shared__ float buffer[2][BLOCK];
    const int row = blockIdx.x;
    const int tid = threadIdx.x;
    float carry = 0.0f;
    for (int start = 0; start < n; start += BLOCK) {
        int i = start + tid;
        int pin = 0, pout = 1;
        buffer[pin][tid] = i < n ? in[row * n + i] : 0.0f;
        __syncthreads();
        for (int offset = 1; offset < BLOCK; offset *= 2) {
            float v = buffer[pin][tid];
            if (tid >= offset) v += buffer[pin][tid - offset];
            buffer[pout][tid] = v;
            __syncthreads();
            pin = 1 - pin;
            pout = 1 - pout;
        }
        if (i < n) out[row * n + i] = buffer[pin][tid] + carry;
        carry += buffer[pin][BLOCK - 1];
        __syncthreads();
    }
}

torch::Tensor cumsum_cuda(torch::Tensor input) {
    TORCH_CHECK(input.is_cuda(), "input must be on the GPU");
    TORCH_CHECK(input.dim() == 2, "input must have two dimensions");
    auto output = torch::empty(input.sizes(), input.options());
    cumsum_kernel<<<input.size(0), BLOCK>>>(input.data_ptr<float>(), output.data_ptr<float>(), input.size(1));
    return output;
}
"""

scan = load_inline(
    name="stranger_scan",
    cpp_sources="torch::Tensor cumsum_cuda(torch::Tensor input);",
    cuda_sources=scan_source,
    functions=["cumsum_cuda"],
    verbose=False,
)


class ModelNew(nn.Module):
    def forward(self, x):
        return scan.cumsum_cuda(x)


def reference(x):
    return torch.cumsum(x, dim=1)


def get_inputs():
    return [torch.rand(3, 600)]


BROKEN = ("if (i < n) out[row * n + i]", "if (i < n - 1) out[row * n + i]", "output never written")
