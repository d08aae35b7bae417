"""What autograd expects of a variant with a gradient of its own: gradients of what is asked for, and clear errors.

Each runs in a process of its own in fast mode. test_variants.py holds all gradients against float64.
"""

import apart
import pytest

from playground import catalog
from playground.command import shared_text

pytestmark = pytest.mark.full

VARIANTS = [
    (model, variant)
    for model in catalog.models()
    for variant in catalog.variants(model)
    if variant.backend == "cuda" and shared_text.FUSED in variant.path.read_text()
]

RUN = """
import sys
import torch
import cuda_emulator as emulator
from playground import catalog, tensors

model, path = catalog.find_model(sys.argv[1]), sys.argv[2]
with emulator.install(mode="fast", source_file=path, time_limit=60):
    problem = catalog.load_problem(model.path, catalog.SETTINGS["counted"][model.name])
    new = tensors.make_model(problem, catalog.load_variant(catalog.find_variant(model, path).path).ModelNew, 0)
    (x,) = tensors.make_inputs(problem, 0)
    parameters = dict(new.named_parameters())

    def gradients(wanted, run=new, of_input=True, **more):
        given = x.clone().requires_grad_(of_input)
        out = run(given)
        outer = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)  # not the same for all samples
        leaves = [given if name == "x" else parameters[name] for name in wanted]
        return dict(zip(wanted, torch.autograd.grad(out, leaves, outer, **more), strict=True))

    def agree(found, expected):  # other kernels may compute a gradient that is wanted by itself
        for name, value in found.items():
            scale = expected[name].abs().max()
            assert (value - expected[name]).abs().max() <= 2e-3 * scale, name

    everything = gradients(["x", *parameters])
    for name in everything:
        agree(gradients([name]), everything)
    of_parameters = gradients(list(parameters), of_input=False)
    agree(of_parameters, everything)
    new.requires_grad_(False)
    agree(gradients(["x"]), everything)
    new.requires_grad_(True)

    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    for expected, of_input in ((everything, True), (of_parameters, False)):
        found = gradients(list(expected), compiled, of_input)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.compiler.reset()
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager", dynamic=True)  # sizes are symbols
    for count in (1, len(x)):
        found = torch.autograd.grad(compiled(x[:count]).sum(), list(parameters.values()))
        assert all(map(torch.equal, found, torch.autograd.grad(new(x[:count]).sum(), list(parameters.values()))))
    with torch.no_grad():
        without = new(x)
        assert not without.requires_grad and torch.equal(compiled(x), without)
    with torch.inference_mode():
        assert torch.equal(new(x), without)

    (slope,) = gradients(["x"], create_graph=True).values()
    slope.square().sum().backward()  # PyTorch's
    new.zero_grad()
    out = new(x).square().sum()
    out.backward(retain_graph=True)
    once = {name: value.grad.clone() for name, value in parameters.items()}
    out.backward()  # adds
    agree({name: value.grad for name, value in parameters.items()}, {name: 2 * value for name, value in once.items()})
    refused("a second time", out.backward)
"""


@pytest.mark.parametrize("model, variant", VARIANTS, ids=[f"{m.name}.{v.name}" for m, v in VARIANTS])
def test_training(model, variant):
    apart.run(apart.ASSERTIONS + RUN, model.name, variant.path)


TOGETHER = """
import copy
import torch
import cuda_emulator as emulator
from playground import catalog, tensors

CONSTANTS = {  # another build of the same file: one more set of operators in the process
    "conv_pool_sigmoid_sum": {"in_channels": 3, "out_channels": 10},
    "conv3d_div_max_gap_bias_sum": {"in_channels": 4, "out_channels": 8, "bias_shape": (8, 1, 1, 1)},
    "alexnet_conv1": {},
}

def gradients(module, x, outer):
    given = x.clone().requires_grad_()
    out = module(given)
    return torch.autograd.grad(out, [given, *module.parameters()], outer.view(out.shape))

def cases():
    for model in catalog.models():
        variant = catalog.load_variant(catalog.find_variant(model, "v5_hopper").path)
        for constants in ({}, CONSTANTS[model.name]):
            problem = catalog.load_problem(model.path, catalog.SETTINGS["counted"][model.name] | constants)
            original, new = (tensors.make_model(problem, kind, 0) for kind in (problem.Model, variant.ModelNew))
            yield model.name, original, new, problem

torch.backends.cudnn.allow_tf32 = False  # a maximum that TF32 finds elsewhere takes its gradient along
with emulator.install(mode="fast", time_limit=60):
    found = list(cases())
    for turn in range(2):  # in the second one, every library is loaded and was called
        for name, original, new, problem in found:
            (x,) = tensors.make_inputs(problem, turn)
            new.load_state_dict(original.state_dict())
            outer = torch.linspace(0.5, 1.5, original(x).numel())
            exact = gradients(copy.deepcopy(original).double(), x.double(), outer.double())
            for got, right in zip(gradients(new, x, outer), exact, strict=True):
                assert (got - right).abs().max() <= 1e-4 * right.abs().max(), (turn, name)
"""


def test_all_in_one_process():
    apart.run(TOGETHER)
