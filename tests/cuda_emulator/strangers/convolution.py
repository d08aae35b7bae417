import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

conv_source = r"""
#include <torch/extension.h>
#include <vector>

__global__ void conv2d_kernel(
    const float* __restrict__ input,
    const float* __restrict__ weight,
    const float* __restrict__ bias,
    float* __restrict__ output,
    int batch, int in_channels, int height, int width,
    int out_channels, int kernel, int stride, int padding, int out_h, int out_w
) {
    int total = batch * out_channels * out_h * out_w;
    for (int idx = blockIdx.x * blockDim.x + threadIdx.x; idx < total; idx += gridDim.x * blockDim.x) {
        int ow = idx % out_w;
        int oh = (idx / out_w) % out_h;
        int oc = (idx / (out_w * out_h)) % out_channels;
        int b = idx / (out_w * out_h * out_channels);
        float sum = bias != nullptr ? bias[oc] : 0.0f;
        for (int ic = 0; ic < in_channels; ++ic)
            for (int kh = 0; kh < kernel; ++kh)
                for (int kw = 0; kw < kernel; ++kw) {
                    int ih = oh * stride - padding + kh;
                    int iw = ow * stride - padding + kw;
                    if (ih >= 0 && ih < height && iw >= 0 && iw < width)
                        sum += input[((b * in_channels + ic) * height + ih) * width + iw] *
                               weight[((oc * in_channels + ic) * kernel + kh) * kernel + kw];
                }
        output[idx] = fmaxf(sum, 0.0f);
    }
}

std::vector<torch::Tensor> conv2d_relu(torch::Tensor input, torch::Tensor weight, torch::Tensor bias,
                                       int64_t stride, int64_t padding) {
    auto in = input.contiguous();
    int batch = in.size(0), in_channels = in.size(1), height = in.size(2), width = in.size(3);
    int out_channels = weight.size(0), kernel = weight.size(2);
    int out_h = (height + 2 * padding - kernel) / stride + 1;
    int out_w = (width + 2 * padding - kernel) / stride + 1;
    auto options = torch::TensorOptions().dtype(input.dtype()).device(input.device());
    auto output = torch::empty({batch, out_channels, out_h, out_w}, options);
    int total = output.numel();
    conv2d_kernel<<<std::min((total + 255) / 256, 16), 256>>>(
        in.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), output.data_ptr<float>(),
        batch, in_channels, height, width, out_channels, kernel, stride, padding, out_h, out_w);
    return {output};
}
"""

cpp_source = """
#include <vector>
std::vector<torch::Tensor> conv2d_relu(torch::Tensor input, torch::Tensor weight, torch::Tensor bias,
                                       int64_t stride, int64_t padding);
"""

conv = load_inline(name="stranger_convolution", cpp_sources=cpp_source, cuda_sources=conv_source, functions=["conv2d_relu"])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x):
        return conv.conv2d_relu(x, self.conv.weight, self.conv.bias, 1, 1)[0]


def reference(x):
    return torch.relu(ModelNew().conv(x))


def get_inputs():
    return [torch.randn(2, 3, 13, 11)]


BROKEN = ("ih < height && iw >= 0", "ih <= height && iw >= 0", "global memory out of bounds")
