"""What a model moves and computes: the least, as bound.py states it, and operator by operator."""

import math

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from playground import tensors
from playground.record import Work

GRADIENTS = {"forward": 0, "weights": 1, "weights_and_input": 2}  # how many each step computes beside the outputs


def count_work(name, model, inputs, outputs, mode):
    """Return the Work of one step of a model called `name`, on these inputs and outputs; `mode` is one of clock.MODES."""
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = [value for value in inputs if tensors.differentiable(value)]
    moved = _bytes([*model.parameters(), *inputs, *outputs])
    if mode != "forward":
        moved += _bytes([*filter(tensors.differentiable, outputs), *trained])
    if mode == "weights_and_input":
        moved += _bytes(wanted)
    count = _FLOPS.get(name, lambda *given: as_written(*given).flops)
    return Work(moved, count(model, inputs, mode))


def certain_bytes(model, inputs, outputs):
    """Return the bytes of outputs, and inputs on which they depend by PyTorch's gradient, that a right pass must move."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() if tensors.differentiable(value) else value for value in inputs]
        wanted = [value for value in leaves if tensors.differentiable(value)]
        try:
            found = [each for each in tensors.flatten(model(*leaves)) if each.requires_grad]
            gradients = torch.autograd.grad(found, wanted, [torch.rand_like(each) for each in found], allow_unused=True)
        except RuntimeError:  # no gradient, or no memory for one
            gradients = []
    read = sum(gradient.count_nonzero().item() * gradient.element_size() for gradient in gradients if gradient is not None)
    return read + _bytes(outputs)


def _bytes(values):
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _conv_pool_sigmoid_sum(model, inputs, mode):
    batch, channels, *size = inputs[0].shape
    kernel, pool = model.conv.kernel_size, _each_direction(model.avg_pool.kernel_size, 2)
    positions = batch * math.prod((n - k + 1) // p for n, k, p in zip(size, kernel, pool, strict=True))
    products = positions * model.conv.out_channels * channels * math.prod(kernel)
    return 2 * products * (1 + GRADIENTS[mode])


def _conv3d_div_max_gap_bias_sum(model, inputs, mode):
    batch, channels, *size = inputs[0].shape
    kernel, pool = model.conv.kernel_size, _each_direction(model.max_pool.kernel_size, 3)
    windows = batch * math.prod((n - k + 1) // p for n, k, p in zip(size, kernel, pool, strict=True))
    pairs = model.conv.out_channels * channels
    forward = windows * math.prod(pool) * pairs * math.prod((k + 1) / 2 for k in kernel)
    gradient = windows * pairs * math.prod(kernel)
    return round(2 * (forward + gradient * GRADIENTS[mode]))


def _alexnet_conv1(model, inputs, mode):
    batch, channels, *size = inputs[0].shape
    conv = model.conv1
    outputs = batch * conv.out_channels
    for n, k, stride, padding in zip(size, conv.kernel_size, conv.stride, conv.padding, strict=True):
        taps = [math.ceil((k - first) / stride) for first in range(min(k, stride))]  # of the convolutions at stride 1
        outputs *= ((n + 2 * padding - k) // stride + 1) * sum(count + 1 for count in taps) / 2
    return round(2 * outputs * channels) * (1 + GRADIENTS[mode])


def _each_direction(size, directions):
    return size if isinstance(size, tuple) else (size,) * directions


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of all operands and results of operators; a view moves nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not any(returned.alias_info and not returned.alias_info.is_write for returned in operator._schema.returns):
            self.bytes += _bytes(_pytree.tree_leaves((args, kwargs, result)))
        return result


def as_written(model, inputs, mode):
    """Return the Work of a step, operator by operator: bytes of operands and results, FLOPs by flop_counter."""
    model = tensors.copy_model(model).to("meta")
    inputs = [value.detach().to("meta") if isinstance(value, torch.Tensor) else value for value in inputs]
    if mode == "weights_and_input":
        inputs = [value.requires_grad_() if tensors.differentiable(value) else value for value in inputs]
    with torch.set_grad_enabled(mode != "forward"), FlopCounterMode(display=False) as counter, _Traffic() as traffic:
        outputs = [output for output in tensors.flatten(model(*inputs)) if output.requires_grad]
        if mode != "forward":
            upstream = [torch.empty_like(output) for output in outputs]
            torch.autograd.backward(outputs, upstream)
    return Work(traffic.bytes, counter.get_total_flops())


_FLOPS = {
    "conv_pool_sigmoid_sum": _conv_pool_sigmoid_sum,
    "conv3d_div_max_gap_bias_sum": _conv3d_div_max_gap_bias_sum,
    "alexnet_conv1": _alexnet_conv1,
}
