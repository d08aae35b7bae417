"""Inputs that tell a right kernel from a wrong one."""

from dataclasses import dataclass

import torch

from playground import tensors


@dataclass
class Probe:
    """A model's inputs; `upstream` holds a gradient for each output where gradients are wanted, and is None elsewhere."""

    name: str
    inputs: list
    upstream: list | None = None
    wanted_inputs: tuple = ()


def own(problem, seed):
    """What the problem itself is run on."""
    return Probe("own", tensors.make_inputs(problem, seed))


def scaled(problem, seed):
    """Normal values, with a scale (1/4 to 4) and an offset (-1 to 1) of its own for each sample.

    A sum over many sigmoids of a uniform input hardly varies, so that even a constant passes; under these inputs the samples'
    outputs differ by much more than a kernel's error. Inputs that are not of a floating-point type stay the problem's own.
    """
    inputs = tensors.make_inputs(problem, seed)
    return Probe("scaled", [_scaled(value) if tensors.differentiable(value) else value for value in inputs])


def _scaled(value):
    if value.dim() == 0:
        return torch.randn_like(value)
    per_sample = (value.shape[0],) + (1,) * (value.dim() - 1)
    scale = 4.0 ** (2 * torch.rand(per_sample, dtype=value.dtype) - 1)
    offset = 2 * torch.rand(per_sample, dtype=value.dtype) - 1
    return torch.randn_like(value) * scale + offset


def with_upstream(probe, outputs, seed):
    """The probe with normal upstream gradients for the outputs that can have one; all float inputs get a gradient."""
    torch.manual_seed(seed)
    upstream = [torch.randn_like(output) if tensors.differentiable(output) else None for output in outputs]
    wanted = tuple(i for i, value in enumerate(probe.inputs) if tensors.differentiable(value))
    return Probe(probe.name, probe.inputs, upstream, wanted)
