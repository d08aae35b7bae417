"""A thread for each element; the result goes to the output that comes with the data."""

from task import input_t, output_t
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <cuda_fp16.h>

__global__ void scale_and_clip(const __half *values, const float *scales, __half *output, int64_t columns, int64_t count)
{
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    const float scaled = __half2float(values[i]) * scales[i / columns];
    output[i] = __float2half(scaled < -1.0f ? -1.0f : scaled > 1.0f ? 1.0f : scaled); // a NaN stays one
}

void launch(torch::Tensor values, torch::Tensor scales, torch::Tensor output)
{
    const int64_t count = values.numel();
    const int threads = 256;
    scale_and_clip<<<(count + threads - 1) / threads, threads>>>(
        reinterpret_cast<const __half *>(values.data_ptr()), scales.data_ptr<float>(),
        reinterpret_cast<__half *>(output.data_ptr()), values.size(1), count);
}
"""

module = load_inline(
    name="scale_and_clip",
    cpp_sources="void launch(torch::Tensor values, torch::Tensor scales, torch::Tensor output);",
    cuda_sources=CUDA,
    functions=["launch"],
)


def custom_kernel(data: input_t) -> output_t:
    values, scales, output = data
    module.launch(values, scales, output)
    return output
