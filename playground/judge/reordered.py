"""The original in float32, with the terms of its sums added in other orders than PyTorch's, to measure how exact those are."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from playground.judge.precision import Again, Decomposing

aten = torch.ops.aten

ORDERS = ("one after another", "strided", "in blocks", "in one pass")
LANES = 256  # partial sums of the strided order, as the threads of a block make them
BLOCK = 1024  # terms of a partial sum of the blocked order
SLICES = 8  # partial sums of a strided product
TILE = 32  # terms that a blocked product adds at once
CHUNK = 1 << 26  # terms that are on the host at a time

# Operators whose decomposition ends in those of Reordered: only they add.
_DECOMPOSED = """
    native_batch_norm cudnn_batch_norm native_layer_norm native_group_norm _softmax _log_softmax logsumexp linalg_vector_norm
    mse_loss smooth_l1_loss huber_loss nll_loss_forward std std_mean addmm baddbmm
"""


class Reordered(Decomposing):
    """While active, float32 sums add their terms in one of ORDERS: those of reductions, running sums, products, convolutions.

    "in one pass" also takes a variance as the mean of the squares less the square of the mean. With a `seed` the terms are
    shuffled first.
    """

    def __init__(self, order: str, seed: int | None = None) -> None:
        super().__init__()
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._order = "one after another" if order == "in one pass" else order
        self._one_pass = order == "in one pass"
        self._decompositions = torch._decomp.get_decompositions([getattr(aten, name) for name in _DECOMPOSED.split()])
        self._own: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), self._sum),
            **dict.fromkeys((aten.mean.dim, aten.mean.default), self._mean),
            aten.var.correction: lambda *args, **kwargs: self._var_mean(*args, **kwargs)[0],
            aten.var_mean.correction: self._var_mean,
            aten.var_mean.dim: lambda x, dim, unbiased=True, keepdim=False: self._var_mean(x, dim, unbiased, keepdim),
            aten.cumsum.default: functools.partial(_running, np.add, aten.cumsum.default),
            aten.cumprod.default: functools.partial(_running, np.multiply, aten.cumprod.default),
            **dict.fromkeys((aten.mm.default, aten.bmm.default), self._product),
            **{aten.linear.default: self._linear, aten.convolution.default: self._convolution},
        }

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.dtype == torch.float32:
            if function in self._own:
                return self._own[function](*args, **kwargs)
            if function in self._decompositions:
                with Again(self):
                    return self._decompositions[function](*args, **kwargs)
        return function(*args, **kwargs)

    def _added(self, rows: Tensor) -> Tensor:
        length = rows.shape[1]
        if self._order == "strided":
            return _sequential(_folded(rows, -(-length // LANES), LANES)).sum(1)
        if self._order == "in blocks":
            blocks = _sequential(_folded(rows, -(-length // BLOCK), BLOCK).transpose(1, 2))
            return _sequential(blocks[..., None])[:, 0]
        return _sequential(rows[..., None])[:, 0]

    def _sum(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        if dtype not in (None, torch.float32) or not x.numel():
            return aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
        dims = sorted(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim or range(x.dim()))) if x.dim() else []
        kept = [d for d in range(x.dim()) if d not in dims]
        rows = self._shuffled(x.permute(*kept, *dims).reshape(math.prod(x.shape[d] for d in kept), -1))
        step = max(1, CHUNK // rows.shape[1])
        sums = torch.cat([self._added(part.cpu()) for part in rows.split(step)])
        shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
        return sums.to(x.device).reshape(shape)

    def _shuffled(self, *values: Tensor, dims: tuple[int, ...] = (-1,)) -> Any:
        """The values with the terms along these dimensions, one of each, in the same random order."""
        if self._generator is not None:
            order = torch.randperm(values[0].shape[dims[0]], generator=self._generator).to(values[0].device)
            values = tuple(value.index_select(dim, order) for value, dim in zip(values, dims, strict=True))
        return values[0] if len(values) == 1 else values

    def _mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        total = self._sum(x, dim, keepdim, dtype=dtype)
        return total / (x.numel() / max(1, total.numel()))

    def _var_mean(
        self, x: Tensor, dim: Any = None, correction: float | None = None, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        mean = self._mean(x, dim, True)
        count = x.numel() / max(1, mean.numel())
        correction = 1 if correction is None else correction
        if self._one_pass:
            squares = (self._mean(x * x, dim, True) - mean * mean).clamp(min=0) * (count / max(count - correction, 0))
        else:
            squares = self._sum((x - mean).square(), dim, True) / max(count - correction, 0)
        if not keepdim:
            dims = tuple(range(x.dim())) if dim is None or dim == [] else dim
            squares, mean = squares.squeeze(dims), mean.squeeze(dims)
        return squares, mean

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self._shuffled(a, b, dims=(-1, -2))
        length = a.shape[-1]
        if self._order == "one after another":
            total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)
            for k in range(length):
                total += a[..., k, None] * b[..., k, None, :]
            return total
        parts = _parts(length, self._order)
        return functools.reduce(Tensor.add_, (torch.matmul(a[..., part], b[..., part, :]) for part in parts))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = self._product(x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], weight.shape[0])
        return result if bias is None else result + bias

    def _convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        """One input channel after another; the library adds what is within one."""
        _stride, _padding, _dilation, transposed, _output_padding, groups = settings
        channels = weight.shape[0] if transposed else weight.shape[1]
        if groups > 1 or channels == 1:
            return aten.convolution.default(x, weight, bias, *settings)
        x, weight = self._shuffled(x, weight, dims=(1, 0 if transposed else 1))
        parts = [slice(c, c + 1) for c in range(channels)]
        parts = parts if self._order == "one after another" else _parts(channels, self._order)
        pairs = ((x[:, part], weight[part] if transposed else weight[:, part]) for part in parts)
        total = functools.reduce(Tensor.add_, (aten.convolution.default(*pair, None, *settings) for pair in pairs))
        return total if bias is None else total + bias.view(1, -1, *[1] * (x.dim() - 2))


def _folded(rows: Tensor, count: int, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, count * width - rows.shape[1])).reshape(-1, count, width)


def _sequential(terms: Tensor) -> Tensor:
    """(rows, terms, lanes) -> (rows, lanes), one term after another in float32, as NumPy adds along outer axes."""
    lanes = terms.shape[2]
    wide = terms.permute(1, 0, 2).reshape(terms.shape[1], -1)
    wide = torch.cat([wide, wide], 1) if wide.shape[1] == 1 else wide
    added = torch.from_numpy(np.add.reduce(wide.contiguous().numpy(), axis=0))
    return added[: terms.shape[0] * lanes].reshape(-1, lanes)


def _running(
    operation: np.ufunc, otherwise: Callable[..., Tensor], x: Tensor, dim: Any, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A running sum or product, one term after another; that of PyTorch where it is no float32 or has no dimension."""
    if dtype not in (None, torch.float32) or not x.dim():
        return otherwise(x, dim, dtype=dtype)
    moved = x.detach().cpu().movedim(dim, 0).contiguous().numpy()
    return torch.from_numpy(operation.accumulate(moved, axis=0)).movedim(0, dim).contiguous().to(x.device)


def _parts(length: int, order: str) -> list[slice]:
    if order == "strided":
        return [slice(k, None, SLICES) for k in range(min(SLICES, length))]
    return [slice(start, start + TILE) for start in range(0, length, TILE)]
