"""The rewriter: what it makes of launches, shared memory and PTX, and what it says to what it does not know."""

import pytest

from cuda_emulator import EmulatorError
from cuda_emulator.kernels import KernelLibrary
from cuda_emulator.rewrite import rewrite
from cuda_emulator.sourcemap import line_map
from cuda_emulator.text import UnsupportedError, text_of, tokens_of


def squeezed(text):
    return " ".join(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "int a = 1 << 2 >> 1; // <<<not>>> a launch\n",
        'const char* s = "<<<1>>>"; /* __shared__ */ char c = \'"\';',
        'auto r = R"x(__shared__ float a[2]; <<<>>>)x";',
        "std::vector<std::vector<std::vector<int>>> v; x = 0x1p-3f + 1'000 + .5e+3f;",
        "#define A(x) \\\n  (x)\nA(1);",
    ],
)
def test_what_is_no_cuda_stays(text):
    assert text_of(tokens_of(text)) == text
    assert rewrite(text).text == text


@pytest.mark.parametrize(
    "launch, name, config, arguments",
    [
        ("k<<<1, 2>>>()", "k", "1, 2", ""),
        ("k<<<g, b, 0, s>>>(a, 0, NULL)", "k", "g, b, 0, s", "a, ::emulator::Zero{}, ::emulator::Zero{}"),
        ("ns::k<T, 4><<<dim3(1, 2), dim3(f(3))>>>(a[1], P{b, 0})", "ns::k<T, 4>", "dim3(1, 2), dim3(f(3))", "a[1], P{b, 0}"),
        ("k<A<B<int>>><<<(n + 1) >> 2, 32>>>(x)", "k<A<B<int>>>", "(n + 1) >> 2, 32", "x"),
        ("k<(N >> 1)> <<< 1, 2 >>> (x)", "k<(N >> 1)>", "1, 2", "x"),
    ],
)
def test_launches(launch, name, config, arguments):
    text = squeezed(rewrite(f"void f() {{ {launch}; }}").text)
    assert text.startswith(f'void f() {{ ::emulator::launch("?{name}", 1, ')  # the text defines no such kernel
    config = f"::emulator::LaunchConfig(::emulator::Line{{__LINE__}}, {config.strip()})"
    assert config in text.replace("( ", "(").replace(" )", ")")
    assert text.endswith(f", {arguments}); }}" if arguments else "}); }")


def test_lines_are_kept():
    text = "__global__ void f() {\n  k<<<1,\n      2>>>(\n      a);\n  __shared__ float\n    x[2],\n    y;\n  here();\n}\n"
    lines = rewrite(text).text.split("\n")
    assert len(lines) == text.count("\n") + 1
    assert lines[7].strip() == "here();"


def test_shared_declarations():
    text = rewrite("__device__ void f() { __shared__ alignas(16) const float a[2][3], b; extern __shared__ int c[]; }").text
    assert "typedef const float emulator_type_a[2][3];" in text
    assert '{sizeof(emulator_type_a), 16, "a", __LINE__, ::emulator::shape_of<emulator_type_a>()}' in text
    assert "typedef const float emulator_type_b;" in text
    pointers = rewrite("__device__ void f() { __shared__ float *p, q[2], * const r; }").text
    for declared in ("float* emulator_type_p;", "float emulator_type_q[2];", "float* const emulator_type_r;"):
        assert f"typedef {declared}" in pointers
    assert "emulator_type_tile[N]" in rewrite("#define TILE(T, N) __shared__ T tile[N]\n").text
    assert 'int* c = (int*)::emulator::dynamic_shared("c", sizeof(int));' in text
    outside = rewrite("extern __shared__ char all[];\nvoid f() {}").text
    assert 'extern __thread char* const all __asm__("emulator_dynamic_shared")' in outside


def test_kernels_lines_and_templates():
    text = "\n__global__ void __launch_bounds__(128) k(int a) {}\ntemplate <class T, int N>\n__global__ void t(T* p) {}\n"
    text += "void f() { k<<<1, 1>>>(2); t<int, 3><<<1, 1>>>(p); t<int><<<1, 1>>>(p); }"
    out = rewrite(text).text
    for name, line in (("k", 2), ("t<int, 3>", 4)):
        assert f'launch("{name}", {line}, ::emulator::key_of([&](auto take) -> decltype(take({name}))' in out
    assert 'launch("t<int>", 4, ::emulator::kernel_key(nullptr)' in out


def test_launches_through_pointers():
    out = rewrite("__global__ void k(int a) {}\nvoid f() { auto p = k; p<<<1, 1>>>(2); }").text
    assert 'launch("?p", 2, ::emulator::key_of([&](auto take) -> decltype(take(p))' in out
    overloaded = "__global__ void k(int a) {}\n__global__ void k(float a) {}\nvoid f() { k<<<1, 1>>>(2); }"
    assert 'launch("k", 2, ::emulator::kernel_key(nullptr)' in rewrite(overloaded).text


@pytest.mark.parametrize(
    "text, construct, line",
    [
        ("void f() {\n\n  x = tex2Dgather<float4>(t, 1, 2); }", "texture gather", 3),
        (
            '__device__ void f() {\n asm volatile("vadd4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c)); }',
            "vadd4.u32.u32.u32",
            2,
        ),
        ('__device__ void f() { asm("mov.u32 %0, %5;" : "=r"(x)); }', "the asm operand %5", 1),
        ("__device__ void f() { __shared__ float a = 3; }", "shared declaration", 1),
        ("void f() { k<<<1, 2; }", "a launch without >>>", 1),
        ("void f() {\n  k<<<1, 2>>>({a, b}); }", "argument in braces without its type: `{a, b}`", 2),
        ('__device__ void f() { asm volatile("brkpt;"); }', "the PTX instruction brkpt", 1),
    ],
)
def test_unsupported(text, construct, line):
    with pytest.raises(UnsupportedError) as caught:
        rewrite(text)
    assert construct in caught.value.construct
    assert caught.value.line == line


@pytest.mark.parametrize(
    "declaration, expected",
    [
        ("extern float __shared__ s[];", "float* s = (float*)"),
        ("extern volatile unsigned long long __shared__ s[];", "volatile unsigned long long* s"),
        ("cuda::barrier<cuda::thread_scope_block> __shared__ s;", "typedef cuda::barrier<cuda::thread_scope_block>"),
    ],
)
def test_the_type_may_stand_before_shared(declaration, expected):
    out = rewrite(f"#define EMPTY\n__device__ f() {{ g();\n    {declaration} }}").text
    assert expected in out and out.startswith("#define EMPTY\n__device__ f() {")


def test_functions_that_are_values_are_not_forced_inline():
    text = "__forceinline__ int add(int a, int b);\n__forceinline__ int twice(int a);\n"
    out = rewrite(text + "inline __forceinline__ int half(int a);\nvoid f() { reduce(twice(1), add); g(half); }").text
    first, second, third, _ = out.splitlines()
    assert (first.split()[0], second.split()[0], third.split()[:2]) == ("inline", "__forceinline__", ["inline", "int"])


def test_errors_name_the_line():
    with pytest.raises(EmulatorError, match=r"test_rewrite\.py:\d+: the emulator does not support .*texture"):
        KernelLibrary(
            """
            __global__ void looked_up_in_a_texture(float* out) {
                out[0] = tex2Dgather<float>(texture, 1, 2);
            }
            """
        )
    with pytest.raises(EmulatorError, match="no_such_function") as caught:
        KernelLibrary("__global__ void k() { no_such_function(); }")
    assert len(str(caught.value).splitlines()) < 8


def test_line_map():
    file_lines = ['x = """', "int first;", "int second;", '"""', 'y = """', "int third_line;", "}", '"""']
    assert line_map("#define N 3\nint first;\nint second;\nint third_line;\n}", file_lines) == [None, 2, 3, 6, 7]


def test_ptx():
    text = rewrite(
        '__device__ void f() { asm volatile("{\\n.reg .pred p;\\nL1:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n'
        '@p bra L2;\\nbra L1;\\nL2:\\n}" :: "r"(m), "r"(ph) : "memory"); }'
    ).text
    for part in (
        "bool reg_p{};",
        "label_L1: ;",
        "if (reg_p) { goto label_L2; }",
        "::emulator::mbarrier_wait(ptx_0, ptx_1, true",
    ):
        assert part in text
    assert "\n" not in text


HOST_NAMES = """
struct Sizes { dim3 gridDim, blockDim; int threads() const { return gridDim.x * blockDim.x; } };
__global__ void k(int* p) { p[blockIdx.x * blockDim.x + threadIdx.x] = gridDim.x; }
void one(dim3 gridDim, const dim3& blockDim = {32, 1}) { k<<<gridDim, blockDim>>>(nullptr); }
void two() {
    dim3 grid(4), blockDim(32);
    auto launch = [&](dim3 gridDim) { k<<<gridDim, blockDim>>>(nullptr); };
    for (dim3 gridDim(1); gridDim.x < 4; ++gridDim.x) launch(gridDim);
}
__device__ int three() { return gridDim.x * blockDim.x; }
"""


def test_host_variables_with_the_names_of_built_in_ones():
    lines = rewrite(HOST_NAMES).text.splitlines()
    assert "threads() const { return grid_dim.x * block_dim.x; }" in lines[1]
    assert "p[blockIdx.x * blockDim.x + threadIdx.x] = gridDim.x" in lines[2]  # the kernel's are the built-in ones
    for line, used in ((3, "grid_dim, block_dim)"), (6, "grid_dim, block_dim)"), (7, "grid_dim.x < 4; ++grid_dim.x")):
        assert used in lines[line] and "gridDim" not in lines[line]
    assert "return gridDim.x * blockDim.x;" in lines[9]  # behind the scopes of the others


@pytest.mark.parametrize(
    "declared",
    [
        "std::array<unsigned, 3> blockDim = {1, 2, 3};",
        "const std::pair<int, int> blockDim(1, 2);",
        "size_t n = 4, blockDim = 32;",
        "std::vector<int> sizes(2), blockDim(3);",
        "auto [gridDim, blockDim] = sizes();",
        "const auto& [ a, blockDim ] = sizes();",
        "dim3 *blockDim = nullptr;",
    ],
)
def test_forms_of_their_declaration(declared):
    text = rewrite(f"void run() {{ {declared} use(blockDim); }}\nint on_the_device() {{ return blockDim.x; }}").text
    assert "use(block_dim)" in text and text.endswith("return blockDim.x; }")


@pytest.mark.parametrize("used", ["if (n > blockDim) f();", "f(n, blockDim);", "n = a < b, blockDim;", "return n > blockDim;"])
def test_what_only_uses_one_is_no_declaration(used):
    text = f"__device__ int run(int n) {{ {used} }}"
    assert rewrite(text).text == text


def test_variables_of_the_device():
    text = rewrite("#include <a.h>\n__device__ int a;\n#include <b.h>\n__constant__ float b[2] = {1}, *c;").text
    assert '::emulator::device_variable((const void*)&emulator_initial_a, sizeof emulator_initial_a, "a", false, ' in text
    assert 'emulator_constant_b(&b, sizeof b, "b")' in text and 'emulator_constant_c(&c, sizeof c, "c")' in text
    for unchanged in (
        "template <class T>\n__device__ T a;",
        "template <class T> __constant__ T a;",
        "__constant__ const int a = 1;",
    ):
        assert rewrite(unchanged).text == unchanged


def test_the_compiler_s_own_copies():
    assert rewrite("#define copy(a, b) __builtin_memcpy(a, b, 12)").text == "#define copy(a, b) emulator_memcpy(a, b, 12)"
