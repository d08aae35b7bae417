"""What a stated precision mode does to a result, independent of which algorithm a library picks."""

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
