"""What a stated precision mode may do to a result, independent of which algorithm a library picks."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# The operators that TF32 mode applies to, with the positions of the operands that it rounds.
_ROUNDED_OPERANDS = {
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}


def round_to_tf32(x):
    """Nearest TF32 value (10 explicit mantissa bits, ties away from zero, as cvt.rna.tf32.f32 does), in x's own type."""
    bits = x.to(torch.float32).view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded.to(x.dtype), x)


class RoundedOperands(TorchDispatchMode):
    """While active, convolutions and matrix products see their operands rounded to TF32, and compute in the given type.

    Run in float64 it gives the error that TF32 mode permits: rounding of the operands and nothing else.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        positions = _ROUNDED_OPERANDS.get(function, ())
        args = [round_to_tf32(value) if i in positions else value for i, value in enumerate(args)]
        return function(*args, **(kwargs or {}))


class Perturbed(TorchDispatchMode):
    """While active, float64 results, and operands of convolutions and products, are off by +-4 units in float32's last place.

    The signs are random, from `seed`. Run in float64 it gives an error that strict float32 permits: roundings of every step,
    some more of them for sums, and what follows where they decide which element a maximum takes its gradient to.
    """

    UNITS = 4

    def __init__(self, seed):
        super().__init__()
        self._seed = seed
        self._generators = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        positions = _ROUNDED_OPERANDS.get(function, ())
        args = [self._perturbed(value) if i in positions else value for i, value in enumerate(args)]
        result = function(*args, **(kwargs or {}))
        if any(output.alias_info is not None for output in function._schema.returns):
            return result  # a view, or the input itself
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._perturbed, result)

    def _perturbed(self, value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        generator = self._generators.setdefault(value.device, torch.Generator(value.device).manual_seed(self._seed))
        signs = torch.randint(0, 2, value.shape, device=value.device, generator=generator, dtype=torch.int8)
        return value * (1 + self.UNITS * torch.finfo(torch.float32).eps * (2.0 * signs.double() - 1))
