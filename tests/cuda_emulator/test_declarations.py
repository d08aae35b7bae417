"""The names of the kernels that a CUDA text declares, whatever attributes stand around them."""

import pytest

from cuda_emulator import debugging
from cuda_emulator.declarations import kernel_names
from cuda_emulator.rewrite import rewrite

DECLARATIONS = {
    "plain": "__global__ void k(float* p) {}",
    "line ends": 'extern "C" __global__ void\nk (int n);',
    "void before": "static void __global__ k(int n) {}",
    "launch bounds": "__global__ void __launch_bounds__(128, 2) k(int n) {}",
    "launch bounds in nested parentheses": "__global__ void __launch_bounds__((f((A) + (B)) * 32), 2) k(int n) {}",
    "launch bounds before void": "__global__ __launch_bounds__(g((N)))\nvoid k(int n) {}",
    "a cluster": "__global__ void __cluster_dims__(2,1,1) k(int n) {}",
    "registers": "__global__ void __launch_bounds__(64) __maxnreg__(128) k(int n) {}",
    "a GNU attribute": '__global__ void __attribute__((visibility("hidden"))) k(int n) {}',
    "a standard attribute": "__global__ [[maybe_unused]] void k(int n) {}",
    "an attribute behind": "__global__ void k(int n) __attribute__((weak));",
    "a macro for an attribute": "__global__ void LAUNCH_BOUNDS(128) k(int n) {}",
    "a macro for an attribute before void": "__global__ LAUNCH_BOUNDS((128)) void k(int n) {}",
    "a template": "template <int N, class F = void> __global__ void k(F f) {}",
    "a specialisation": "template <> __global__ void k<float, (4 > 3)>(float* p) {}",
    "a namespace": "__global__ void outer::k(int n) {}",
    "a comment": "__global__ /* not f(x) */ void // nor g(x)\nk(int n) {}",
}


@pytest.mark.parametrize("text", DECLARATIONS.values(), ids=DECLARATIONS)
def test_one_name_wherever_it_is_asked_for(text):
    assert kernel_names(text) == ["k"]
    assert set(rewrite(text).kernels) == {"k"}
    assert debugging.first_kernel(f"CUDA = r'''\n{text}'''").name == "k"


@pytest.mark.parametrize(
    "text",
    [
        "// __global__ void k(int n) {}",
        "no kernel, only the word __global__",
        "the __global__ functions of this file (there are two)",
        "#define KERNEL __global__ void\n",
        "__global__ void __launch_bounds__(",  # where a text is put together
        "__global__ void ",
    ],
)
def test_what_declares_no_kernel(text):
    assert kernel_names(text) == []


def test_a_text_that_is_put_together():
    assert kernel_names("__global__ void k(") == ["k"]
    assert kernel_names("#define KERNEL __global__ void\nKERNEL k(int n) {}") == ["k"]


def test_the_arguments_of_attributes_are_kept():
    (kernel,) = rewrite("template <int N> __global__ void __launch_bounds__(32) __cluster_dims__(2, N) k(int n) {}").kernels[
        "k"
    ]
    assert (kernel.cluster, kernel.parameters, kernel.template_parameters) == ("2, N", "(int n)", 1)


def test_prose_in_front_of_a_kernel_is_none():
    text = '"""One __global__ (the first) that is not closed ("""\nCUDA = "__global__ __cluster_dims__(2) void k(int n) {}"\n'
    assert debugging.first_kernel(text) == debugging.Kernel("k", 2)
