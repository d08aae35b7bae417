// Declarations that nvcc takes and a plain C++ compiler does not.
#include "expect.h"

__device__ __forceinline__ int sum(int a, int b) { return a + b; }
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
template <class F>
__device__ int over_warp(int value, F combine) {
    for (int offset = 16; offset; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}
__device__ int five() __attribute__((always_inline));
__device__ int five() { return 5; }

// C's library has a function of this name, with overloads in C++.
__global__ void div(int* out) {
    out[threadIdx.x] = over_warp(threadIdx.x, sum);
    out[32 + threadIdx.x] = over_warp(threadIdx.x, larger) + five();
}
__global__ void turn(int* out) {
    extern int __shared__ values[];
    int __shared__ first;
    values[threadIdx.x] = out[threadIdx.x] + threadIdx.x;
    if (threadIdx.x == 0) first = 1;
    __syncthreads();
    out[threadIdx.x] = values[31 - threadIdx.x] + first;
}
// The function that launches a kernel may have its name.
__global__ void fill(int* out, int value) { out[threadIdx.x] = value; }
static void fill(int* out, int value, int threads) { fill<<<1, threads>>>(out, value); }

int main() {
    int *out, back[64];
    cudaMalloc(&out, sizeof back);
    div<<<1, 32>>>(out);
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    EXPECT(back[7] == 31 * 16 && back[32 + 9] == 31 + 5);
    turn<<<1, 32, 32 * sizeof(int)>>>(out);
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    EXPECT(back[0] == 31 * 16 + 31 + 1 && back[31] == 31 * 16 + 1);
    fill(out, 3, 32);
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    EXPECT(back[0] == 3 && back[31] == 3);
}
