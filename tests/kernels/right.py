"""A variant and its original at any size, and what "right" means for their outputs and gradients: what the judge means by it.

That is as near to float64 as eager PyTorch is, or as the precision permits, with NaN and infinity where eager has them.
"""

import contextlib
import copy
import functools

import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_emulator as emulator
from playground import catalog, tensors
from playground.judge.oracle import Oracle
from playground.judge.probes import Probe, with_upstream
from playground.judge.references import references_of
from playground.judge.tolerance import Reference

TINY = {
    "conv_pool_sigmoid_sum": {"batch_size": 3, "height": 23, "width": 31},
    "conv3d_div_max_gap_bias_sum": {"batch_size": 3, "depth": 7, "height": 11, "width": 13},
    "alexnet_conv1": {"batch_size": 3, "height": 35, "width": 50},
}
OTHERS = {"pool_size": (1, 3, 3)}  # what cpu_winograd leaves to PyTorch
FORMS = {"conv3d_div_max_gap_bias_sum": [{}, {"sum_dim": 0}, OTHERS]}  # in which CPU variants take other ways


def where(variant, mode="fast"):
    """A context in which the variant runs here: CUDA under the emulator, in this mode."""
    if variant.backend == "cpu":
        return contextlib.nullcontext()
    return emulator.install(mode=mode, source_file=str(variant.path), time_limit=120)


@functools.cache
def load_variant(path, march=None):
    """The variant's module; one that builds for `march` in place of this machine."""
    module = catalog.load_variant(path)
    if march:
        build = module.load_inline

        def build_for(name, text, extra_cflags, **options):
            flags = [f"-march={march}" if flag == "-march=native" else flag for flag in extra_cflags]
            assert flags != extra_cflags
            return build(f"{name}_{march.replace('-', '_')}", text, extra_cflags=flags, **options)

        module.load_inline = build_for
    return module


def make(model, variant, march=None, layer=None, bias=True, **settings):
    """(original, variant) with the same weights, and a normal input of which every sample has a size of its own.

    `layer` and `bias` are of the convolution that takes the place of alexnet_conv1's.
    """
    problem = catalog.load_problem(model.path, TINY[model.name] | settings)
    original = tensors.make_model(problem, problem.Model, seed=0)
    new = load_variant(variant.path, march).ModelNew(*problem.get_init_inputs())
    (x,) = tensors.make_inputs(problem, seed=1)
    shape = list(x.shape)
    if layer:
        original.conv1, new.conv1 = (torch.nn.Conv2d(*layer, bias=bias) for _ in range(2))
        shape[1] = layer[0]
    new.load_state_dict(original.state_dict())
    scale = torch.linspace(0.5, 2.0, len(x)).view(-1, *[1] * (x.dim() - 1))
    return original, new, torch.randn(shape) * scale


def assert_as_right(reference, name, actual):
    if reference.is_blunt:  # it varies by less than it is rounded
        torch.testing.assert_close(actual.double(), reference.float64, rtol=1e-5, atol=0)
    else:
        complaint = reference.compare(name, actual).complaint
        assert complaint is None, complaint


def assert_right(original, new, x):
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(x.double())
        assert_as_right(Reference(exact, original(x)), "the output", new(x))


def assert_trains_right(original, new, x, precision="fp32"):
    """Output and gradients, under upstream gradients that differ, are as near to float64 as the judge wants them."""
    with torch.no_grad():
        probe = with_upstream(Probe("normal", [x]), [original(x)], seed=5)
    oracle = Oracle(original, torch.device("cpu"), emulated=precision == "tf32")
    truth, eager, permitted = oracle.reference(probe), oracle.eager(probe), oracle.permitted(probe, precision)
    (out,), found = tensors.gradients(new, probe.inputs, probe.upstream, probe.wanted_inputs)
    assert found.keys() == truth.gradients.keys()
    (of_output,), references = references_of(truth, eager, permitted, decisions=lambda: oracle.decisions(probe, truth))
    assert_as_right(of_output, "the output", out.detach())
    for name, reference in references.items():
        assert_as_right(reference, name, found[name])


def gradients(new, x, upstream=None):
    """Of x and of each parameter; upstream each output has a gradient of its own, unless told otherwise."""
    x = x.detach().requires_grad_()
    out = new(x)
    upstream = torch.linspace(-1, 2, out.numel()).view(out.shape) if upstream is None else upstream
    return torch.autograd.grad(out, [x, *new.parameters()], upstream)


def namespace_of(new):
    """The namespace in torch.ops of a variant's operators."""
    return type(new).__init__.__globals__["NAME"]


class Recorder(TorchDispatchMode):
    """`calls` are {operator: (args, kwargs) of its last call} of one namespace."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace = namespace
        self.calls = {}
        self.watch = BaseTorchFunctionMode()  # where one is active, no variant passes the dispatcher by

    def __enter__(self):
        self.watch.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.watch.__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == self.namespace:
            self.calls[operator] = args, kwargs or {}
        return operator(*args, **kwargs or {})
