import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

layer_norm_source = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

__inline__ __device__ float warpReduceSum(float val) {
    for (int mask = 16; mask > 0; mask >>= 1) val += __shfl_xor_sync(0xffffffff, val, mask, 32);
    return val;
}

__inline__ __device__ float blockReduceSum(float val) {
    static __shared__ float shared[32];
    int lane = threadIdx.x & 0x1f;
    int wid = threadIdx.x >> 5;
    val = warpReduceSum(val);
    __syncthreads();
    if (lane == 0) shared[wid] = val;
    __syncthreads();
    val = (lane < (blockDim.x >> 5)) ? shared[lane] : 0.0f;
    return warpReduceSum(val);
}

__global__ void layer_norm_kernel(const float* x, const float* gamma, const float* beta, float* y, int n, float eps) {
    const float* row = x + blockIdx.x * n;
    float sum = 0.0f, sq = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        sum += row[i];
    }
    float mean = blockReduceSum(sum) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float d = row[i] - mean;
        sq += d * d;
    }
    float rstd = rsqrtf(blockReduceSum(sq) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[blockIdx.x * n + i] = (row[i] - mean) * rstd * gamma[i] + beta[i];
    }
}

torch::Tensor layer_norm_forward(torch::Tensor x, torch::Tensor gamma, torch::Tensor beta, double eps) {
    TORCH_CHECK(x.device().is_cuda() && x.dtype() == torch::kFloat32, "expected a float32 CUDA tensor");
    const at::cuda::OptionalCUDAGuard device_guard(device_of(x));
    auto y = torch::zeros_like(x);
    int n = x.size(-1);
    int rows = x.numel() / n;
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    layer_norm_kernel<<<rows, 256, 0, stream>>>(x.data_ptr<float>(), gamma.data_ptr<float>(), beta.data_ptr<float>(),
                                                y.data_ptr<float>(), n, static_cast<float>(eps));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return y;
}
"""

layer_norm = load_inline(
    name="stranger_layer_norm",
    cpp_sources="torch::Tensor layer_norm_forward(torch::Tensor x, torch::Tensor gamma, torch::Tensor beta, double eps);",
    cuda_sources=layer_norm_source,
    functions=["layer_norm_forward"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(100)

    def forward(self, x):
        return layer_norm.layer_norm_forward(x.contiguous(), self.norm.weight, self.norm.bias, self.norm.eps)


def reference(x):
    return torch.nn.functional.layer_norm(x, (100,))


def get_inputs():
    return [torch.randn(3, 4, 100)]


BROKEN = (
    "if (lane == 0) shared[wid] = val;\n    __syncthreads();",
    "if (lane == 0) shared[wid] = val;\n",
    "shared memory race",
)
