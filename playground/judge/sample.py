"""Which elements of a large result are compared with float64 where all would take too long; the rest is with eager PyTorch."""

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PARTS = 4096
LEAST, MOST = 16 / PARTS, 0.9  # of all, where not all is compared
SMALL = 1 << 20  # elements: so few are all compared
IN_A_RUN = 64 << 20  # bytes of a result, in a run over many pairs: all of 4 GiB take minutes a pair


@dataclass(frozen=True)
class Sample:
    """A `share` of the parts of each large tensor, drawn from the seed `secret`, others for each probe, and always the last."""

    share: float = 1.0
    secret: int = 0

    @property
    def is_part(self) -> bool:
        return self.share < 1.0

    @property
    def text(self) -> str:
        return (
            f"{self.share:.2g} of each large result, drawn at random, was compared with float64, "
            "and the rest with eager PyTorch: all would take too much memory or time"
        )

    def of(self, tensor: "torch.Tensor", probe: str) -> "torch.Tensor":
        """Return the sample of a tensor that a probe gives, in one dimension; a small one as it is."""
        if not self.is_part or tensor.numel() <= SMALL:
            return tensor
        import torch

        length = math.ceil(tensor.numel() / PARTS)
        count = tensor.numel() // length
        drawn = random.Random(f"{self.secret} {probe} {tensor.numel()}").sample(range(count), math.ceil(self.share * count))
        flat = tensor.reshape(-1)
        parts = flat[: count * length].view(count, length)[torch.tensor(sorted({*drawn, count - 1}), device=flat.device)]
        return torch.cat([parts.flatten(), flat[count * length :]])


ALL = Sample()
