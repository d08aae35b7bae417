import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
#define CHECK_CONTIGUOUS(x) TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")
#define CHECK_INPUT(x) CHECK_CUDA(x); CHECK_CONTIGUOUS(x)

template <typename scalar_t>
__global__ void softmax_kernel(const scalar_t* input, scalar_t* output, int cols) {
    extern __shared__ float sdata[];
    const scalar_t* row = input + (long)blockIdx.x * cols;
    scalar_t* out = output + (long)blockIdx.x * cols;
    int tid = threadIdx.x;

    float m = -FLT_MAX;
    for (int i = tid; i < cols; i += blockDim.x) m = fmaxf(m, (float)row[i]);
    sdata[tid] = m;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (tid < s) sdata[tid] = fmaxf(sdata[tid], sdata[tid + s]);
        __syncthreads();
    }
    m = sdata[0];
    __syncthreads();

    float sum = 0.0f;
    for (int i = tid; i < cols; i += blockDim.x) {
        float e = __expf((float)row[i] - m);
        out[i] = e;
        sum += e;
    }
    sdata[tid] = sum;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (tid < s) sdata[tid] += sdata[tid + s];
        __syncthreads();
    }
    sum = sdata[0];
    for (int i = tid; i < cols; i += blockDim.x) out[i] /= sum;
}

torch::Tensor softmax_cuda(torch::Tensor input) {
    CHECK_INPUT(input);
    auto output = torch::empty_like(input);
    const int rows = input.size(0), cols = input.size(1);
    const int threads = 128;
    AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "softmax_cuda", ([&] {
        softmax_kernel<scalar_t><<<rows, threads, threads * sizeof(float)>>>(
            input.data_ptr<scalar_t>(), output.data_ptr<scalar_t>(), cols);
    }));
    return output;
}
"""

softmax_ext = load_inline(
    name="stranger_softmax",
    cpp_sources=["torch::Tensor softmax_cuda(torch::Tensor input);"],
    cuda_sources=[cuda_source],
    functions=["softmax_cuda"],
    extra_cuda_cflags=["-O3", "--use_fast_math"],
    verbose=True,
)


class ModelNew(nn.Module):
    def forward(self, x):
        return softmax_ext.softmax_cuda(x)


def reference(x):
    return torch.softmax(x, dim=1)


def get_inputs():
    return [torch.randn(5, 333)]


BROKEN = ("    m = sdata[0];\n    __syncthreads();\n", "    m = sdata[0];\n\n", "shared memory race")
