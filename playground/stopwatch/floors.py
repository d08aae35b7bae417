"""The least that a model must move and compute, and the time that takes at this machine's measured ceilings.

Bytes: every input, parameter and output once, in float32. FLOPs (two a multiply-add) are those of the cheapest known way to
compute the model exactly, stated here and nowhere else; a model that is not listed counts what its original computes,
directly, so a variant that gets by with less (Winograd's way of convolving) can come out below that floor, at more than 100%.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a forward pass must at least move (bytes) and do (floating-point operations)."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Floor:
    milliseconds: float
    bound: str  # "memory" or "compute"


def floor(work, ceilings, precision):
    """The larger of the two times. `ceilings` is a machine.ceilings.Ceilings; `precision` is "tf32" or "fp32"."""
    memory = work.bytes / max(ceilings.read_bytes_per_second, ceilings.copy_bytes_per_second) * 1e3
    rate = ceilings.tf32_flops if precision == "tf32" else ceilings.fp32_flops
    compute = work.flops / rate * 1e3
    return Floor(max(memory, compute), "memory" if memory >= compute else "compute")


def count_work(name, model, inputs, outputs):
    """Work of one forward pass of a model called `name`, for these inputs and outputs."""
    import torch

    everything = [*model.parameters(), *inputs, *outputs]
    moved = sum(t.numel() * t.element_size() for t in everything if isinstance(t, torch.Tensor))
    counter = _FLOPS.get(name, _flops_of_original)
    return Work(moved, counter(model, inputs, outputs))


def _conv_pool_sigmoid_sum(model, inputs, outputs):
    """Pooling moves in front of the weights, which leaves one product of inner size C*k*k a pooled position."""
    batch, channels, height, width = inputs[0].shape
    kernel_h, kernel_w = model.conv.kernel_size
    pool = model.avg_pool.kernel_size
    pool_h, pool_w = pool if isinstance(pool, tuple) else (pool, pool)
    positions = batch * ((height - kernel_h + 1) // pool_h) * ((width - kernel_w + 1) // pool_w)
    return 2 * positions * model.conv.out_channels * channels * kernel_h * kernel_w


def _flops_of_original(model, inputs, outputs):
    """Convolutions and matrix products as written (torch.utils.flop_counter), on meta tensors, so that nothing is computed."""
    import copy

    from torch.utils.flop_counter import FlopCounterMode

    model = copy.deepcopy(model).to("meta")
    inputs = [value.to("meta") if hasattr(value, "to") else value for value in inputs]
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops()


_FLOPS = {"conv_pool_sigmoid_sum": _conv_pool_sigmoid_sum}
