// Makes the mistake that its argument names, and else none.
#include <cublas_v2.h>
#include <stdio.h>

#include <string>

#include "mistakes.cuh"

__constant__ int scale[2] = {1, 1};

__global__ void store(int* out, int first) { put(out, first + threadIdx.x, threadIdx.x * scale[0]); }
__global__ void race(int* out) {
    *out += threadIdx.x;  // race
}
__global__ void endless(volatile int* flag, int* out) {
    for (int i = 0; !*flag; ++i) *out = i;  // endless
}
__global__ void fill(int* out) {
    out[threadIdx.x] = 1;  // pinned
}
__global__ void speak(const int* in) { printf("thread %d of %d\n", in[threadIdx.x], blockDim.x); }

void product(int* written) {
    float *unwritten, one = 1, zero = 0;
    cublasHandle_t handle;
    cublasCreate(&handle);
    cudaMalloc(&unwritten, 4 * sizeof(float));
    cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, (float*)written, 2, unwritten, 2, &zero, unwritten, 2);  // product
}

int main(int count, char** arguments) {
    const std::string mistake = count > 1 ? arguments[1] : "none";
    int *device, host[4] = {}, many[8] = {};
    cudaMalloc(&device, sizeof host);
    store<<<1, 4>>>(device, mistake == "bounds");
    if (mistake == "race") race<<<1, 2>>>(device);
    if (mistake == "endless") endless<<<1, 1>>>(device, device + 1);
    if (mistake == "host reads") host[0] = device[1];  // host reads
    if (mistake == "direction") cudaMemcpy(host, device, sizeof host, cudaMemcpyHostToDevice);  // direction
    if (mistake == "too much") cudaMemcpy(many, device, sizeof many, cudaMemcpyDeviceToHost);  // too much
    if (mistake == "symbol") cudaMemcpyToSymbol(scale, many, sizeof many);  // symbol
    if (mistake == "set on host") cudaMemset(host, 0, sizeof host);  // set on host
    if (mistake == "freed inside") cudaFree(device + 1);  // freed inside
    if (mistake == "product") product(device);
    if (mistake == "pinned") cudaHostRegister(many, sizeof many, cudaHostRegisterMapped), fill<<<1, 8>>>(many);
    speak<<<1, 4>>>(device);
    cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost);
    printf("sum %d\n", host[0] + host[1] + host[2] + host[3]);
    cudaFree(device);
    if (mistake == "freed twice") cudaFree(device);  // freed twice
    return 7;
}
