// fp8: roundings to nearest even, the largest numbers, subnormal ones, pairs and fours. By the formats of the OCP's specification.
#include <cuda_fp8.h>

#include <math.h>

#include "expect.h"

struct Case {
    float x;
    int e4m3, e5m2;
};
const Case CASES[] = {
    {0.0f, 0x00, 0x00},      {-0.0f, 0x80, 0x80},     {1.0f, 0x38, 0x3c},      {-1.5f, 0xbc, 0xbe},
    {1.0625f, 0x38, 0x3c},   {1.1875f, 0x3a, 0x3d},   {448.0f, 0x7e, 0x5f},    {464.0f, 0x7e, 0x5f},
    {464.5f, 0x7e, 0x5f},    {57344.0f, 0x7e, 0x7b},  {1e30f, 0x7e, 0x7b},     {INFINITY, 0x7e, 0x7b},
    {0x1p-9f, 0x01, 0x18},   {0x1p-10f, 0x00, 0x14},  {0x1.8p-9f, 0x02, 0x1a}, {0x1p-16f, 0x00, 0x01},
    {0x1p-17f, 0x00, 0x00},  {0x1.8p-17f, 0x00, 0x01}, {0x1.ep-7f, 0x08, 0x24}, {0x1p-14f, 0x00, 0x04},
};

template <class T>
__global__ void both_ways(const float* x, int* bits, float* back) {
    const T small(x[threadIdx.x]);
    bits[threadIdx.x] = small.__x;
    back[threadIdx.x] = float(small) + 0 * float(__half(small));
}
__global__ void together(float4* out) {
    const __nv_fp8x4_e4m3 four(make_float4(1.5f, -3.25f, 500.0f, 0x1p-9f));
    const __nv_fp8x2_e5m2 two(__floats2half2_rn(0.3f, -7.0f));
    out[0] = float4(four);
    const float2 pair = float2(two);
    out[1] = make_float4(pair.x, pair.y, float(__nv_fp8_e5m2(-7)), int(__nv_fp8_e4m3(3.9)));
}

int main() {
    constexpr int N = sizeof CASES / sizeof *CASES;
    float *x, *back;
    int* bits;
    float4* out;
    cudaMallocManaged(&x, sizeof(float) * N), cudaMallocManaged(&back, sizeof(float) * N);
    cudaMallocManaged(&bits, sizeof(int) * N), cudaMallocManaged(&out, 2 * sizeof(float4));
    for (int i = 0; i < N; ++i) x[i] = CASES[i].x;
    both_ways<__nv_fp8_e4m3><<<1, N>>>(x, bits, back);
    cudaDeviceSynchronize();
    for (int i = 0; i < N; ++i) EXPECT(bits[i] == CASES[i].e4m3);
    EXPECT(back[8] == 448 && back[12] == 0x1p-9f && back[3] == -1.5f);
    both_ways<__nv_fp8_e5m2><<<1, N>>>(x, bits, back);
    cudaDeviceSynchronize();
    for (int i = 0; i < N; ++i) EXPECT(bits[i] == CASES[i].e5m2);
    EXPECT(back[9] == 57344 && back[15] == 0x1p-16f && back[5] == 1.25f);

    together<<<1, 1>>>(out);
    cudaDeviceSynchronize();
    EXPECT(out[0].x == 1.5f && out[0].y == -3.25f && out[0].z == 448 && out[0].w == 0x1p-9f);
    EXPECT(out[1].x == 0.3125f && out[1].y == -7 && out[1].z == -7 && out[1].w == 4);

    const auto half_of = [](__nv_fp8_storage_t v, __nv_fp8_interpretation_t kind) {
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(v, kind)));
    };
    EXPECT(__nv_cvt_float_to_fp8(1e4f, __NV_NOSAT, __NV_E4M3) == 0x7f && isnan(half_of(0x7f, __NV_E4M3)));
    EXPECT(__nv_cvt_float_to_fp8(-1e9f, __NV_NOSAT, __NV_E5M2) == 0xfc && half_of(0xfc, __NV_E5M2) == -INFINITY);
    EXPECT(isnan(float(__nv_fp8_e4m3(NAN))) && isnan(float(__nv_fp8_e5m2(NAN))));
    EXPECT(__nv_cvt_float2_to_fp8x2(make_float2(1, -1), __NV_SATFINITE, __NV_E4M3) == 0xb838);
    for (int v = 0; v < 256; ++v)  // what is a number of 8 bits stays what it is
        if ((v & 0x7f) < 0x7c) {
            EXPECT(__nv_cvt_float_to_fp8(half_of(v, __NV_E4M3), __NV_SATFINITE, __NV_E4M3) == v);
            EXPECT(__nv_cvt_float_to_fp8(half_of(v, __NV_E5M2), __NV_SATFINITE, __NV_E5M2) == v);
        }
}
