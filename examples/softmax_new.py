"""A solution of softmax.py: a block for each row. Put a kernel of yours in its place."""

from torch import nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""
__global__ void softmax_kernel(const float* x, float* y, int n) {
    __shared__ float partial[256];
    int t = threadIdx.x;
    x += blockIdx.x * n, y += blockIdx.x * n;
    float m = -INFINITY, sum = 0;
    for (int i = t; i < n; i += 256) m = fmaxf(m, x[i]);
    partial[t] = m;
    __syncthreads();
    for (int s = 128; s > 0; s /= 2) {
        if (t < s) partial[t] = fmaxf(partial[t], partial[t + s]);
        __syncthreads();
    }
    m = partial[0];
    __syncthreads();  // all have read the maximum before the sums overwrite it
    for (int i = t; i < n; i += 256) sum += expf(x[i] - m);
    partial[t] = sum;
    __syncthreads();
    for (int s = 128; s > 0; s /= 2) {
        if (t < s) partial[t] += partial[t + s];
        __syncthreads();
    }
    for (int i = t; i < n; i += 256) y[i] = expf(x[i] - m) / partial[0];
}
torch::Tensor softmax(torch::Tensor x) {
    auto y = torch::empty_like(x);
    softmax_kernel<<<x.size(0), 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.size(1));
    return y;
}"""
module = load_inline("my_softmax", "torch::Tensor softmax(torch::Tensor x);", CUDA, functions=["softmax"])


class ModelNew(nn.Module):
    def forward(self, x):
        return module.softmax(x)
