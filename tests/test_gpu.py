"""What only a GPU can show: faults of kernels, and the CUDA variants themselves at odd sizes."""

import pytest
import torch

from playground import catalog
from playground.report.progress import Progress
from playground.runner import Options, Runner, Task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

ILLEGAL_ACCESS = """
import torch
from torch.utils.cpp_extension import load_inline

CUDA = "__global__ void scribble(float* p) { p[threadIdx.x] = 1; }\\nvoid launch(float* p) { scribble<<<1, 32>>>(p); }"
BINDING = '''
#include <torch/library.h>
#include <ATen/core/Tensor.h>
void launch(float*);
at::Tensor scribble(const at::Tensor& x) { launch((float*)64); return x.clone(); }
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("scribble(Tensor x) -> Tensor", &scribble); }
'''

class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = torch.nn.Linear(features, outputs)

    def forward(self, x):
        load_inline("illegal_access", BINDING, CUDA, is_python_module=False, no_implicit_headers=True)
        return torch.ops.illegal_access.scribble(torch.tanh(self.linear(x)))
"""


def run(tasks):
    with Progress() as progress:
        return Runner(Options(quick=True), progress).run(tasks)


def test_faults_are_verdicts_and_the_rest_goes_on(tiny_problem, write_variant, write_forward):
    model = catalog.find_model(tiny_problem)
    variants = [
        write_variant("illegal_access", ILLEGAL_ACCESS),
        write_forward("out_of_memory", "return torch.empty(1 << 42, device=x.device) + x"),
        write_forward("hangs", "torch.cuda._sleep(1 << 62); return torch.tanh(self.linear(x))"),
        write_forward("right", "return torch.tanh(self.linear(x))"),
    ]
    with Progress() as progress:
        results = Runner(Options(quick=True, time_limit=60), progress).run([Task(model, v, "cuda") for v in variants])
    reasons = {result["variant"]: result["reason"] for result in results}
    assert [result["verdict"] for result in results] == ["error", "error", "error", "pass"], reasons
    assert "illegal memory access" in reasons["illegal_access"]
    assert "out of memory" in reasons["out_of_memory"]
    assert "time limit" in reasons["hangs"]


ODD_SIZES = {
    "conv_pool_sigmoid_sum": [
        {"batch_size": 1, "height": 23, "width": 31},
        {
            "batch_size": 3,
            "in_channels": 5,
            "out_channels": 7,
            "kernel_size": 5,
            "pool_kernel_size": 3,
            "height": 40,
            "width": 29,
        },
        {"batch_size": 200, "height": 64, "width": 64},
        {
            "batch_size": 2,
            "in_channels": 1,
            "out_channels": 130,
            "kernel_size": 1,
            "pool_kernel_size": 1,
            "height": 9,
            "width": 9,
        },
    ],
    "conv3d_div_max_gap_bias_sum": [
        {"batch_size": 1, "depth": 5, "height": 9, "width": 11},
        {"batch_size": 3, "divisor": -3.0, "pool_size": (1, 3, 2), "depth": 6, "height": 13, "width": 17},
        {"batch_size": 2, "sum_dim": (0, 2), "in_channels": 3, "out_channels": 5, "depth": 7, "height": 8, "width": 9},
        {"batch_size": 300, "depth": 4, "height": 10, "width": 10},
    ],
    "alexnet_conv1": [{"batch_size": 1}, {"batch_size": 3, "height": 35, "width": 50}, {"batch_size": 300, "height": 63}],
}


@pytest.mark.parametrize("name, settings", [(name, s) for name, sizes in ODD_SIZES.items() for s in sizes])
def test_cuda_variants_at_odd_sizes(name, settings):
    model = catalog.find_model(name)
    cuda = [variant for variant in catalog.variants(model) if variant.backend == "cuda"]
    results = run([Task(model, variant, "cuda", settings) for variant in cuda])
    assert {r["variant"]: (r["verdict"], r["reason"]) for r in results} == {v.name: ("pass", None) for v in cuda}


@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.name)
def test_empty_batches_and_graphs(model):
    """Batch 0 gives an empty result; the same bits come twice and out of a CUDA graph; torch.compile(fullgraph=True) works."""
    settings = {
        "batch_size": 2,
        **({"depth": 6, "height": 12, "width": 12} if "3d" in model.name else {"height": 64, "width": 64}),
    }
    problem = catalog.load_problem(model.path, settings)
    (x,) = (value.cuda() for value in problem.get_inputs())
    for variant in catalog.variants(model):
        if variant.backend != "cuda":
            continue
        new = catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs()).cuda()
        with torch.no_grad():
            expected = new(x)
            assert new(x[:0]).shape[0] == 0
            assert torch.equal(new(x), expected)
            compiled = torch.compile(new, fullgraph=True)(x)
            torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=0)  # PyTorch's own convolution in v1 may differ
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                new(x)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = new(x)
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)


@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.name)
def test_wrong_tensors_are_refused(model):
    problem = catalog.load_problem(model.path, {"batch_size": 1})
    (x,) = (value.cuda() for value in problem.get_inputs())
    for variant in catalog.variants(model):
        if variant.backend == "cuda":
            new = catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs()).cuda()
            for wrong in (x.double(), x.cpu(), x[0, 0], x[:, :1]):
                with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)):
                    new(wrong)
