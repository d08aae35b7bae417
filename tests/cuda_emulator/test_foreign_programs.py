# ruff: noqa: E501 - a line of a program stays one
"""Programs as others write them: what they print, which mistake is found in them, or why they are refused."""

import re
import subprocess
import time

import pytest

from cuda_emulator import EmulatorError, Finding, toolchain
from cuda_emulator.program import Program

# What most of them are: one kernel, of one or two blocks, that fills `out`.
MAIN = """
#include <cstdio>
int main() {{
    {type} *out, host[64];
    cudaMalloc(&out, sizeof host);
    cudaMemset(out, 0, sizeof host);
    k<<<{config}>>>(out);
    cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
    {print}
}}
"""
FIRST = r'printf("%g\n", double(host[0]));'


def with_main(text, type="int", config="1, 1", print=FIRST):
    return text + MAIN.format(type=type, config=config, print=print)


def run(folder, text, schedule="forward", name="program.cu", build_only=False, **others):
    """Build and run one; returns what it prints. Raises the Finding that ended it. `others` are files: {name: text}."""
    for file, content in {name: text, **others}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content, newline="")
    program = Program([folder / name, *(folder / file for file in others if not file.endswith("h"))], [folder])
    executable = program.read().build("check")
    if build_only:
        return executable
    done = {}

    def keep(process):
        done["printed"] = process

    with (folder / "printed").open("w") as printed:
        status, finding = program.run(executable, [], schedule=schedule, limit=120, stdout=printed)
    if finding:
        raise finding
    assert status == 0
    return (folder / "printed").read_text()


CONTAINERS = r"""
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
__global__ void k(int* p) {
    p[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) p[0] = p[63] + __shfl_sync(1u, p[2], 0);
}
template <class T> size_t grow(int n) {
    std::vector<T> some;
    for (int i = 0; i < n; ++i) some.push_back(T()), some.emplace_back(), some.insert(some.begin(), T());
    some.resize(5 * n);
    return some.size();
}
int main(int argc, char**) {
    size_t sum = grow<int>(argc) + grow<const void*>(argc) + grow<unsigned>(argc) + grow<char>(argc) + grow<std::string>(argc);
    sum += grow<std::unique_ptr<int>>(argc) + grow<size_t>(argc) + grow<std::pair<int, int>>(argc);
    std::map<std::string, int> named;
    std::unordered_map<unsigned, int> numbered;
    std::deque<int> queue;
    for (int i = 0; i < 40 * argc; ++i) named[std::to_string(i)] = numbered[i] = i, queue.push_back(i);
    int *d, h;
    cudaMalloc(&d, 256);
    k<<<2 - argc, 64>>>(d);
    cudaMemcpy(&h, d, 4, cudaMemcpyDeviceToHost);
    printf("%d %zu\n", h, sum + named.size() + numbered.size() + queue.size());
}
"""


def test_containers_of_the_host_are_not_the_runtimes(tmp_path):
    """By nm, too: neither a program nor the runtime lets go out what it instantiates of the C++ library."""
    for schedule in ("forward", "random"):
        assert run(tmp_path, CONTAINERS, schedule) == "65 160\n"
    for path in (run(tmp_path, CONTAINERS, build_only=True), toolchain.runtime_library()):
        listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        assert re.search(r" T (_Z1kPi|emulator_)", listed)
        assert not re.findall(r"^\w+ [TtWuVv] _Z(?:Z|GV|TV)*(?:NK?)?S[tabdios].*", listed, re.M)


# Kernels that share a name with each other or with CUDA's functions, and launches in macros over several lines.
NAMES = r"""
#include <cuComplex.h>
#include <builtin_types.h>
#include <channel_descriptor.h>
#include <crt/host_defines.h>
#include <cuda_fp16.h>
#include <cuda_occupancy.h>
#include <device_types.h>
#include <sm_35_intrinsics.h>
#include <vector_types.h>
struct Step { int by; };
__global__ void norm(int* y, int n) { if (threadIdx.x < n) y[threadIdx.x] += 1; }
__global__ void fma(int* y, Step s = {2}) { y[threadIdx.x] += s.by; }
__global__ void max(int* y) { y[threadIdx.x] = fmaxf(y[threadIdx.x], 1); }
__global__ void select(int* y) { y[threadIdx.x] += 1; }
__global__ void scale(int* y, float a) { y[threadIdx.x] *= a; }
__global__ void scale(int* y, int a) { y[threadIdx.x] *= a; }
template <class T> __global__ void scale(T* y, double a) { y[threadIdx.x] *= a; }
template <class T> __global__ void add(T* y) { y[threadIdx.x] += 1; }
template <class T, int N> __global__ void add(T* y) { y[threadIdx.x] += N; }
__global__ void add(int* y, const int* z) { y[threadIdx.x] += z[threadIdx.x]; }
namespace inner {
__global__ void max(int* y, Step s) { y[threadIdx.x] += s.by; }
}
template <class T> void both(T* y) { add<T><<<1, 32>>>(y); add<T, 3><<<1, 32>>>(y); }
// Helpers whose names the emulator has inside.
__device__ unsigned shared_address(const void* p) { return __cvta_generic_to_shared(p); }
__device__ half sum(half a, half b) { return __hsub(a, b); }
__device__ bool ordered(half a, half b) { return __hlt(a, b); }
template <class T> __device__ T lane(T x) { return x; }
#define LAUNCH(KERNEL, ...)         \
    do {                            \
        KERNEL<<<dim3(1),           \
                 dim3(32), 0>>>(    \
            __VA_ARGS__);           \
    } while (0)
#define ADD(T, N, ...)              \
    if (N) {                        \
        add<T,                      \
            N>                      \
            <<<1,                   \
               32>>>(__VA_ARGS__);  \
    } else {                        \
        add<                        \
            T                       \
        ><<<1, 32>>>(__VA_ARGS__);  \
    }
__global__ void k(int* p) {
    __shared__ half pair[2];
    if (threadIdx.x == 0) pair[0] = 5.0f, pair[1] = 3.0f;
    __syncwarp();
    p[threadIdx.x] += int(__half2float(sum(pair[0], lane(pair[1])))) + ordered(pair[1], pair[0]);
    p[threadIdx.x] += shared_address(&pair[1]) - shared_address(pair);
    p[threadIdx.x] += cuCabs(cuCdiv(make_cuDoubleComplex(6, 8), make_cuDoubleComplex(0, 2)));
}
"""
LAUNCHES = """
    norm<<<1, 32>>>(out, 32); fma<<<1, 32>>>(out, Step{2}); max<<<1, 32>>>(out); select<<<1, 32>>>(out);
    scale<<<1, 32>>>(out, 2.0f); scale<<<1, 32>>>(out, 2); scale<<<1, 32>>>(out, 2.0); scale<int><<<1, 32>>>(out, 0.5);
    add<<<1, 32>>>(out, out); inner::max<<<1, 32>>>(out, Step{1}); both(out);
    LAUNCH(add<int>, out); LAUNCH((add<int, 3>), out); ADD(int, 2, out); ADD(int, 0, out);
    LAUNCH(scale, out, 2);
    cudaMemcpy(host, out, 4, cudaMemcpyDeviceToHost);
"""

# Instructions of PTX beside what C++ makes of the same.
PTX = r"""
#include <cuda_fp16.h>
#include <cuda_fp8.h>
__device__ int byte(const unsigned* words, int at) { return (signed char)(words[at / 4] >> 8 * (at % 4)); }
__device__ float of8(const unsigned* words, int at) {
    return __half(__nv_cvt_fp8_to_halfraw(words[at / 4] >> 8 * (at % 4) & 0xff, __NV_E4M3));
}
__global__ void k(int* p) {
    __shared__ unsigned a[16 * 8], b[8 * 8];  // 16 x 32 and 8 x 32 bytes
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 128; i += 32) a[i] = (i * 2654435761u >> 3) & 0x3fbf3fbf;
    for (int i = lane; i < 64; i += 32) b[i] = (i * 40503u * 65537u) & 0xbf3f3fbf;
    __syncwarp();
    const unsigned ra[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    const unsigned rb[2] = {b[g * 8 + t], b[g * 8 + t + 4]};
    int d[4] = {1, 2, 3, 4}, bad = 0;
    float f[4] = {};
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(f[0]), "+f"(f[1]), "+f"(f[2]), "+f"(f[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        int sum = i + 1;
        float floats = 0;
        for (int n = 0; n < 32; ++n) sum += byte(a, row * 32 + n) * byte(b, column * 32 + n);
        for (int n = 0; n < 32; ++n) floats += of8(a, row * 32 + n) * of8(b, column * 32 + n);
        bad += sum != d[i];
        bad += !(fabsf(floats - f[i]) < 1e-4f);
    }
    unsigned moved, low, high, fused;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(g * 8 + 2 * t | (g * 8 + 2 * t + 1) << 16));
    bad += moved != (2 * t * 8 + g | ((2 * t + 1) * 8 + g) << 16);
    const unsigned long long x = 0x1fffffff0ull * (lane + 1), y = 0xabcdef012345ull;
    asm volatile("sub.cc.u32 %0, %1, %2;" : "=r"(low) : "r"((unsigned)x), "r"((unsigned)y));
    asm volatile("subc.u32 %0, %1, %2;" : "=r"(high) : "r"((unsigned)(x >> 32)), "r"((unsigned)(y >> 32)));
    bad += ((unsigned long long)high << 32 | low) != x - y;
    asm("mad.lo.cc.u32 %0, %2, %3, %4; madc.hi.u32 %1, %2, %3, 0;" : "=r"(low), "=r"(high) : "r"((unsigned)x), "r"(~0u), "r"(~0u));
    bad += ((unsigned long long)high << 32 | low) != (unsigned long long)(unsigned)x * ~0u + ~0u;
    const __half2 h(__half(1.5f + lane), __half(-0.1f)), other(__half(0.3f), __half(65504.0f));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(fused) : "r"(*(unsigned*)&h), "r"(*(unsigned*)&other), "r"(*(unsigned*)&h));
    const __half2 expected = __hfma2(h, other, h);
    bad += fused != *(unsigned*)&expected;
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(1000.0f), "f"(0.3f * lane));
    bad += pair != (0x7e00 | __nv_cvt_float_to_fp8(0.3f * lane, __NV_SATFINITE, __NV_E4M3));
    asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(p + 32), "r"(0x3c004000) : "memory");
    p[lane] = bad;
}
"""

# Operands of PTX with casts of several words, and ways to use shared memory that is declared at file scope.
FORMS = r"""
extern __shared__ unsigned char all[];
extern __shared__ float rows[][8];
struct Parts { float first[8]; };
__global__ void k(float* p) {
    const int t = threadIdx.x;
    auto& parts = *reinterpret_cast<Parts*>(&all);
    float *a = reinterpret_cast<float*>(all), *b = (float*)&all[0], *c = static_cast<float*>(static_cast<void*>(all));
    auto& d = *reinterpret_cast<float(*)[32]>(all);
    const uintptr_t e = reinterpret_cast<uintptr_t>(all);
    auto* f = all;
    a[t] = 1;
    b[t] += (f + 4 * t == (unsigned char*)(b + t));
    c[t] += 1, d[t] += 1, ((float*)e)[t] += 1, rows[t / 8][t % 8] += 1;
    asm volatile("barrier.sync 0;" ::: "memory");
    float x;
    if (t == 0) parts.first[3] += 1;
    asm volatile("barrier.sync.aligned 0;" ::: "memory");
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"((const void *)(reinterpret_cast<unsigned long long>(p + t))));
    asm volatile("st.global.u32 [%0], %1;" ::"l"((unsigned long long)(p + t)),
                 "r"(*reinterpret_cast<unsigned const *>(&d[31 - t])));
}
"""

# name, text in front of MAIN, what MAIN takes, what is printed
RIGHT = {
    "launch with spaces": ("__global__ void k(int* p) { p[0] = 3; }\nvoid f(int* p) { k << <dim3(1), 2 >> > (p); }", {}, "3\n"),
    "pasted kernel name": (
        "__global__ void k(int* p) { p[0] = 1; }\n__global__ void add_int_kernel(int* p) { p[0] += 4; }\n"
        "#define GO(KIND, TYPE) KIND##_##TYPE##_kernel<<<1, 1>>>(out)\n#define NAME(KIND) KIND##_int_kernel\n"
        "#define START(KIND) NAME(KIND) <<<1, 1>>> (out)",
        {"print": "GO(add, int); START(add); cudaMemcpy(host, out, 4, cudaMemcpyDeviceToHost); " + FIRST},
        "9\n",
    ),
    "other PTX in a condition": (
        '#define LATER(x) asm("tcgen05.alloc %0;" :: "r"(x))\n__global__ void k(int* p) {\n#if __CUDA_ARCH__ >= 1000\n'
        '    asm volatile("fence.of.the.future;");\n    LATER(p[0]);\n#endif\n    p[0] = 2;\n}',
        {},
        "2\n",
    ),
    "ldmatrix with its qualifiers in any order": (
        "__global__ void k(int* p) {\n    __shared__ __align__(16) short tile[64];\n    for (int i = threadIdx.x; i < 64; i += 32) "
        "tile[i] = i;\n    __syncthreads();\n    const unsigned at = __cvta_generic_to_shared(tile + threadIdx.x % 8 * 8);\n"
        "    unsigned a, b;\n"
        '    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(at));\n'
        '    asm volatile("ldmatrix.sync.aligned.x1.trans.m8n8.shared.b16 {%0}, [%1];" : "=r"(b) : "r"(at));\n'
        "    p[threadIdx.x] = a == b ? a : 0;\n}",
        {"config": "1, 32", "print": r'printf("%x\n", host[1]);'},
        "180010\n",
    ),
    "what is no text, in #if 0": (
        "#if 0\nThat isn't code { ( [ <<<1\n#if 1\n}\n#endif\n#elif 1\n__global__ void k(int* p) { p[0] = 4; }\n#endif",
        {},
        "4\n",
    ),
    "what CUDA no longer has, under a name that nobody defines": (
        "#ifdef BEFORE_CUDA_12\ntexture<float, 1> row;\n__global__ void old(float* p) { p[0] = __shfl(tex1Dfetch(row, 0), 1); }\n"
        "#endif\n__global__ void k(int* p) { p[0] = 7; }",
        {},
        "7\n",
    ),
    "declarations for an editor alone": (
        "#ifdef EDITOR\nvoid __syncthreads();\nint atomicAdd(int*, int);\nint size;\n#endif\n__device__ int size = 3;\n"
        "__global__ void k(int* p) { __syncthreads(); atomicAdd(p, size); }",
        {},
        "3\n",
    ),
    "members and template parameters with names of the host's": (
        "int n = 3, depth;\nint width() { return 1; }\nstruct Tile { int n; __device__ int width() const { return 2; }\n"
        "    __device__ int area() const { return n * width(); } };\n"
        "template <int depth> __device__ int deep() { return depth; }\n"
        "__global__ void k(int* p) { Tile t{5}; p[0] = t.area() + deep<4>(); }",
        {"print": r'printf("%d\n", host[0] + n + depth + width());'},
        "18\n",
    ),
    "a qualifier under a condition": (
        "#ifdef FOR_THE_DEVICE\n__device__\n#endif\ninline int half(int x) { return x / 2; }\n"
        "__global__ void k(int* p) { p[0] = 6; }",
        {"print": r'printf("%d\n", half(host[0]));'},
        "3\n",
    ),
    "an array of the host's own size in host code": (
        "__global__ void k(int* p) { p[0] = 6; }\nint last(int n) { int a[n]; a[n - 1] = n; return a[n - 1]; }",
        {"print": r'printf("%d\n", host[0] + last(2));'},
        "8\n",
    ),
    "unused headers": (
        "#include <cub/block/block_scan.cuh>\n#include <curand_kernel.h>\n#include <cuda_fp8.h>\n#include <mma.h>\n"
        "__global__ void k(int* p) { p[0] = 6; }",
        {},
        "6\n",
    ),
    "the host's own instructions": (
        '__global__ void k(int* p) { p[0] = 8; }\nint f() { int x = 1; asm volatile("" : "+r"(x)); return x; }',
        {"print": r'printf("%d\n", host[0] + f());'},
        "9\n",
    ),
    "shared variables at file scope": (
        "__shared__ float row[32];\n__shared__ int last;\n__device__ float of(int i) { return row[i]; }\n"
        "__global__ void k(float* p) {\n    row[threadIdx.x] = threadIdx.x;\n    if (threadIdx.x == 0) last = 31;\n"
        "    __syncthreads();\n    p[threadIdx.x] = of(last - threadIdx.x) + last;\n}",
        {"type": "float", "config": "1, 32"},
        "62\n",
    ),
    "aligned type": (
        "struct T { char c[8]; };\ntypedef __align__(8) T A;\n__global__ void k(int* p) { p[0] = alignof(A); }",
        {},
        "8\n",
    ),
    "exchange into fresh memory": (
        "__device__ unsigned slot[2];\n__global__ void fresh(int* q) { if (q) atomicExch(&q[1], 7); (void)atomicExch(q, 6); }\n"
        "__global__ void k(int* p) { p[0] = 1; }",
        {"print": "int* q; cudaMalloc(&q, 8); fresh<<<1, 1>>>(q); cudaMemcpy(host, q, 8, cudaMemcpyDeviceToHost); " + FIRST},
        "6\n",
    ),
    "exchanges in a loop's step, of the block's scope and cast to void": (
        "__global__ void fresh(int* q) {\n    for (int i = 0; i < 4; atomicExch(q + i, 2), ++i) {}\n"
        "    atomicExch_block(q + 4, 3);\n    static_cast<void>(atomicExch(q + 5, 4));\n}\n__global__ void k(int* p) { p[0] = 1; }",
        {"print": "int* q; cudaMalloc(&q, 24); fresh<<<1, 1>>>(q); cudaMemcpy(host, q, 24, cudaMemcpyDeviceToHost); " + FIRST},
        "2\n",
    ),
    "a mask with ended lanes": (
        "__global__ void k(int* p) {\n    if (threadIdx.x % 4 >= 2) return;\n"
        "    int v = __shfl_xor_sync(~0u, int(threadIdx.x), 1) + __popc(__ballot_sync(~0u, 1));\n    __syncwarp();\n"
        "    p[threadIdx.x] = v;\n}",
        {"config": "1, 32"},
        "17\n",
    ),
    "a mask with lanes that the block has not": (
        "__global__ void k(int* p) { int v = __any_sync(~0u, threadIdx.x == 3); p[threadIdx.x] = v + __shfl_sync(~0u, 4, 2); }",
        {"config": "1, 8"},
        "5\n",
    ),
    "lanes that end while others wait": (
        "__global__ void k(int* p) {\n    if (threadIdx.x > 3) { p[threadIdx.x] = 1; return; }\n"
        "    __syncwarp();\n    p[threadIdx.x] = 2;\n}",
        {"config": "1, 32"},
        "2\n",
    ),
    "the Programming Guide's loop of compare-and-swap": (
        "__device__ float most(float* a, float v) {\n    int* w = (int*)a;\n    int old = *w, seen;\n    do {\n        seen = old;\n"
        "        old = atomicCAS(w, seen, __float_as_int(fmaxf(v, __int_as_float(seen))));\n    } while (seen != old);\n"
        "    return __int_as_float(old);\n}\n__global__ void k(float* p) { most(p, threadIdx.x + 100 * blockIdx.x); }",
        {"type": "float", "config": "3, 32"},
        "231\n",
    ),
    "the compiler's own atomic functions": (
        "__global__ void k(int* p) {\n    __nv_atomic_fetch_max(p, int(threadIdx.x), __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);\n"
        "    int none = 100;\n    __nv_atomic_compare_exchange_n(p, &none, 1, false, __NV_ATOMIC_RELAXED, __NV_ATOMIC_RELAXED);\n}",
        {"config": "1, 32"},
        "31\n",
    ),
    "SIMD functions": (
        "__global__ void k(unsigned* p) { p[0] = __vsubus4(0x05050505u, 0x09010401u) ^ __vcmpgts2(0x00010000u, 0xffff0000u); }",
        {"type": "unsigned", "config": "1, 1", "print": r'printf("%x\n", host[0]);'},
        "fffb0104\n",
    ),
    "DPX functions": (
        "__global__ void k(unsigned* p) {\n    bool high, low;\n"
        "    p[0] = __viaddmax_s16x2(0x7fff0005u, 0x0001fffeu, 0x80000001u) ^ __vimin3_s32_relu(-1, 2, 3);\n"
        "    p[0] += __vibmax_u16x2(0x00020001u, 0x00010001u, &high, &low) + 4 * high + 8 * low;\n}",
        {"type": "unsigned", "config": "1, 1", "print": r'printf("%x\n", host[0]);'},
        "80020010\n",
    ),
    "atomic objects of the block's scope in each block's own place, and relaxed ones in a warp": (
        "#include <cuda/atomic>\n__device__ cuda::atomic<bool> done;\n__global__ void k(int* p) {\n"
        "    cuda::atomic_ref<int, cuda::thread_scope_block> mine(p[blockIdx.x]);\n"
        "    cuda::atomic_ref<int, cuda::thread_scope_device> any(p[8]);\n    if (threadIdx.x == 0) {\n"
        "        p[4 + blockIdx.x] = 5;\n        done.store(true);\n        mine.store(2, cuda::memory_order_release);\n    }\n"
        "    if (any.load(cuda::memory_order_relaxed) == 0) any.store(7, cuda::memory_order_relaxed);\n"
        "    if (threadIdx.x == 32) {\n        while (mine.load(cuda::memory_order_acquire) == 0) {}\n"
        "        mine.fetch_add(p[4 + blockIdx.x] + done.load());\n    }\n}",
        {"config": "2, 64"},
        "8\n",
    ),
    "waiting for a flag of the same warp": (
        "__global__ void k(int* p) {\n    __shared__ volatile int flag;\n    if (threadIdx.x == 0) flag = 0;\n    __syncthreads();\n"
        "    if (threadIdx.x == 5) { flag = 9; }\n    else { while (flag == 0) {} }\n    p[threadIdx.x] = 9;\n}",
        {"config": "1, 32"},
        "9\n",
    ),
    "a lock with a fence on either side": (
        "__device__ int turn, next;\n__global__ void k(int* p) {\n    if (threadIdx.x % 32) return;\n"
        "    const int mine = atomicAdd(&next, 1);\n    while (atomicAdd(&turn, 0) != mine) {}\n    __threadfence();\n"
        "    p[0] = p[0] + 1;\n    __threadfence();\n    atomicExch(&turn, mine + 1);\n}",
        {"config": "3, 64"},
        "6\n",
    ),
    "partial sums that are volatile, as in the Programming Guide": (
        "__device__ unsigned done;\n__global__ void k(volatile int* p) {\n    __shared__ bool last;\n    if (threadIdx.x == 0) {\n"
        "        p[1 + blockIdx.x] = 5;\n        __threadfence();\n        last = atomicInc(&done, gridDim.x) == gridDim.x - 1;\n"
        "    }\n    __syncthreads();\n    if (last && threadIdx.x == 0) {\n        int sum = 0;\n"
        "        for (int i = 0; i < gridDim.x; ++i) sum += p[1 + i];\n        p[0] = sum;\n    }\n}",
        {"config": "4, 32"},
        "20\n",
    ),
    "an acquire that needs no fence besides": (
        "#include <cuda/atomic>\n__device__ int data;\n__global__ void k(int* p) {\n"
        "    cuda::atomic_ref<int, cuda::thread_scope_device> flag(p[1]);\n"
        "    if (blockIdx.x == 0) { data = 8; flag.store(1, cuda::memory_order_release); }\n"
        "    else { while (flag.load(cuda::memory_order_acquire) == 0) {} p[0] = data; }\n}",
        {"config": "2, 1"},
        "8\n",
    ),
    "acquire and release by PTX": (
        "__device__ int data, flag;\n__global__ void k(int* p) {\n    int seen = 0;\n"
        '    if (blockIdx.x == 0) { data = 3; asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(&flag), "r"(1) : "memory"); }\n'
        '    else {\n        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(&flag) : "memory"); while (!seen);\n'
        "        p[0] = data;\n    }\n}",
        {"config": "2, 1"},
        "3\n",
    ),
    "names": (NAMES, {"config": "1, 32", "print": LAUNCHES + FIRST}, "248\n"),
    "structs of 16 bytes at odd 8, and one with padding": (
        "struct Half { double a, b; };\nstruct Whole { double first; Half rest; };\nstruct Gap { char c; double d; };\n"
        "__device__ double sum(Half h) { return h.a + h.b; }\n__device__ double of(Gap g) { return g.c + g.d; }\n"
        "__global__ void k(double* p) {\n    __shared__ Whole w[2];\n    __shared__ Gap g[2];\n"
        "    w[threadIdx.x] = {1, {2, 3}};\n    g[threadIdx.x].c = 1, g[threadIdx.x].d = 2;\n    __syncthreads();\n"
        "    Half copy = w[1 - threadIdx.x].rest;\n    Gap gap = g[1 - threadIdx.x];\n"
        "    p[threadIdx.x] = sum(copy) + sum(w[threadIdx.x].rest) + of(gap) + of(g[threadIdx.x]);\n}",
        {"type": "double", "config": "1, 2"},
        "16\n",
    ),
    "PTX": (
        PTX,
        {"config": "1, 32", "print": r'printf("%d %x\n", *std::max_element(host, host + 32), host[32]);'},
        "0 50005400\n",
    ),
    "forms": (FORMS, {"type": "float", "config": "1, 32, 128", "print": r'printf("%g %g\n", host[0], host[28]);'}, "6 7\n"),
    "a fallback of the CUDA version": (
        "#include <cuda.h>\n#if CUDA_VERSION < 12000\n#error old\n#endif\n__global__ void k(int* p) { p[0] = CUDA_VERSION / 13000; }",
        {},
        "1\n",
    ),
    "functions for both sides": (
        "#define BOTH __host__ __device__\nBOTH int one(int x) { return x + 1; }\nconstexpr int two() { return 2; }\n"
        "template <class F> __global__ void each(F f, int* p) { p[0] = f(two()); }\nstruct Add { __device__ int operator()(int x) const "
        "{ return one(x); } };\nstatic const int N = 4;\n__global__ void k(int* p) { p[0] = N; }",
        {"print": "each<<<1, 1>>>(Add(), out); cudaMemcpy(host, out, 4, cudaMemcpyDeviceToHost); host[0] += one(1); " + FIRST},
        "5\n",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(tmp_path, name):
    text, others, printed = RIGHT[name]
    for schedule in ("forward", "reversed"):
        assert run(tmp_path, with_main(text, **others), schedule) == printed


@pytest.mark.parametrize("before, ends", [("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r\n")])
def test_marks_and_line_ends_of_other_editors(tmp_path, before, ends):
    text = with_main("#define SET(P) \\\n    P[0] = \\\n    5\n__global__ void k(int* p) { SET(p); }")
    assert run(tmp_path, before + text.replace("\n", ends)) == "5\n"


def test_files_of_c_and_headers_in_a_folder_called_cuda(tmp_path):
    half = "#include <stdlib.h>\nint half(x) int x; { int *new = malloc(4); *new = x / 2; return *new; }\n"
    text = with_main('#include <cuda/own.cuh>\nextern "C" int half(int);', print=r'printf("%d\n", half(host[0]));')
    assert run(tmp_path, text, **{"half.c": half, "cuda/own.cuh": "__global__ void k(int* p) { p[0] = 10; }\n"}) == "5\n"


def test_memory_that_is_only_asked_for_costs_nothing(tmp_path):
    text = r"""
#include <cstdio>
__global__ void k(char* p, size_t n) { p[n - 1] = 1; }
int main() {
    char* p;
    const size_t n = 3ull << 30;
    if (cudaMalloc(&p, n) || cudaMalloc(&p, n)) return 1;
    k<<<1, 1>>>(p, n);
    FILE* file = fopen("/proc/self/status", "r");  // getrusage's maximum may be that of the process that started this one
    char line[256];
    long most = -1;  // KB
    while (fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %ld", &most);
    printf("%d\n", 0 < most && most < 500000);
}
"""
    assert run(tmp_path, text) == "1\n"


# name, text, what MAIN takes, the finding, what marks its line
WRONG = {
    "a member of a float4 that nothing has set, in shared memory": (
        "__global__ void k(float* p) {\n    __shared__ float4 all[32];\n    float4& mine = all[threadIdx.x];\n"
        "    mine.x = mine.z = mine.w = 1;\n    __syncthreads();\n    const float4 v = all[31 - threadIdx.x];  // here\n"
        "    p[threadIdx.x] = v.x + v.y;\n}",
        {"type": "float", "config": "1, 32"},
        "uninitialised shared read",
    ),
    "a member of a float4 that nothing has set, in device memory": (
        "__global__ void part(float* p) { p[4 * threadIdx.x] = p[4 * threadIdx.x + 1] = p[4 * threadIdx.x + 2] = 1; }\n"
        "__global__ void whole(const float4* p, float* to) {\n    const float4 v = p[threadIdx.x];  // here\n    to[threadIdx.x] = v.w;\n}\n"
        "__global__ void k(float* p) {}\nstatic bool first = [] {\n    float *a, *b;\n    cudaMalloc(&a, 512), cudaMalloc(&b, 128);\n"
        "    part<<<1, 32>>>(a);\n    whole<<<1, 32>>>((const float4*)a, b);\n    return true;\n}();",
        {"type": "float", "config": "1, 32"},
        "uninitialised global read",
    ),
    "exchange through volatile memory in a warp": (
        "__global__ void k(float* p) {\n    __shared__ float cell[64];\n    volatile float* v = cell;\n    const int t = threadIdx.x;\n"
        "    v[t] = t;\n    v[t + 32] = 1;\n    __syncwarp();\n    for (int d = 16; d > 0; d /= 2)\n        if (t < d) v[t] += v[t + d];"
        "  // here\n    p[t] = v[t];\n}",
        {"type": "float", "config": "1, 32"},
        "shared memory race",
    ),
    "a neighbour's value without a barrier": (
        "__global__ void k(int* p) {\n    volatile int* v = p;\n    v[threadIdx.x] = 1;\n    __syncwarp();\n"
        "    const int next = v[(threadIdx.x + 1) % 32];\n    v[threadIdx.x] = next + 1;  // here\n}",
        {"config": "1, 32"},
        "global memory race",
    ),
    "atomics of the block's scope": (
        "__global__ void k(int* p) {\n    atomicMax_block(p, int(blockIdx.x));  // here\n}",
        {"config": "2, 1"},
        "race between blocks",
    ),
    "a compare-and-swap of the block's scope": (
        "__global__ void k(unsigned* p) {\n    unsigned old = 0, seen;\n"
        "    while ((seen = atomicCAS_block(p, old, old + 1)) != old) old = seen;  // here\n}",
        {"type": "unsigned", "config": "3, 1"},
        "race between blocks",
    ),
    "cuda::atomic_ref of the block's scope": (
        "#include <cuda/atomic>\n__global__ void k(int* p) {\n    cuda::atomic_ref<int, cuda::thread_scope_block> sum(*p);\n"
        "    sum.fetch_add(1, cuda::memory_order_relaxed);  // here\n}",
        {"config": "2, 32"},
        "race between blocks",
    ),
    "a store of the block's scope that another block sees": (
        "#include <cuda/atomic>\n__global__ void k(int* p) {\n    cuda::atomic_ref<int, cuda::thread_scope_block> flag(p[1]);\n"
        "    if (blockIdx.x == 0) flag.store(1, cuda::memory_order_release);\n"
        "    else while (flag.load(cuda::memory_order_acquire) == 0) {}  // here\n}",
        {"config": "2, 1"},
        "race between blocks",
    ),
    "a volatile look at what another block updates for itself": (
        "__global__ void k(int* p) {\n    if (blockIdx.x == 0) atomicOr_block(p, 4);\n"
        "    else while (*(volatile int*)p == 0) {}  // here\n}",
        {"config": "2, 1"},
        "race between blocks",
    ),
    "a release of the block's scope": (
        "__device__ int data, flag;\n__global__ void k(int* p) {\n    int seen = 0;\n    if (blockIdx.x == 0) {\n        data = 3;\n"
        "        __threadfence_block();\n        atomicExch(&flag, 1);\n    } else {\n"
        '        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(&flag) : "memory"); while (!seen);\n'
        "        p[0] = data;  // here\n    }\n}",
        {"config": "2, 1"},
        "race between blocks",
    ),
    "PTX of the block's scope": (
        "__global__ void k(unsigned* p) {\n"
        '    asm volatile("red.relaxed.cta.global.add.u32 [%0], %1;" :: "l"(p), "r"(1) : "memory");  // here\n}',
        {"type": "unsigned", "config": "2, 1"},
        "race between blocks",
    ),
    "a block's scope beside the device's": (
        "__global__ void k(int* p) {\n    if (blockIdx.x == 0) atomicAdd(p, 1);\n    else atomicAdd_block(p, 1);  // here\n}",
        {"config": "2, 1"},
        "race between blocks",
    ),
    "a plain look at what others update": (
        "__global__ void k(int* p) {\n    if (p[0] < 100)  // here\n        atomicAdd(p, 1);\n}",
        {"config": "1, 32"},
        "global memory race",
    ),
    "a value of an ended lane": (
        "__global__ void k(int* p) {\n    if (threadIdx.x >= 16) return;\n    p[threadIdx.x] = __shfl_down_sync(~0u, 1, 16);  // here\n}",
        {"config": "1, 32"},
        "shuffle from absent lane",
    ),
    "a lock in unset memory": (
        "__global__ void k(int* p) { p[0] = 1; }\n__global__ void guarded(unsigned* lock, int* p) {\n"
        "    while (atomicExch(lock, 1u) != 0) __nanosleep(20);  // here\n    __threadfence();\n    p[0] += 1;\n"
        "    __threadfence();\n    atomicExch(lock, 0u);\n}",
        {"print": "unsigned* lock; cudaMalloc(&lock, 4); guarded<<<2, 1>>>(lock, out);"},
        "uninitialised global read",
    ),
    "a flag in shared memory that nobody has made false": (
        "__global__ void k(int* p) {\n    __shared__ volatile bool ready;\n    if (threadIdx.x == 33) p[0] = 1;\n"
        "    if (threadIdx.x == 0)\n        while (ready != true) {}  // here\n    __syncthreads();\n}",
        {"config": "1, 64"},
        "uninitialised shared read",
    ),
    "a result of an exchange with fresh memory": (
        "__global__ void k(int* p) { p[0] = 1; }\n__global__ void fresh(int* q, int* p) {\n    p[0] = atomicExch(q, 1);  // here\n}",
        {"print": "int* q; cudaMalloc(&q, 4); fresh<<<1, 1>>>(q, out);"},
        "uninitialised global read",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(tmp_path, name):
    text, others, kind = WRONG[name]
    with pytest.raises(Finding) as raised:
        run(tmp_path, with_main(text, **others))
    (line,) = (number for number, each in enumerate(text.splitlines(), 1) if each.endswith("// here"))
    assert (raised.value.kind, raised.value.line) == (kind, line)


def test_a_place_in_front_of_an_allocation_is_told_by_its_distance(tmp_path):
    with pytest.raises(
        Finding, match=r"out of bounds at `p\[-16\]`: thread \(0,0,0\) \w+ 4 bytes here, the array has 64 elements"
    ):
        run(tmp_path, with_main("__global__ void k(int* p) { p[-16] = 1; }"))


def test_a_value_from_the_host_may_be_that_of_unwritten_memory(tmp_path):
    text = r"""
#include <cstdio>
__device__ int given = -655371;
__global__ void k(int* to, const int* from) { to[0] = from[0] + given; }
int main() {
    int *a, *b, *to, host = -655371;
    cudaMalloc(&a, 8), cudaMalloc(&b, 8), cudaMalloc(&to, 4);
    cudaMemcpy(a, &host, 4, cudaMemcpyHostToDevice);
    cudaMemcpy(b, a, 4, cudaMemcpyDeviceToDevice);
    k<<<1, 1>>>(to, b);
    cudaMemcpy(&host, to, 4, cudaMemcpyDeviceToHost);
    printf("%d\n", host);
    k<<<1, 1>>>(to, b + 1);  // which nothing has written
    cudaDeviceSynchronize();
}
"""
    with pytest.raises(
        Finding, match=r"uninitialised global read of `from\[0\]`: thread \(0,0,0\) reads it here, nothing has written it"
    ):
        run(tmp_path, text)
    assert (tmp_path / "printed").read_text() == "-1310742\n"


# line, text, the beginning of what is said of it
REFUSED = [
    (
        2,
        "int one(int a) { return a; }\n__global__ void k(int* p) { int (*f)(int) = one; p[0] = f(1); }",
        "error: one is a function of the host",
    ),
    (2, "int twice(int x) { return 2 * x; }\n__global__ void k(int* p) { p[0] = twice(1); }", "error: device code calls twice"),
    (2, "__device__ int f() { return 1; }\nint g() { return f(); }\n__global__ void k(int* p) {}", "error: host code calls f"),
    (2, "static int size = 3;\n__global__ void k(int* p) { p[0] = size; }", "error: size is a variable of the host"),
    *(
        (2, f"{declared}\n__global__ void k(float* p) {{ p[0] = EPS; }}", "error: EPS is a variable of the host")
        for declared in (
            "float EPS = 1e-5;",
            "static int WIDTH = 3, *N, EPS;",
            "typedef float REAL; REAL EPS = 1;",
            "float EPS = DEFAULT_EPS;",
            "unsigned long long EPS{3};",
        )
    ),
    (2, "#include <map>\n__global__ void k(int* p) { std::map<int, int> m; }", "error: std::map in device code"),
    (
        3,
        "#include <algorithm>\n#include <cstdlib>\n__global__ void k(int* p) { p[0] = rand(); }",
        "error: device code calls rand",
    ),
    (2, "#include <algorithm>\n__global__ void k(int* p) { std::sort(p, p + 2); }", "error: std::sort in device code"),
    (
        3,
        "#include <iostream>\nusing namespace std;\n__global__ void k(int* p) { cout << p[0]; }",
        "error: std::cout in device code",
    ),
    (
        2,
        "namespace math { int twice(int x) { return 2 * x; } }\n__global__ void k(int* p) { p[0] = math::twice(1); }",
        "error: device code calls twice",
    ),
    (
        2,
        "struct Sum { int n = 0; int next() { return ++n; } };\n__global__ void k(int* p) { Sum s; p[0] = s.next(); }",
        "error: device code calls Sum::next",
    ),
    (
        2,
        "struct Sum { int n; Sum(int x) : n(x) {} };\n__global__ void k(int* p) { Sum s(2); p[0] = s.n; }",
        "error: device code calls the constructor of Sum",
    ),
    (
        2,
        "const float taps[] = {1, 2};\n__global__ void k(float* p) { p[0] = taps[1]; }",
        "error: taps is a variable of the host",
    ),
    (2, "__global__ void k(int* p) {}\nvoid f() { __syncthreads(); }", "error: host code calls __syncthreads"),
    (2, "__global__ void k(int* p) {}\nvoid f(int* p) { k(p); }", "error: k is a kernel and is called as a function"),
    (1, "__global__ void k(int* p) { if (p[0]) throw 1; }", "error: throw in device code"),
    (1, "__global__ void k(int* p) { int* q; cudaMalloc(&q, 4); }", "error: device code calls cudaMalloc"),
    (
        1,
        "__device__ int f(int n) { int a[n]; return a[0] = n; }\n__global__ void k(int* p) {}",
        "error: the size of the array a is not a constant",
    ),
    (
        2,
        "__device__ int f(int x) { return x; }\nint (*table[])(int) = {f};\n__global__ void k(int* p) {}",
        "error: host code takes the address of f",
    ),
    (
        2,
        "extern __shared__ float s[];\n__global__ void k(int* p) { extern __shared__ int s[]; p[0] = s[0]; }",
        "error: extern __shared__ s is declared with two types",
    ),
    (2, "#include <cub/cub.cuh>\nusing namespace cub;\n__global__ void k(int* p) {}", "the emulator does not support cub"),
    (1, "__global__ int k(int* p) { return 1; }", "error: a kernel that returns something (k)"),
    (
        2,
        "struct Fill {\n    __global__ void all(int* p) { p[0] = 1; }\n};\n__global__ void k(int* p) {}",
        "error: a kernel that is a member",
    ),
    (
        2,
        "__global__ void k(int* p) {}\nvoid f() { __shared__ float s[2]; s[0] = 1; }",
        "error: a __shared__ variable in host code",
    ),
    (
        2,
        "__global__ void k(int* p) {\n    __device__ int n; n = 1; p[0] = n; }",
        "error: a __device__ variable within a function",
    ),
    (
        2,
        "__global__ void k(int* p) {\n    __shared__ int s[gridDim.x]; s[0] = 1; }",
        "error: the size of the shared array s is not a constant",
    ),
    (
        2,
        "template <class T> __global__ void k(T* p) {\n    extern __shared__ T s[]; s[0] = 1; p[0] = s[0]; }\n"
        "void f(double* d) { k<<<1, 1, 8>>>(d); }",
        "error: extern __shared__ s is declared with two types",
    ),
    (
        3,
        "__device__ int f(int x) { return x; }\n__global__ void k(int* p) {}\nvoid g() { int (*h)(int) = f; }",
        "error: host code takes the address of f",
    ),
    (2, "#include <thrust/sort.h>\nthrust::less<int> f;\n__global__ void k(int* p) {}", "the emulator does not support thrust"),
    (2, "#include <cuda_fp8.h>\n__global__ void k(int* p) { __nv_fp8_e8m0 x; }", "the emulator does not support __nv_fp8_e8m0"),
    (
        4,
        "#include <mma.h>\nusing namespace nvcuda;\n__global__ void k(int* p) {\n"
        "    wmma::fragment<wmma::matrix_a, 8, 8, 32, int, wmma::row_major> f;\n    f.x[0] = 1;\n}",
        "the emulator does not support a WMMA fragment of this shape and type",
    ),
    (
        1,
        "__global__ void k(int* p) { p[0] = __shfl_xor(p[0], 1); }",
        "error: __shfl_xor was removed in CUDA 9; use",
    ),
    (2, "__global__ void k(int* p) {\n    if (__any(p[0])) p[0] = 1; }", "error: __any was removed in CUDA 9"),
    (
        1,
        "void f(cudaGraph_t g) { cudaGraphAddKernelNode(0, g, 0, 0, 0); }\n__global__ void k(int* p) {}",
        "the emulator does not",
    ),
    (
        2,
        "#include <curand.h>\ncurandGenerator_t g;\n__global__ void k(int* p) {}",
        "the emulator does not support curandGenerator_t",
    ),
    (1, '__global__ void k(int* p) { asm volatile("brkpt;"); }', "the emulator does not support the PTX instruction brkpt"),
]


# What only looks as if nvcc refused it, by what is wrong with looking at names alone.
NOT_REFUSED = {
    "another namespace": "namespace cpu { int top(int a) { return a; }\nfloat scale; }\n__device__ float scale;\n"
    "namespace gpu { __device__ int top(int a) { return a; }\n__device__ int of(int a) { return top(a) * scale; } }",
    "a member of the class": "namespace gpu { __device__ int find(int a, int b); }\nusing namespace gpu;\n"
    "struct Table { int find(int a); int twice(int a); };\nint Table::twice(int a) { return find(a) * 2; }",
    "operators": "__device__ float4 operator-(float4 a, float b) { return make_float4(a.x - b, 0, 0, 0); }\n"
    "__device__ bool operator<(float4 a, float4 b) { return a.x < b.x; }",
    "a qualifier for other compilers": "#ifndef __CUDACC__\n#define __device__\n#define __host__\n#endif\nint one();\n"
    "__host__ __device__ int one() { return 1; }\n__device__ int two() { return one() + 1; }",
    "names of macros": "#define N 5\n#ifdef OTHERS\n#define TABLE __device__\n#else\n#define TABLE __device__ __align__(16)\n#endif\n"
    "TABLE float EPS = 1e-5;\nconst int WIDTH = 3;\n__device__ float f(int SIZE) { float TOP = EPS; return TOP * N * WIDTH * SIZE; }",
    "variables of a function": '__device__ float pressure(float x) {\n#include "constants.h"\n    return x * sea_level;\n}',
}


@pytest.mark.parametrize("name", NOT_REFUSED)
def test_not_refused(tmp_path, name):
    (tmp_path / "constants.h").write_text("float sea_level = 1013.25f;\n")
    (tmp_path / "alone.h").write_text("inline int largest(int a) { return a; }\n")  # only other.cu includes it
    (tmp_path / "other.cu").write_text('#include "alone.h"\n')
    text = "__device__ int largest(float);\n" + NOT_REFUSED[name] + "\n__global__ void k(int* p) { p[0] = largest(1); }\n"
    (tmp_path / "program.cu").write_text(text)
    Program([tmp_path / "program.cu", tmp_path / "other.cu"], [tmp_path]).read()


def test_a_long_table_is_read_in_seconds(tmp_path):
    (tmp_path / "table.cu").write_text("struct R { int a, b[3]; };\nconst R rows[] = {" + "{1, {2, 3}}, " * 5000 + "};\n")
    (tmp_path / "sums.cu").write_text("#define ADD 1 \\\n" + "+ (3 * 2 << 1) \\\n" * 5000 + "+ 0\n")
    begun = time.process_time()
    Program([tmp_path / "table.cu", tmp_path / "sums.cu"], []).read()
    assert time.process_time() - begun < 30  # the time grew with the square of the length: it was many minutes


@pytest.mark.parametrize("line, text, said", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(tmp_path, line, text, said):
    with pytest.raises(EmulatorError) as raised:
        run(tmp_path, with_main(text))
    assert str(raised.value).startswith(f"{tmp_path / 'program.cu'}:{line}: {said}")


def test_a_static_function_of_another_file_may_have_a_device_functions_name(tmp_path):
    other = "static int umin(int a, int b) { return a < b ? a : b; }\nint f() { return umin(1, 2); }\n"
    text = with_main("int f();\n__global__ void k(int* p) { p[0] = umin(4u, 5u); }", print=r'printf("%d\n", host[0] + f());')
    assert run(tmp_path, text, **{"other.cpp": other}) == "5\n"


def test_a_file_of_cpp_without_the_header_is_told_so(tmp_path):
    other = "int f() { return cudaDeviceSynchronize(); }\n"
    with pytest.raises(
        EmulatorError, match=r"other\.cpp:1: error: cudaDeviceSynchronize is not declared here: cuda_runtime\.h"
    ):
        run(tmp_path, with_main("__global__ void k(int* p) {}"), **{"other.cpp": other})
