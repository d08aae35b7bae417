"""Parts of the language whose results can be compared with PyTorch's: matrices, half precision, warps, groups."""

import pytest
import torch

from playground.emulator.kernels import KernelLibrary

TEXT = r"""
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace cg = cooperative_groups;

__device__ unsigned tf32(float x) {
    unsigned u;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(x));
    return u;
}
__device__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// C (16 x 8) = A (16 x 8) B (8 x 8)
__global__ void product_tf32(float* C, const float* A, const float* B) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const unsigned a[4] = {tf32(A[g * 8 + t]), tf32(A[(g + 8) * 8 + t]), tf32(A[g * 8 + t + 4]), tf32(A[(g + 8) * 8 + t + 4])};
    const unsigned b[2] = {tf32(B[t * 8 + g]), tf32(B[(t + 4) * 8 + g])};
    float d[4] = {};
    mma_tf32(d, a, b);
    C[g * 8 + 2 * t] = d[0], C[g * 8 + 2 * t + 1] = d[1];
    C[(g + 8) * 8 + 2 * t] = d[2], C[(g + 8) * 8 + 2 * t + 1] = d[3];
}

#define FOUR(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
__device__ void ldmatrix_x4(unsigned (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(p)));
}
__device__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"((unsigned)__cvta_generic_to_shared(p)));
}
template <class T>
__device__ void mma_16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (sizeof(T) == 2 && T(1.0f).__x == 0x3c00 * 0 + T(1.0f).__x) {}
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : FOUR(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ void mma_16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : FOUR(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// C (16 x 8) = A (16 x 16) B (16 x 8), both rounded to T in shared memory
template <class T>
__global__ void product_16(float* C, const float* A, const float* B) {
    __shared__ alignas(16) T a[16][16 + 8];
    __shared__ alignas(16) T b[16][8];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) a[i / 16][i % 16] = T(A[i]);
    for (int i = lane; i < 128; i += 32) b[i / 8][i % 8] = T(B[i]);
    __syncwarp();
    unsigned fa[4], fb[2];
    ldmatrix_x4(fa, &a[lane % 16][lane / 16 * 8]);
    ldmatrix_x2_trans(fb, &b[lane % 16][0]);
    float d[4] = {};
    mma_16<T>(d, fa, fb);
    C[g * 8 + 2 * t] = d[0], C[g * 8 + 2 * t + 1] = d[1];
    C[(g + 8) * 8 + 2 * t] = d[2], C[(g + 8) * 8 + 2 * t + 1] = d[3];
}

template <class T>
__global__ void axpy(T* y, const T* x, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = T(a) * x[i] + y[i];
}
__global__ void pairs(__half2* y, const __half2* x) { y[threadIdx.x] = __hmul2(x[threadIdx.x], __float2half2_rn(3.0f)); }

__global__ void votes(unsigned* out) {
    const int lane = threadIdx.x;
    out[lane] = __ballot_sync(~0u, lane % 3 == 0);
    out[32 + lane] = __match_any_sync(~0u, lane / 5);
    out[64 + lane] = __reduce_add_sync(~0u, lane);
    out[96 + lane] = __reduce_max_sync(~0u, lane ^ 5);
    out[128 + lane] = __any_sync(~0u, lane == 7) + 2 * __all_sync(~0u, lane < 32) + 4 * __all_sync(~0u, lane < 31);
    int same;
    out[160 + lane] = __match_all_sync(~0u, 9, &same) + same;
    out[192 + lane] = __shfl_up_sync(~0u, lane, 3) + 100 * __shfl_sync(~0u, lane, 5, 8);
}
__global__ void groups(float* out, const float* in) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<16> tile = cg::tiled_partition<16>(block);
    float v = in[block.thread_rank()];
    v = cg::reduce(tile, v, cg::plus<float>());
    block.sync();
    if (tile.thread_rank() == 0) out[tile.meta_group_rank()] = v;
}
__global__ void counted(int* out) {
    out[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0) * 100 + __syncthreads_or(threadIdx.x == 9) * 10 +
                       __syncthreads_and(threadIdx.x < 64);
}
__global__ void integers(int* out) {
    out[0] = __popc(0xf0f0u), out[1] = __clz(1), out[2] = __ffs(8);
    out[3] = (int)__brev(1u), out[4] = __byte_perm(0x03020100, 0x07060504, 0x5140);
    out[5] = __float2int_rn(2.5f), out[6] = __float2int_rz(-1.9f);
    out[7] = __umulhi(1u << 31, 6), out[8] = __float2int_rn(1e20f);
    out[9] = min(3, 7u), out[10] = max(-3, 4), out[11] = __float_as_int(1.0f);
}
__device__ unsigned sums[2][3] = {{1, 2, 3}, {4}}, count;
static __device__ __align__(16) float4 corner = {1, 2, 3, 4};
__device__ const int WIDTH = 3;
__device__ volatile int* nowhere;
__global__ void variables(int* out) {
    if (threadIdx.x < 2 * WIDTH) out[threadIdx.x] = atomicAdd(&sums[threadIdx.x / 3][threadIdx.x % 3], 10u);
    if (threadIdx.x == 6) out[6] = corner.w + count++ + (nowhere == nullptr) + sizeof sums;
}
__global__ void active(unsigned* out) {
    const int lane = threadIdx.x % 32;
    unsigned mask = 0, again = 0;
    if (lane % 3) {
        mask = __activemask();
        if (lane % 3 == 1) again = __activemask() + __shfl_sync(mask & 0x92492492u, lane, 4);
    }
    __syncthreads();
    out[threadIdx.x] = mask, out[64 + threadIdx.x] = again;
}
extern "C" {
void run_variables(int* out) { variables<<<1, 32>>>(out); }
void set_sums(unsigned* values) { cudaMemcpyToSymbol(sums, values, sizeof sums); }
void get_sums(unsigned* values) { cudaMemcpyFromSymbol(values, sums, sizeof sums); }
void run_active(unsigned* out) { active<<<1, 64>>>(out); }
void run_product_tf32(float* C, float* A, float* B) { product_tf32<<<1, 32>>>(C, A, B); }
void run_product_f16(float* C, float* A, float* B) { product_16<__half><<<1, 32>>>(C, A, B); }
void run_product_bf16(float* C, float* A, float* B) { product_16<__nv_bfloat16><<<1, 32>>>(C, A, B); }
void run_axpy_f16(__half* y, __half* x, float a, int n) { axpy<<<(n + 63) / 64, 64>>>(y, x, a, n); }
void run_axpy_bf16(__nv_bfloat16* y, __nv_bfloat16* x, float a, int n) { axpy<<<(n + 63) / 64, 64>>>(y, x, a, n); }
void run_pairs(__half2* y, __half2* x) { pairs<<<1, 32>>>(y, x); }
void run_votes(unsigned* out) { votes<<<1, 32>>>(out); }
void run_groups(float* out, float* in) { groups<<<1, 64>>>(out, in); }
void run_counted(int* out) { counted<<<1, 64>>>(out); }
void run_integers(int* out) { integers<<<1, 1>>>(out); }
}
"""
TEXT = TEXT.replace("    if constexpr (sizeof(T) == 2 && T(1.0f).__x == 0x3c00 * 0 + T(1.0f).__x) {}\n", "")


@pytest.fixture(scope="module", params=["fast", "check"])
def library(request):
    library = KernelLibrary(TEXT, request.param, "language")
    yield library
    library.close()


def to_tf32(x):
    """Rounded to the nearest number of ten mantissa bits, ties away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_matrix_product_tf32(library):
    a, b, c = torch.randn(16, 8), torch.randn(8, 8), torch.empty(16, 8)
    library.call("run_product_tf32", c, a, b)
    torch.testing.assert_close(c, to_tf32(a) @ to_tf32(b), rtol=1e-5, atol=1e-5)
    ones = torch.ones(16, 8)  # exact in every format
    library.call("run_product_tf32", c, ones, torch.eye(8))
    assert torch.equal(c, ones)


@pytest.mark.parametrize("name, kind", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_matrix_product_16(library, name, kind):
    a, b, c = torch.randn(16, 16), torch.randn(16, 8), torch.empty(16, 8)
    library.call(f"run_product_{name}", c, a, b)
    torch.testing.assert_close(c, a.to(kind).float() @ b.to(kind).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, kind", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision(library, name, kind):
    x, y = torch.randn(99).to(kind), torch.randn(99).to(kind)
    expected = (x * torch.tensor(1.7, dtype=kind)) + y
    library.call(f"run_axpy_{name}", y, x, 1.7, 99)
    assert torch.equal(y, expected)


def test_pairs(library):
    x, y = torch.randn(64).half(), torch.empty(64).half()
    library.call("run_pairs", y, x)
    assert torch.equal(y, x * 3)


def test_votes(library):
    out = torch.zeros(224, dtype=torch.int32)
    library.call("run_votes", out)
    lanes = range(32)
    rows = out.view(7, 32).tolist()
    unsigned = [[v & 0xFFFFFFFF for v in row] for row in rows]
    assert unsigned[0] == [sum(1 << i for i in lanes if i % 3 == 0)] * 32
    assert unsigned[1] == [sum(1 << j for j in lanes if j // 5 == i // 5) for i in lanes]
    assert unsigned[2] == [496] * 32
    assert unsigned[3] == [31] * 32
    assert unsigned[4] == [3] * 32
    assert unsigned[5] == [0] * 32  # the whole mask, and 1
    assert unsigned[6] == [(i - 3 if i >= 3 else i) + 100 * (i // 8 * 8 + 5) for i in lanes]


def test_groups(library):
    given, out = torch.rand(64), torch.empty(4)
    library.call("run_groups", out, given)
    torch.testing.assert_close(out, given.view(4, 16).sum(1))


def test_counting_barriers(library):
    out = torch.empty(64, dtype=torch.int32)
    library.call("run_counted", out)
    assert out.tolist() == [22 * 100 + 10 + 1] * 64


def test_integers(library):
    out = torch.empty(12, dtype=torch.int32)
    library.call("run_integers", out)
    assert out.tolist() == [8, 31, 4, -(2**31), 0x05010400, 2, -1, 3, 2**31 - 1, 3, 4, 0x3F800000]


def test_device_variables(library):
    values, out = torch.tensor([1, 2, 3, 4, 0, 0], dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    library.call("set_sums", values)
    library.call("run_variables", out)
    assert out.tolist()[:6] == values.tolist()
    assert out[6] == 4 + 0 + 1 + 24  # nothing else runs the kernel in this library
    library.call("get_sums", out)
    assert out.tolist()[:6] == [11, 12, 13, 14, 10, 10]


@pytest.mark.parametrize("schedule", ["forward", "reversed", "random"])
def test_active_mask(library, schedule):
    """The lanes that come to one place together, whatever the order in which they run."""
    out = torch.empty(128, dtype=torch.int32)
    library.call("run_active", out, schedule=schedule)
    rows = [value & 0xFFFFFFFF for value in out.tolist()]
    mask = sum(1 << lane for lane in range(32) if lane % 3)
    inner = sum(1 << lane for lane in range(32) if lane % 3 == 1)
    assert rows[:64] == [mask if t % 32 % 3 else 0 for t in range(64)]
    assert rows[64:] == [inner + 4 if t % 32 % 3 == 1 else 0 for t in range(64)]
