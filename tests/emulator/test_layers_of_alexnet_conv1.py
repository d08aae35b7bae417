"""alexnet_conv1 built for other constants, in check mode: outputs and gradients, in both precisions.

What the judge changes of the model are sizes. Here v5_hopper and training_tensor_core have other layers in the place of conv1,
and v4's kernels the shared memory of an A100 (163 KB a block) and of a GeForce RTX 30, 40 or 50 (99 KB).
"""

import apart
import pytest

pytestmark = pytest.mark.full

# (in_channels, out_channels, kernel_size, stride, padding), and the input: a group of outputs that is not full, and channels in
# several chunks; a stride longer than the kernel, and nothing square; 400 taps; what the kernels do not take.
LAYERS = {
    "groups and chunks": ((5, 100, (3, 5), (2, 4), (1, 0)), (2, 5, 9, 131)),
    "stride over the kernel": ((2, 7, (2, 3), (6, 4), (0, 1)), (3, 2, 14, 40)),
    "400 taps": ((1, 3, (20, 20), (4, 4), (2, 2)), (1, 1, 40, 44)),
}
NOT_TAKEN = (5, 100, (3, 5), (1, 2), (1, 0)), (2, 5, 9, 31)

RUN = """
import ast, sys
import torch
import cuda_emulator as emulator
from playground import catalog

name, (layer, shape), limit = sys.argv[1], *map(ast.literal_eval, sys.argv[2:])
path = catalog.ROOT / f"kernels/alexnet_conv1/{name}.py"
with emulator.install(mode="check", source_file=str(path), time_limit=120):
    variant = catalog.load_variant(path)
    variant.ModelNew.shared_limit_kb = max(limit, 0)
    new = variant.ModelNew()
    torch.manual_seed(0)
    new.conv1 = torch.nn.Conv2d(*layer)
    exact = torch.nn.Conv2d(*layer).double()
    exact.load_state_dict(new.conv1.state_dict())
    x = torch.randn(shape)
    for strict, allowed in (False, 4e-3), (True, 1e-5):
        torch.backends.cudnn.allow_tf32 = not strict
        new.zero_grad()
        exact.zero_grad()
        output, truth = new(x), exact(x.double())
        upstream = torch.randn_like(output)
        output.backward(upstream)
        truth.backward(upstream.double())
        results = (output, truth), (new.conv1.weight.grad, exact.weight.grad), (new.conv1.bias.grad, exact.bias.grad)
        for what, (got, right) in zip(("output", "weight", "bias"), results):
            error = ((got - right).abs().max() / right.std()).item()
            assert error <= allowed, f"{what}, strict {strict}: off by {error:.1e} of the spread"
    assert bool(emulator.launches()) == (limit >= 0), "the variant has run no kernel, or PyTorch was to compute"
"""


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("variant", ["v5_hopper", "training_tensor_core"])
def test_layer(variant, layer):
    apart.run(RUN, variant, repr(LAYERS[layer]), 0)


@pytest.mark.parametrize("variant", ["v4_tensor_core", "v5_hopper", "training_tensor_core"])
def test_a_layer_that_the_kernels_do_not_take(variant):
    apart.run(RUN, variant, repr(NOT_TAKEN), -1)


# At 163 KB strict pipelines have fewer stages. At 99 KB a block has 48 outputs instead of 96, where strict 24 instead of 48.
@pytest.mark.parametrize("limit", [163, 99])
@pytest.mark.parametrize("variant", ["v4_tensor_core", "training_tensor_core"])
def test_less_shared_memory(variant, limit):
    conv1 = (3, 96, 11, 4, 2), (1, 3, 67, 63)
    apart.run(RUN, variant, repr(conv1), limit)
