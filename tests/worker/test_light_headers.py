"""Which texts are built with a small part of torch's headers, and that the whole decides where the part does not do."""

import shutil
import subprocess

import pytest
from torch.utils import cpp_extension

from cuda_emulator import toolchain
from playground.worker import light_headers
from playground.worker.builds import BuildWatch

KERNEL = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

template <typename scalar_t>
__global__ void scale(const scalar_t* x, scalar_t* y, scalar_t factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * factor;
}

torch::Tensor twice(torch::Tensor x) {
    TORCH_CHECK(x.is_cuda() && x.scalar_type() == torch::kFloat32, "x must be float32 on the GPU");
    auto y = torch::empty_like(x);
    auto sums = torch::zeros({x.size(0)}, torch::TensorOptions().dtype(torch::kFloat32).device(x.device()));
    int n = x.numel();
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "twice", [&] {
        scale<scalar_t><<<(n + 255) / 256, 256>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), scalar_t(2), n);
    });
    return y.contiguous().add_(sums.sum());
}
"""
BINDING = "torch::Tensor twice(torch::Tensor x);"


def folder_for(root, cuda, cpp=BINDING, has_functions=True, implicit=True):
    return light_headers.folder_for(root, cpp, cuda, has_functions, implicit)


def test_a_text_as_most_are_gets_the_operators_that_it_names(tmp_path):
    folder = folder_for(tmp_path, KERNEL)
    types, extension = ((folder / "torch" / f"{name}.h").read_text() for name in ("types", "extension"))
    assert "#include <ATen/ops/empty_like.h>" in types and "#include <ATen/ops/zeros.h>" in types
    assert "TensorOptions" not in types and "kFloat32" not in types
    assert "#if !defined(__CUDACC__)" in extension, "pybind11 is for the C++ text alone, where load_inline binds the functions"
    before = (folder / "torch" / "types.h").stat().st_mtime_ns
    assert folder_for(tmp_path, KERNEL) == folder
    assert (folder / "torch" / "types.h").stat().st_mtime_ns == before, "it would be newer than what was built with it"
    assert folder_for(tmp_path, KERNEL.replace("zeros", "ones")) != folder


def test_pybind_goes_where_it_is_used(tmp_path):
    binds = 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }'
    assert "#if defined(__CUDACC__)" in extension(folder_for(tmp_path, KERNEL + binds, "", has_functions=False))
    assert "#if 1" in extension(folder_for(tmp_path, KERNEL + binds))
    assert "#if 0" in extension(folder_for(tmp_path, KERNEL, has_functions=False))


def extension(folder):
    return (folder / "torch" / "extension.h").read_text()


@pytest.mark.parametrize(
    "needs",
    [
        "torch::nn::Linear layer(1, 1);",
        "namespace F = torch::nn::functional;",
        "using namespace torch;",
        "auto x = torch::tensor({1, 2});",
        "torch::NoGradGuard guard;",
        "auto row = x.index({0});",
        "auto x = torch::zeros({1}, torch::dtype(torch::kFloat).requires_grad(true));",
        "#include <torch/torch.h>",
        "#include <torch/csrc/autograd/custom_function.h>",
        "at::parallel_for(0, 1, 1, f);",
        "TORCH_LIBRARY(a, m) {}",
        "torch::cuda::synchronize();",
    ],
)
def test_whatever_is_not_known_gets_the_whole(tmp_path, needs):
    assert folder_for(tmp_path, KERNEL + needs) is None
    assert folder_for(tmp_path, KERNEL, BINDING + "\n" + needs) is None
    assert folder_for(tmp_path, KERNEL + f"// {needs}") is not None


def test_a_text_without_torchs_headers_gets_none(tmp_path):
    assert folder_for(tmp_path, "__global__ void f() {}", "", has_functions=False, implicit=False) is None
    assert folder_for(tmp_path, "__global__ void f() {}", "", has_functions=False, implicit=True) is not None


def test_where_the_part_does_not_do_the_whole_decides_and_is_remembered(monkeypatch, tmp_path):
    calls = []

    def pretended(name, cpp_sources, cuda_sources=None, functions=None, extra_include_paths=None, no_implicit_headers=False):
        calls.append(extra_include_paths)
        cpp_extension.JIT_EXTENSION_VERSIONER.entries[name] = "this build's"
        if extra_include_paths and "fits" not in name:
            raise RuntimeError("Error building extension")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load_inline", pretended)
    monkeypatch.setattr(cpp_extension, "load", cpp_extension.load)
    monkeypatch.setattr(cpp_extension.JIT_EXTENSION_VERSIONER, "entries", {"other": "an earlier one's"})
    watch = BuildWatch()
    cpp_extension.load_inline("fits", BINDING, KERNEL, functions=["twice"])
    assert len(calls) == 1 and calls[0] is not None
    cpp_extension.load_inline("other", BINDING, KERNEL + " ", functions=["twice"])
    assert [bool(paths) for paths in calls[1:]] == [True, False] and watch.failure is None
    cpp_extension.load_inline("other", BINDING, KERNEL + " ", functions=["twice"])
    assert [bool(paths) for paths in calls[3:]] == [False]
    BuildWatch(emulated=True)
    cpp_extension.load_inline("emulated_fits", BINDING, KERNEL, functions=["twice"])
    assert calls[4:] == [None]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_compiles_it(tmp_path):
    """Against a CPU build's headers, too: all but those that configure CUDA are there."""
    text = KERNEL.replace("#include <ATen/cuda/CUDAContext.h>", "")
    folder = folder_for(tmp_path, text)
    (tmp_path / "cuda.cu").write_text("#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n" + text)
    includes = [f"-I{folder}", *(f"-isystem={path}" for path in cpp_extension.include_paths())]
    flags = ["-c", "--expt-relaxed-constexpr", toolchain.torch_flags()[0][0], *includes]
    flags += ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-DTORCH_EXTENSION_NAME=twice", "-o", str(tmp_path / "cuda.o")]
    done = subprocess.run(["nvcc", *flags, str(tmp_path / "cuda.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
