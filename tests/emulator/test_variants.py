"""Every CUDA variant of the project in check mode, which finds nothing, and in fast mode: its outputs, and its gradients where
it has them, against float64.

What the judge says of them in check mode is in the test_checked_*.py. Each runs in a process of its own, as libraries of one
mode do.
"""

import apart
import pytest

from playground import catalog

CUDA_VARIANTS = [(m, v) for m in catalog.models() for v in catalog.variants(m) if v.backend == "cuda"]

RUN = """
import sys
import torch
import cuda_emulator as emulator
from playground import catalog, tensors

model, path = catalog.find_model(sys.argv[1]), sys.argv[2]
with emulator.install(mode=sys.argv[3], source_file=path, time_limit=120):
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"][model.name])
    variant = catalog.find_variant(model, path)
    new = tensors.make_model(problem, catalog.load_variant(variant.path).ModelNew, 0)
    original = tensors.make_model(problem, problem.Model, 0).double()
    inputs = tensors.make_inputs(problem, 0)

    def results(model, given):
        outputs = tensors.flatten(model(*given))
        sum((output * output).sum() for output in outputs).backward()
        return [*outputs, *(parameter.grad for parameter in model.parameters()), *(value.grad for value in given)]

    try:
        ours = results(new, [value.clone().requires_grad_() for value in inputs])
    except NotImplementedError:
        with torch.no_grad():
            ours = tensors.flatten(new(*inputs))
    launches = emulator.launches()
    exact = results(original, [value.double().requires_grad_() for value in inputs])
assert launches, "the variant has run no kernel"
# Where two values of a window nearly tie, rounding sends the input's gradient to the other one: a few windows of thousands.
pools = any(isinstance(module, torch.nn.MaxPool3d) for module in original.modules())
for got, right in zip(ours, exact):  # those that do not train have outputs only
    off = ~((got.detach().double() - right.detach()).abs() <= 1e-2 * right.detach().abs().max())
    most = off.numel() // 200 if pools and got.shape == inputs[0].shape else 0
    assert off.sum() <= most, f"{off.sum()} of {off.numel()} elements are off"
"""


@pytest.mark.parametrize("mode", ["check", pytest.param("fast", marks=pytest.mark.full)])
@pytest.mark.parametrize("model, variant", CUDA_VARIANTS, ids=[f"{m.name}.{v.name}" for m, v in CUDA_VARIANTS])
def test_outputs_and_gradients(model, variant, mode):
    apart.run(RUN, model.name, variant.path, mode)
