"""load_inline as PyTorch's users call it: again under a name, from files, with headers for kernels."""

import re
from pathlib import Path

import pytest
import torch

from cuda_emulator.toolchain import INCLUDE
from tests.kernels import apart

# Without PyTorch's headers, which take 15 s of a compiler.
BUILDS = r"""
import torch
import cuda_emulator as emulator
emulator.install(mode="check")
from torch.utils.cpp_extension import load_inline

BINDING = '''
#include <Python.h>
float go();
static PyObject* call(PyObject*, PyObject*) { return PyFloat_FromDouble(go()); }
static PyMethodDef methods[] = {{"go", call, METH_NOARGS, nullptr}, {}};
#define MODULE(name) \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, methods}; \
    PyMODINIT_FUNC PyInit_##name() { return PyModule_Create(&module); }
#define NAMED(name) MODULE(name)
NAMED(TORCH_EXTENSION_NAME)
'''
CUDA = '''
__global__ void run(float* x) { x[threadIdx.x] = BODY; }
float go() {
    static float *x, y[4];
    if (!x) cudaMalloc(&x, sizeof y);
    run<<<1, 4>>>(x);
    cudaMemcpy(y, x, sizeof y, cudaMemcpyDeviceToHost);
    return y[3];
}
'''

def built(body, name="again", **flags):
    return load_inline(name, BINDING, CUDA.replace("BODY", body), no_implicit_headers=True, **flags)
"""


def run(code):
    """Run the code in a process of its own."""
    apart.run(exec, code, {"__name__": "__main__"})


def test_another_text_under_a_name_is_another_module():
    run(
        BUILDS
        + """
three, five = built("3"), built("5")
seven = built("SEVEN", extra_cuda_cflags=["-DSEVEN=7"])
eight = built("SEVEN", extra_cuda_cflags=["-DSEVEN=8"])
assert [m.go() for m in (three, five, seven, eight, built("5"), three)] == [3, 5, 7, 8, 5, 3]
assert [m.__name__ for m in (three, five, seven, built("3"))] == ["again", "again_v1", "again_v2", "again"]
assert built("6", name="other").go() == 6 and five.go() == 5
"""
    )


def test_another_text_under_a_name_registers_other_operators():
    run(
        BUILDS
        + """
OPERATOR = '''#include <torch/library.h>
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("answer() -> int", [] { return int64_t(ANSWER); }); }'''
for answer in ("1", "2", "1"):
    load_inline("ops_again", OPERATOR.replace("ANSWER", answer), is_python_module=False, no_implicit_headers=True)
assert (torch.ops.ops_again.answer(), torch.ops.ops_again_v1.answer()) == (1, 2)
"""
    )


# The same functions: declarations alone, with PyTorch's headers for a brace, and with pybind11 in the binding's own text.
BOUND = r"""
import re, subprocess
DECLARED = '''#include <vector>
at::Tensor twice(torch::Tensor x, int n = 3); std::vector<at::Tensor> both(at::Tensor, at::Tensor);
void nothing(torch::Tensor); at::Tensor same(const at::Tensor& x);'''
CUDA = '''
at::Tensor twice(at::Tensor x, int n) { TORCH_CHECK(n > 0, "n is ", n); return x * n; }
std::vector<at::Tensor> both(at::Tensor x, at::Tensor y) { return {y, x}; }
void nothing(at::Tensor) { throw std::out_of_range("nothing"); }
at::Tensor same(const at::Tensor& x) { return x; }
'''
DOCUMENTED = {"twice": "Doubles.", "both": "", "nothing": "none", "same": "same"}

def built(name, more="", declared=DECLARED, functions=DOCUMENTED, **how):
    return load_inline(name, declared + more, CUDA, functions=functions, **how)

def told(call, *given, **named):
    try:
        return call(*given, **named)
    except Exception as error:
        return type(error), str(error).splitlines()[:9]

def behaviour(module):
    twice, both, nothing, same = (getattr(module, name) for name in DOCUMENTED)
    x, y = torch.rand(3), torch.rand(2)
    calls = [(twice, x, 2), (twice, x), (twice, x, 1.5), (twice, x, -1), (twice,), (twice, [1], 1)]
    calls += [(both, y), (both, y, None), (nothing, x), (same, None), (nothing, 1)]
    said = [repr(told(*call)) for call in calls] + [repr(told(twice, x, arg1=2)), repr(told(twice, x, n=2))]
    assert same(x) is x and torch.equal(both(x, y)[0], y) and isinstance(both(x, y), list)
    shown = [(f.__doc__, f.__name__, f.__module__ == module.__name__, type(f)) for f in (twice, both, nothing)]
    return [re.sub("tensor.*", "tensor", line) for line in said], shown, module.__doc__, sorted(module.__dict__)

def wrong(more):
    return str(told(built, "wrong", more, "at::Tensor unknow();", ["unknown"])[1])

UNCHECKED = {"with_pytorch_error_handling": False}

def compare(name, **how):
    modules = [built(name + str(k), more, **how) for k, more in enumerate(("", "// {}", "// py::"))]
    libraries = [subprocess.run(["readelf", "-d", module.__file__], stdout=-1, text=True).stdout for module in modules]
    assert ["libemulator_bindings" in text for text in libraries] == [True, True, False]
    declared, light, pybinds = map(behaviour, modules)
    assert declared == light == pybinds, (declared, light, pybinds)
"""


def test_a_binding_without_pybind11_is_the_module_that_pybind11_makes():
    run(
        BUILDS
        + BOUND
        + """
compare("plain")
assert told(built("unchecked", **UNCHECKED).nothing, torch.rand(3)) == (IndexError, ["nothing"])  # else a RuntimeError
assert "unknown" in wrong("")
"""
    )


@pytest.mark.full
def test_so_it_is_without_pytorchs_handling_of_errors_and_where_it_does_not_compile():
    run(
        BUILDS
        + BOUND
        + """
compare("unchecked", **UNCHECKED)
assert len({re.sub("_v.|// .*", "", wrong(more)) for more in ("", "// {}", "// py::")}) == 1
"""
    )


# One build for what is taken: PyTorch's headers of kernels, lines that end as on Windows, a lambda with its flag, a vector.
TAKEN = r"""
import subprocess
CUDA = '''
#include <ATen/cuda/Atomic.cuh>
#include <ATen/cuda/detail/KernelUtils.h>
#include <ATen/native/cuda/KernelUtils.cuh>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAMathCompat.h>
template <class T>
__global__ void run(const T* x, T* sum, int n) {
    CUDA_KERNEL_LOOP(i, n) {
        gpuAtomicAdd(sum, x[i]);
        at::native::fastAtomicAdd(sum, int64_t(1), int64_t(2), T(at::opmath_type<T>(x[i]) * 2), true);
    }
}
at::Tensor sums(at::Tensor x) {
    at::Tensor sum = at::zeros({2}, x.options());
    AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "sums", [&] {
        run<scalar_t><<<2, 32>>>(x.data_ptr<scalar_t>(), sum.data_ptr<scalar_t>(), x.numel());
    });
    return sum;
}
#define TWO_LINES(v) \\
    ((v) + \\
     3)
template <class F> __global__ void apply(F f, float* x) { x[threadIdx.x] = TWO_LINES(f(threadIdx.x)); }
__device__ float half_of(float x) { return x / 2; }
at::Tensor applied(at::Tensor x) {
    apply<<<1, 4>>>([=] __device__(int i) { return half_of(4.0f * i); }, x.data_ptr<float>());
    std::vector<long> shape(x.sizes().begin(), x.sizes().end());
    shape.push_back(1);
    return x.view(shape);
}
'''.replace("\n", "\r\n")
declared = "at::Tensor sums(at::Tensor x); at::Tensor applied(at::Tensor x);"
taken = load_inline("taken", declared, CUDA, functions=["sums", "applied"], extra_cuda_cflags=["--extended-lambda"])
for dtype in (torch.float32, torch.float64, torch.float16):
    assert taken.sums(torch.ones(40, dtype=dtype)).tolist() == [40, 80]
assert taken.applied(torch.zeros(4)).tolist() == [[3], [5], [7], [9]]
open(LISTING, "w").write(subprocess.run(["nm", "-D", "--defined-only", taken.__file__], stdout=-1, text=True).stdout)
"""


def test_what_nvcc_takes_and_a_librarys_code_of_the_cpp_library_is_its_own(tmp_path):
    """By nm, as of programs: a vector's code, instrumented for the kernel's text, is not for PyTorch to find."""
    run(f"LISTING = {str(tmp_path / 'listing')!r}" + BUILDS + TAKEN)
    listed = (tmp_path / "listing").read_text()
    assert "PyInit_taken" in listed
    assert not re.findall(r"^\w+ [TtWuVv] _Z(?:Z|GV|TV)*(?:NK?)?S[tabdios].*", listed, re.M)


def test_what_comes_with_pytorchs_streams_comes_with_the_emulators():
    headers = [folder / "c10/cuda/CUDAStream.h" for folder in (Path(torch.__file__).parent / "include", INCLUDE)]
    pytorchs, emulators = (set(re.findall(r"#include (<.*>)", header.read_text())) for header in headers)
    assert pytorchs and pytorchs <= emulators


@pytest.mark.parametrize(
    "definition, value, said",
    [
        (
            "template <class F> __global__ void apply(F f, float* x) { f(x); }",
            "[=] __device__(int i) { return i; }(3)",
            "nvcc refuses a __device__ lambda without",
        ),
        ("float half_of(float x) { return x / 2; }", "half_of(6)", "device code calls half_of, a function of the host"),
    ],
)
def test_what_nvcc_refuses(definition, value, said):
    run(
        BUILDS
        + f"""
CUDA = {definition!r} + CUDA
try:
    built({value!r}, name="refused")
except emulator.EmulatorError as error:
    assert {said!r} in str(error), error
else:
    raise SystemExit("no error")
"""
    )


HEADER = """#pragma once
#include <torch/extension.h>
#define CHECK(x) TORCH_CHECK(x.is_cuda() && x.is_contiguous(), #x " must be contiguous on the device")
#ifdef __CUDACC__
template <class T>
__global__ void scale(T* x, T by, int n) {
    __shared__ T factor;
    if (threadIdx.x == 0) factor = by;
    BARRIER
    if (threadIdx.x < n) x[threadIdx.x] *= factor;  // here
}
#endif
void scale_all(at::Tensor x, double by);
"""
SOURCE = """#include "parts/scale.cuh"
void scale_all(at::Tensor x, double by) { scale<<<1, 64>>>(x.data_ptr<float>(), float(by), int(x.numel())); }
"""
BINDING = """#include "parts/scale.cuh"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("scale", [](at::Tensor x, double by) { CHECK(x); scale_all(x, by); });
}
"""
LOADS = """
import sys
import torch
import cuda_emulator as emulator
emulator.install(mode="check")
from torch.utils.cpp_extension import load

def built(folder):
    return load("scaled", [folder + "/scale.cu", folder + "/binding.cpp"])
"""


def test_who_undoes_wrappers_finds_the_emulators_functions():
    """As playground's count of builds does, before it puts its own wrapper around."""
    run("""
import inspect
import cuda_emulator as emulator
from torch.utils import cpp_extension

theirs = cpp_extension.load, cpp_extension.load_inline
emulator.install(mode="check")
assert not {*theirs} & {inspect.unwrap(cpp_extension.load), inspect.unwrap(cpp_extension.load_inline)}
""")


@pytest.mark.full
def test_cuda_in_headers_beside_the_files_given_to_load(tmp_path):
    """Shared memory and a barrier in a header; its mistake is named there; an edited header is another module."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "binding.cpp").write_text(BINDING)
    header = tmp_path / "parts/scale.cuh"
    header.write_text(HEADER.replace("BARRIER", ""))
    line = 1 + next(at for at, each in enumerate(HEADER.splitlines()) if each.endswith("// here"))
    run(
        LOADS
        + f"""
try:
    built({str(tmp_path)!r}).scale(torch.ones(60), 2)
except emulator.Finding as finding:
    assert (str(finding.file), finding.line, finding.kind) == ({str(header)!r}, {line}, "shared memory race"), finding
else:
    raise SystemExit("no finding")
open({str(header)!r}, "w").write({HEADER.replace("BARRIER", "__syncthreads();")!r})
x = torch.ones(60)
module = built({str(tmp_path)!r})
module.scale(x, 2)
assert x.tolist() == [2] * 60 and module.__name__ == "scaled_v1"
"""
    )


def test_a_broken_header_is_named_with_its_line(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "binding.cpp").write_text(BINDING)
    (tmp_path / "parts/scale.cuh").write_text(HEADER.replace("BARRIER", "__syncthread();"))
    run(
        LOADS
        + f"""
try:
    built({str(tmp_path)!r})
except emulator.EmulatorError as error:
    assert str(error).startswith({str(tmp_path / "parts/scale.cuh")!r} + ":9: error: "), error
else:
    raise SystemExit("no error")
"""
    )


# The numbers' type, flags for nvcc, what is said of their product
REFUSED = [
    ("__half", [], "__half has no operators here"),
    ("__half2", [], "__half2 has no operators here"),
    ("__half", ["-U__CUDA_NO_HALF_OPERATORS__"], ""),
]


@pytest.mark.full
@pytest.mark.parametrize("kind, flags, said", REFUSED)
def test_operators_of_halves_under_pytorchs_flags(kind, flags, said):
    run(
        BUILDS
        + f"""
CUDA = '''#include <cuda_fp16.h>
__global__ void run({kind}* x) {{
    x[0] = x[1] * x[0];
}}
at::Tensor go(at::Tensor x) {{ return x; }}
'''
try:
    load_inline("halves", "at::Tensor go(at::Tensor x);", CUDA, functions=["go"], extra_cuda_cflags={flags!r})
except emulator.EmulatorError as error:
    first, second = str(error).splitlines()[:2]
    assert {said!r} and {said!r} in first and second.endswith("x[0] = x[1] * x[0];"), error
else:
    assert not {said!r}
"""
    )
