"""Hopper kernels for the tests: tensor copies, matrix products of warpgroups, and a pipeline of both.

Plain CUDA for sm_90a: nvcc compiles the same text. Host functions return the CUresult of the tensor maps, or 0.
"""


def product(name, columns, element, inner, form):
    """A function for one wgmma. `form`: 'rs' (A in registers) or 'ss', with ' ta' and ' tb' for transposed operands."""
    count = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    registers = "rs" in form
    after_a = count + (4 if registers else 1)
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    transposed = "".join(f", {int(flag in form)}" for flag in ([" tb"] if registers else [" ta", " tb"]) if element != "tf32")
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if registers else '"l"(a)'
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k{inner}.f32.{element}.{element}"
    a_type = "const uint32_t (&a)[4]" if registers else "uint64_t a"
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], {a_type}, uint64_t b, int accumulate) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after_a + 1}, 0;\\n"
                 "{opcode} {{{accumulators}}}, {a}, %{after_a}, p, 1, 1{transposed};\\n}}"
                 : {outputs} : {inputs}, "l"(b), "r"(accumulate));
}}"""


WRAPPERS = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}
__device__ __forceinline__ void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nL1:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra L2;\nbra L1;\nL2:\n}"
                 ::"r"(address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load_2d(void* to, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(address(to)), "l"(map), "r"(x), "r"(y), "r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void load_3d(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(address(to)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void store_2d(const CUtensorMap* map, int x, int y, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(address(from)) : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT = 0>
__device__ __forceinline__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(uint32_t at, int leading, int stride, int layout) {
    return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)layout << 62;
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* at, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (found != cudaDriverEntryPointSuccess) return CUDA_ERROR_NOT_FOUND;
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    return ((Encode)function)(map, type, rank, (void*)at, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
// A matrix of `rows` rows of `columns` elements, and the box of it that is copied at once.
static CUresult encode_2d(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* at, int rows, int columns,
                          int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
    const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * element_bytes};
    const cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows};
    return encode(map, type, 2, at, sizes, strides, box, swizzle);
}
"""

# Each box of a 3-D tensor, as it lies in shared memory, goes to `out`.
COPIES = r"""
constexpr int STAGES = 2;
__global__ void boxes(const __grid_constant__ CUtensorMap map, float* out, int bytes, int count, const int3* starts) {
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const int pitch = (bytes + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) init(&full[s], 1), init(&empty[s], 64);
        publish();
        prefetch(&map);
    }
    __syncthreads();
    if (threadIdx.x == 64) {
        for (int i = 0; i < count; ++i) {
            const int s = i % STAGES;
            wait(&empty[s], i / STAGES + 1 & 1);
            expect(&full[s], bytes);
            load_3d(stages + s * pitch, &map, starts[i].x, starts[i].y, starts[i].z, &full[s]);
        }
    } else if (threadIdx.x < 64) {
        for (int i = 0; i < count; ++i) {
            const int s = i % STAGES;
            wait(&full[s], i / STAGES & 1);
            for (int at = threadIdx.x; at < bytes / 4; at += 64) out[i * bytes / 4 + at] = ((float*)(stages + s * pitch))[at];
            arrive(&empty[s]);
        }
    }
}
// A tile with a number in each element, stored through a tensor map: what lies outside the tensor is not written.
__global__ void tile_store(const __grid_constant__ CUtensorMap map, int x, int y) {
    __shared__ __align__(128) float tile[8 * 16];
    tile[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        store_2d(&map, x, y, tile);
        store_commit();
        store_wait();
    }
}
extern "C" int run_boxes(float* in, float* out, int* starts, int count, int nx, int ny, int nz, int bx, int by, int bz,
                         int swizzle) {
    const cuuint64_t sizes[3] = {(cuuint64_t)nx, (cuuint64_t)ny, (cuuint64_t)nz};
    const cuuint64_t strides[2] = {(cuuint64_t)nx * 4, (cuuint64_t)nx * ny * 4};
    const cuuint32_t box[3] = {(cuuint32_t)bx, (cuuint32_t)by, (cuuint32_t)bz};
    CUtensorMap map;
    const CUresult error =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, in, sizes, strides, box, (CUtensorMapSwizzle)swizzle);
    if (error) return error;
    const int bytes = bx * by * bz * 4, pitch = (bytes + 1023) / 1024 * 1024;
    boxes<<<1, 96, STAGES * pitch>>>(map, out, bytes, count, (const int3*)starts);
    return 0;
}
extern "C" int run_tile_store(float* out, int rows, int columns, int x, int y) {
    CUtensorMap map;
    const CUresult error =
        encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, out, rows, columns, 8, 16, CU_TENSOR_MAP_SWIZZLE_NONE);
    if (error) return error;
    tile_store<<<1, 128>>>(map, x, y);
    return 0;
}
extern "C" int try_encode(float* at, int offset, int size, int stride, int box, int swizzle) {
    const cuuint64_t sizes[2] = {(cuuint64_t)size, 4}, strides[1] = {(cuuint64_t)stride};
    const cuuint32_t boxes[2] = {(cuuint32_t)box, 4};
    CUtensorMap map;
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, (char*)at + offset, sizes, strides, boxes,
                  (CUtensorMapSwizzle)swizzle);
}
"""

# D (64 x 24) = A (64 x 32) B (32 x 24) in TF32, A in registers; B lies in shared memory without a swizzle.
REGISTERS = (
    product("product_24", 24, "tf32", 8, "rs")
    + r"""
__global__ void __launch_bounds__(128) registers_times_shared(float* D, const float* A, const float* B) {
    __shared__ __align__(128) float b[32 * 24];
    for (int i = threadIdx.x; i < 32 * 24; i += 128) {  // pieces of 8 columns by 4 inner indices
        const int k = i / 24, n = i % 24;
        b[(k / 4 * 3 + n / 8) * 32 + n % 8 * 4 + k % 4] = B[i];
    }
    proxy_fence();
    __syncthreads();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, t = lane % 4;
    uint32_t a[4][4];
    for (int s = 0; s < 4; ++s)
        for (int i = 0; i < 4; ++i) a[s][i] = __float_as_uint(A[(row + i % 2 * 8) * 32 + s * 8 + i / 2 * 4 + t]);
    float d[12];
    product_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) product_24(d, a[s], descriptor(address(b) + s * 768, 384, 128, 0), s > 0);
    product_commit();
    product_wait();
    for (int j = 0; j < 3; ++j)
        for (int i = 0; i < 4; ++i) D[(row + i / 2 * 8) * 24 + j * 8 + 2 * t + i % 2] = d[4 * j + i];
}
extern "C" int run_registers(float* D, float* A, float* B) {
    registers_times_shared<<<1, 128>>>(D, A, B);
    return 0;
}
"""
)

# D (64 x 64) = A (64 x 64) B (64 x 64) in half precision, both in shared memory: every layout, and every transposition.
# A transposed operand is one whose rows (of A) or columns (of B) are contiguous in `A` or `B`.
LAYOUTS = (
    "".join(product(f"product_{a}{b}", 64, "f16", 16, "ss" + " ta" * a + " tb" * b) for a in (0, 1) for b in (0, 1))
    + r"""
template <int LAYOUT>  // as a descriptor has it: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes
struct Operand {
    static constexpr int SPAN = LAYOUT ? 128 >> LAYOUT : 8;  // elements in a row of a box
    // Copies 64 x 64 elements (the row is what is contiguous) into boxes of SPAN columns.
    static __device__ void load(char* to, const CUtensorMap* map, const uint16_t* from, uint64_t* full) {
        if (LAYOUT == 0) {  // 8 x 8 elements together: by threads
            for (int i = threadIdx.x; i < 4096; i += 128) {
                const int row = i / 64, column = i % 64;
                ((uint16_t*)to)[(column / 8 * 8 + row / 8) * 64 + row % 8 * 8 + column % 8] = from[i];
            }
            proxy_fence();
        } else if (threadIdx.x == 0) {
            expect(full, 8192);
            for (int i = 0; i < 64 / SPAN; ++i) load_2d(to + i * 64 * SPAN * 2, map, i * SPAN, 0, full);
        }
    }
    // The part for inner indices from 16 * step on.
    static __device__ uint64_t part(const char* base, bool transposed, int step) {
        const uint32_t at = address(base);
        if (LAYOUT == 0)
            return transposed ? descriptor(at + step * 256, 128, 1024, 0) : descriptor(at + step * 2048, 1024, 128, 0);
        if (transposed) return descriptor(at + step * 16 * SPAN * 2, 64 * SPAN * 2, 8 * SPAN * 2, LAYOUT);
        return descriptor(at + step * 16 / SPAN * 64 * SPAN * 2 + step * 16 % SPAN * 2, 16, 8 * SPAN * 2, LAYOUT);
    }
};
template <int LAYOUT, bool TA, bool TB>
__global__ void __launch_bounds__(128)
layouts(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* D, const uint16_t* A,
        const uint16_t* B) {
    __shared__ __align__(1024) char a[8192];
    __shared__ __align__(1024) char b[8192];
    __shared__ uint64_t full[2];
    if (threadIdx.x == 0) {
        init(&full[0], 1), init(&full[1], 1);
        publish();
    }
    __syncthreads();
    Operand<LAYOUT>::load(a, &map_a, A, &full[0]);
    Operand<LAYOUT>::load(b, &map_b, B, &full[1]);
    __syncthreads();
    if (LAYOUT) wait(&full[0], 0), wait(&full[1], 0);
    float d[32];
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const uint64_t pa = Operand<LAYOUT>::part(a, TA, step), pb = Operand<LAYOUT>::part(b, TB, step);
        if (TA && TB) product_11(d, pa, pb, step > 0);
        if (TA && !TB) product_10(d, pa, pb, step > 0);
        if (!TA && TB) product_01(d, pa, pb, step > 0);
        if (!TA && !TB) product_00(d, pa, pb, step > 0);
    }
    product_commit();
    product_wait();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, t = lane % 4;
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 4; ++i) D[(row + i / 2 * 8) * 64 + j * 8 + 2 * t + i % 2] = d[4 * j + i];
}
template <int LAYOUT>
static int run_layout(int transposed, float* D, uint16_t* A, uint16_t* B) {
    CUtensorMap maps[2];
    const CUtensorMapSwizzle swizzle = (CUtensorMapSwizzle)(LAYOUT ? 4 - LAYOUT : 0);
    const uint16_t* from[2] = {A, B};
    for (int i = 0; i < 2; ++i) {
        const CUresult error = encode_2d(&maps[i], CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, from[i], 64, 64, 64,
                                         Operand<LAYOUT>::SPAN, swizzle);
        if (error) return error;
    }
    if (transposed == 0) layouts<LAYOUT, false, false><<<1, 128>>>(maps[0], maps[1], D, A, B);
    if (transposed == 1) layouts<LAYOUT, true, false><<<1, 128>>>(maps[0], maps[1], D, A, B);
    if (transposed == 2) layouts<LAYOUT, false, true><<<1, 128>>>(maps[0], maps[1], D, A, B);
    if (transposed == 3) layouts<LAYOUT, true, true><<<1, 128>>>(maps[0], maps[1], D, A, B);
    return 0;
}
extern "C" int run_layouts(int layout, int transposed, float* D, uint16_t* A, uint16_t* B) {
    return layout == 0   ? run_layout<0>(transposed, D, A, B)
           : layout == 1 ? run_layout<1>(transposed, D, A, B)
           : layout == 2 ? run_layout<2>(transposed, D, A, B)
                         : run_layout<3>(transposed, D, A, B);
}
"""
)

# D (M x N) = A (M x K) B (N x K)^T in bfloat16, tiles of 64 x 128: a warp that issues tensor copies, a warpgroup that
# multiplies, and tensor stores of what it has. Sizes need not be multiples of the tile.
PIPELINE = (
    product("product_128", 128, "bf16", 16, "ss")
    + r"""
constexpr int DEPTH = 3, STAGE = (64 + 128) * 128, RESULT = 64 * 128 * 4;
__global__ void __launch_bounds__(256, 1)
pipeline(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
         const __grid_constant__ CUtensorMap map_d, int steps) {
    extern __shared__ __align__(1024) char memory[];
    uint64_t* full = (uint64_t*)(memory + DEPTH * STAGE + RESULT);
    uint64_t* empty = full + DEPTH;
    if (threadIdx.x == 0) {
        for (int s = 0; s < DEPTH; ++s) init(&full[s], 1), init(&empty[s], 4);
        publish();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x >= 160) return;
        uint32_t elected;
        asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
        if (!elected) return;
        for (int i = 0; i < steps; ++i) {
            const int s = i % DEPTH;
            wait(&empty[s], i / DEPTH + 1 & 1);
            expect(&full[s], STAGE);
            load_2d(memory + s * STAGE, &map_a, i * 64, blockIdx.y * 64, &full[s]);
            load_2d(memory + s * STAGE + 8192, &map_b, i * 64, blockIdx.x * 128, &full[s]);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[64];
    for (int i = 0; i < steps; ++i) {
        const int s = i % DEPTH;
        wait(&full[s], i / DEPTH & 1);
        const uint32_t a = address(memory) + s * STAGE, b = a + 8192;
        product_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            product_128(d, descriptor(a + 32 * k, 16, 1024, 1), descriptor(b + 32 * k, 16, 1024, 1), i + k > 0);
        product_commit();
        product_wait();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&empty[s]);
    }
    float* result = (float*)(memory + DEPTH * STAGE);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, t = lane % 4;
    for (int j = 0; j < 16; ++j)
        for (int i = 0; i < 4; ++i) result[(row + i / 2 * 8) * 128 + j * 8 + 2 * t + i % 2] = d[4 * j + i];
    proxy_fence();
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (threadIdx.x == 0) {
        store_2d(&map_d, blockIdx.x * 128, blockIdx.y * 64, result);
        store_commit();
        store_wait();
    }
}
extern "C" int run_pipeline(float* D, uint16_t* A, uint16_t* B, int m, int n, int k) {
    CUtensorMap a, b, d;
    CUresult error = encode_2d(&a, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, A, m, k, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B);
    if (!error) error = encode_2d(&b, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, B, n, k, 128, 64, CU_TENSOR_MAP_SWIZZLE_128B);
    if (!error) error = encode_2d(&d, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, D, m, n, 64, 128, CU_TENSOR_MAP_SWIZZLE_NONE);
    if (error) return error;
    const int bytes = DEPTH * STAGE + RESULT + 64;
    if (cudaFuncSetAttribute(pipeline, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return -1;
    pipeline<<<dim3((n + 127) / 128, (m + 63) / 64), 256, bytes>>>(a, b, d, (k + 63) / 64);
    return 0;
}
"""
)

TEXT = WRAPPERS + COPIES + REGISTERS + LAYOUTS + PIPELINE
