// What older programs ask of the runtime and of cuBLAS besides kernels; directed conversions; OpenMP on the host.
#include <cublas_v2.h>

#include "expect.h"

__global__ void convert(const double* x, long long* out) {
    out[0] = __double2ll_rd(x[0]), out[1] = __double2int_ru(x[0]), out[2] = __float2uint_rn(2.5f);
    out[3] = __float2int_rz(-2.9f), out[4] = __double2uint_rd(-1.0);
    out[5] = (long long)__ll2double_ru((1ll << 53) + 1), out[6] = (long long)__ll2double_rd((1ll << 53) + 1);
    out[7] = (long long)__ull2double_rz((1ull << 62) + 1), out[8] = (long long)__int2float_ru(16777217);
    out[9] = __vadd2(0x0001ffffu, 0x00010001u), out[10] = __vavgu4(0x01020304u, 0x03020104u), out[11] = __vsads2(5u, 0xfffeu);
}

int main() {
    double* x;
    long long* out;
    cudaMallocManaged(&x, 8), cudaMallocManaged(&out, 8 * 12);
    *x = -2.5;
    convert<<<1, 1>>>(x, out);
    cudaDeviceSynchronize();
    EXPECT(out[0] == -3 && out[1] == -2 && out[2] == 2 && out[3] == -2 && out[4] == 0);
    EXPECT(out[5] == (1ll << 53) + 2 && out[6] == 1ll << 53 && out[7] == 1ll << 62 && out[8] == 16777218);
    EXPECT(out[9] == 0x00020000 && out[10] == 0x02020204 && out[11] == 7);

    cudaSharedMemConfig banks;
    cudaDeviceSetSharedMemConfig(cudaSharedMemBankSizeEightByte);
    EXPECT(cudaDeviceGetSharedMemConfig(&banks) == cudaSuccess && banks == cudaSharedMemBankSizeFourByte);
    EXPECT(cudaFuncSetSharedMemConfig(convert, cudaSharedMemBankSizeDefault) == cudaSuccess);

    int can = 1, *p, *q, host[4] = {1, 2, 3, 4}, back[4] = {};
    cudaMalloc(&p, 16), cudaMalloc(&q, 16);
    EXPECT(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && can == 0);
    cudaMemcpy(p, host, 16, cudaMemcpyHostToDevice);
    EXPECT(cudaMemcpyPeer(q, 0, p, 0, 16) == cudaSuccess && cudaMemcpyPeerAsync(q, 0, p, 0, 16, nullptr) == cudaSuccess);
    EXPECT(cudaMemcpyPeer(q, 1, p, 0, 16) == cudaErrorInvalidDevice);
    EXPECT(cublasGetVector(2, 4, q, 2, back, 1) == CUBLAS_STATUS_SUCCESS && back[0] == 1 && back[1] == 3);
    EXPECT(cublasSetMatrix(1, 2, 4, host, 2, q, 1) == CUBLAS_STATUS_SUCCESS);
    EXPECT(cublasGetMatrix(2, 1, 4, q, 2, back, 2) == CUBLAS_STATUS_SUCCESS && back[0] == 1 && back[1] == 3);
    EXPECT(cublasSetVectorAsync(2, 4, host + 2, 1, q, 1, nullptr) == CUBLAS_STATUS_SUCCESS);
    EXPECT(cublasGetVector(2, 4, q, 1, back, 1) == CUBLAS_STATUS_SUCCESS && back[1] == 4);
    cublasHandle_t handle;
    cudaStream_t mine, stream;
    cublasMath_t mode;
    cudaStreamCreate(&mine), cublasCreate(&handle);
    cublasSetStream(handle, mine), cublasSetMathMode(handle, CUBLAS_PEDANTIC_MATH);
    EXPECT(cublasGetStream(handle, &stream) == CUBLAS_STATUS_SUCCESS && stream == mine);
    EXPECT(cublasGetMathMode(handle, &mode) == CUBLAS_STATUS_SUCCESS && mode == CUBLAS_PEDANTIC_MATH);

    int sum = 0, threads = 1;
#pragma omp parallel for reduction(+ : sum) num_threads(3)
    for (int i = 0; i < 100; ++i) {
        sum += i;
#ifdef _OPENMP
        threads = 3;
#endif
    }
    EXPECT(sum == 4950 && threads == 3);
}
