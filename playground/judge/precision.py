"""What a stated precision mode may do to a result, independent of which algorithm a library picks."""

import contextlib
import functools
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from playground import modes, tensors
from playground.judge.classes import PRECISIONS

aten = torch.ops.aten

# Families of operators, with the setting of PyTorch that permits TF32 to each.
FAMILIES: dict[str, Any] = {
    "convolution": torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    "recurrence": torch.backends.cudnn.rnn,
    "product": torch.backends.cuda.matmul,
}
# The operators that multiply, with their family and the positions of the operands that TF32 rounds.
_OPERANDS: dict[Any, tuple[str, tuple[int, ...]]] = {
    **{aten.convolution.default: ("convolution", (0, 1)), aten.convolution_backward.default: ("convolution", (0, 1, 2))},
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.linear.default), ("product", (0, 1))),
    **dict.fromkeys((aten.addmm.default, aten.addbmm.default, aten.baddbmm.default), ("product", (1, 2))),
}
# Operators that add terms without rounding them to TF32, and the positions of what they add.
_OF_ONE = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default)
_SUMS: dict[Any, tuple[int, ...]] = dict.fromkeys(_OF_ONE, (0,))
_SUMS |= {aten.dot.default: (0, 1), aten.mv.default: (0, 1), aten.addmv.default: (0, 1, 2)}
# Whole layers in one operator, which _Decomposed takes apart.
_ATTENTION = """
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention_for_cpu _native_multi_head_attention _transformer_encoder_layer_fwd"""
_LAYERS = dict.fromkeys(_ATTENTION.split(), "product") | dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), "recurrence")
# Layers in one operator that a kernel may compute in several steps; RoundedResults takes them apart.
_OF_SEVERAL_STEPS = """
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
    native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _native_batch_norm_legit
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
"""
_CUMULATIVE_PRODUCTS = frozenset({torch.cumprod, Tensor.cumprod})
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def round_to_tf32(x: Tensor) -> Tensor:
    """Return the nearest TF32 value (10 explicit mantissa bits, ties away from zero, as cvt.rna.tf32.f32), in x's own type."""
    bits = x.to(torch.float32).view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded.to(x.dtype))  # the sum of bits can end a NaN; an infinity stays one


def cut_to_tf32(x: Tensor) -> Tensor:
    """Return x rounded to TF32 towards zero, as tensor cores do with float32 that nobody has rounded before."""
    cut = (x.to(torch.float32).view(torch.int32) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isnan(x), x, cut.to(x.dtype))


def _through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


# Precisions lower than float32's: what they make of a number.
LOWER = dict(zip(PRECISIONS, (round_to_tf32, _through(torch.float16), _through(torch.bfloat16)), strict=True))


CUT = "tf32 towards zero"
_ROUNDINGS = LOWER | {CUT: cut_to_tf32}


def tf32_families(device: torch.device, emulated: bool = False) -> frozenset[str]:
    """Return the families to which this process's settings permit TF32, where the device has it; an `emulated` GPU does."""
    if not emulated and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        return frozenset()
    return frozenset(name for name, setting in FAMILIES.items() if setting.fp32_precision == "tf32")


def forbid_tf32() -> None:
    """Forbid TF32 in this process."""
    modes.set_fp32_precision(dict.fromkeys(FAMILIES.values(), "ieee"))


@contextlib.contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Have float32 computed in float32 on the device while this is active."""
    before = {setting: setting.fp32_precision for setting in FAMILIES.values()} if device.type == "cuda" else {}
    try:
        modes.set_fp32_precision(dict.fromkeys(before, "ieee"))
        yield
    finally:
        modes.set_fp32_precision(before)


class _Decomposed(TorchFunctionMode):
    """While active, recurrent layers and attention consist of matrix products that a dispatch mode can see."""

    def __init__(self) -> None:
        super().__init__()
        self.in_recurrence = False
        self._numbers: list[tuple[int, int]] = []  # of autograd nodes, from and to, of each recurrent layer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CUMULATIVE_PRODUCTS and torch.is_grad_enabled() and not (kwargs or {}).keys() - {"input", "dim"}:
            return _cumulative_product(*args, **(kwargs or {}))
        if function not in _RECURRENT:
            return function(*args, **(kwargs or {}))
        first = torch._C._autograd._get_sequence_nr()
        self.in_recurrence = True
        try:
            with _without_libraries():
                return function(*args, **(kwargs or {}))
        finally:
            self.in_recurrence = False
            self._numbers.append((first, torch._C._autograd._get_sequence_nr()))

    def contains(self, node: Any) -> bool:
        return any(first <= node._sequence_nr() < last for first, last in self._numbers)


class _CumulativeProduct(torch.autograd.Function):
    """Whose gradient is computed at once: under a dispatch mode PyTorch goes through it element by element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: Any) -> Tensor:
        product = torch.cumprod(x, dim)
        ctx.save_for_backward(x, product)
        ctx.dim = dim
        return product

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, product = ctx.saved_tensors
        with _disable_current_modes():
            gradient = aten.cumprod_backward(upstream, x, ctx.dim, product)
        return gradient.clone(), None  # a step that the modes see


def _cumulative_product(input: Tensor, dim: Any) -> Any:
    return _CumulativeProduct.apply(input, dim)


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    """Without cuDNN and oneDNN. torch.backends.cudnn.flags would raise where a `fp32_precision` of cuDNN's has changed."""
    cudnn, onednn = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
    torch._C._set_cudnn_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(cudnn)
        torch._C._set_mkldnn_enabled(onednn)


class Uncompiled(TorchDispatchMode):
    """Nothing is compiled where these modes are active; guarding against it would import torch._dynamo, for 1.4 seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Decomposing(Uncompiled):
    """While active, whole layers consist of operators that a subclass sees: convolutions, products, sums."""

    def __init__(self) -> None:
        super().__init__()
        self._decomposed = _Decomposed()

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as active:
            active.enter_context(sdpa_kernel(SDPBackend.MATH))
            active.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            active.enter_context(self._decomposed)
            self._active = active.pop_all()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._active.close()

    def _operands(self, function: Any) -> Any:
        """(family, positions) of the operator's operands; (None, ()) for one that does not multiply."""
        family, positions = _OPERANDS.get(function, (None, ()))
        if family == "product":
            node = torch._C._current_autograd_node()
            if self._decomposed.in_recurrence or (node is not None and self._decomposed.contains(node)):
                family = "recurrence"
        return family, positions


class RoundedOperands(Decomposing):
    """While active, operators of the `families` see their operands rounded, and compute in the given type.

    With a `seed` numbers are rounded under a random scale between 1/2 and 1: another rounding that the mode permits.
    """

    def __init__(self, families: Collection[str] = frozenset(FAMILIES), to: str = "tf32", seed: int | None = None) -> None:
        super().__init__()
        self._families = families
        self._round = _rounding(to, seed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        family, positions = self._operands(function)
        if family in self._families:
            args = [self._round(value) if i in positions else value for i, value in enumerate(args)]
        return function(*args, **(kwargs or {}))


class RoundedResults(Decomposing):
    """While active, results of operators, steps of norms and softmax, and operands of products are rounded; `seed` as above."""

    def __init__(self, to: str, seed: int | None = None) -> None:
        super().__init__()
        self._round = _rounding(to, seed)
        names = [name for name in _OF_SEVERAL_STEPS.split() if hasattr(aten, name)]  # which this release has
        self._steps = get_decompositions([getattr(aten, name) for name in names])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._steps:
            with Again(self):
                return self._steps[function](*args, **(kwargs or {}))
        _, positions = self._operands(function)
        args = [self._rounded(value) if i in positions else value for i, value in enumerate(args)]
        result = function(*args, **(kwargs or {}))
        is_step = not _is_view(function) and function is not aten._to_copy.default  # such as that of the inputs to float64
        return _with_each(self._rounded, result) if is_step else result

    def _rounded(self, value: Any) -> Any:
        is_wide = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1  # than fp8
        return self._round(value) if is_wide else value


def _rounding(to: str, seed: int | None) -> Callable[[Tensor], Tensor]:
    scale = 1.0 if seed is None else 1.0 - torch.rand((), generator=torch.Generator().manual_seed(seed)).item() / 2
    return lambda value: _ROUNDINGS[to](value * scale) / scale


class Again(Uncompiled):
    """While active within a dispatch mode's own handler, as for a decomposition, operators go to that mode once more."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_dispatch__(function, types, args, kwargs)


class Families(Uncompiled):
    """While active, it collects the families of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str | None] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        family, _ = _OPERANDS.get(function, (None, ()))
        self.found.add(family or _LAYERS.get(function._schema.name.removeprefix("aten::")))
        return function(*args, **(kwargs or {}))


class Wider(Uncompiled):
    """While active, `found` becomes whether an operator gives floating-point numbers of more bytes than `dtype` has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.found, self._bytes = False, dtype.itemsize

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        floats = [each for each in torch.utils._pytree.tree_leaves(result) if tensors.differentiable(each)]
        self.found |= any(each.dtype.itemsize > self._bytes for each in floats)
        return result


_TO_WHOLE = {"round", "floor", "ceil", "trunc", "fix", "floor_divide", "sign", "sgn", "heaviside", "histc"}


class Perturbed(Decomposing):
    """While active, float32 results, and operands of products and sums, are off by +-`units` more in the last place of `dtype`.

    The signs are random, from `seed`. The run then has an error that strict float32 permits: a few roundings of every step,
    more for sums, and the decisions that they change.
    """

    UNITS = 3
    _OF = torch.float32  # the type of what is off
    _converts = False  # whether conversions are steps, which move equal inputs apart
    _TABLE = (1 << 22) + 15  # signs, of which each tensor takes a stretch from a random place
    _tables: ClassVar[dict[Any, Tensor]] = {}  # one for each class, device and unit, shared by all

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, units: float = UNITS) -> None:
        super().__init__()
        self._places = random.Random(seed)
        self._unit = units * torch.finfo(dtype).eps
        self._has_rounded = False  # to whole numbers, or compared: those are kept, or a conversion to integers would cut them

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        self._has_rounded |= name in _TO_WHOLE or (kwargs or {}).get("rounding_mode") is not None
        positions = _SUMS.get(function) or self._operands(function)[1]
        args = [self._perturbed(value) if i in positions else value for i, value in enumerate(args)]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor):  # compared or converted, from one to the other
            self._has_rounded |= args[0].is_floating_point() != result.is_floating_point()
        is_step = not _is_view(function) and (self._converts or function is not aten._to_copy.default)
        return _with_each(self._perturbed, result) if is_step else result

    def _perturbed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != self._OF:
            return value
        table, count = self._table(value.device), value.numel()
        if count > self._TABLE and value.layout is torch.strided:
            distinct = value[tuple(slice(1 if stride == 0 else None) for stride in value.stride())]
            if distinct.shape != value.shape:  # expanded, and larger than its memory
                return self._perturbed(distinct).expand(value.shape)
        if self._has_rounded and _is_whole(value):
            return value
        start = self._places.randrange(max(1, self._TABLE - count))
        if start + count > self._TABLE:
            table = table.repeat(-(-(start + count) // self._TABLE))
        return value * table[start : start + count].view(value.shape)

    def _table(self, device: torch.device) -> Tensor:
        key = type(self), device, self._unit
        if key not in self._tables:
            signs = self._signs(torch.Generator().manual_seed(0))
            self._tables[key] = (1 + self._unit * signs).to(device)
        return self._tables[key]

    def _signs(self, generator: torch.Generator) -> Tensor:
        return 2.0 * torch.randint(0, 2, (self._TABLE,), generator=generator, dtype=torch.int8) - 1


def _is_whole(value: Tensor) -> bool:
    """Return whether all are whole numbers, as behind torch.round, and so small that float32 has each."""
    for part in (value[tuple(slice(4) for _ in value.shape)], value) if value.layout is torch.strided else ():
        if not torch.equal(part, part.trunc()):
            return False
    return value.layout is torch.strided and value.numel() > 0 and value.abs().max().item() * torch.finfo(torch.float32).eps < 1


class Nudged(Perturbed):
    """While active, float64 results, and operands of products and sums, are off by up to `units` in the last place of float32.

    By how much is random, from `seed`; by -`units` it is the opposite. `converts`: inputs are, too, equal ones differently.
    """

    _OF = torch.float64

    def __init__(self, seed: int, units: float, converts: bool = True) -> None:
        super().__init__(seed, units=units)
        self._converts = converts

    def _signs(self, generator: torch.Generator) -> Tensor:
        return 2 * torch.rand(self._TABLE, generator=generator, dtype=torch.float64) - 1


class DrawnInFloat32(Uncompiled):
    """While active, random numbers for float64 are those that a generator gives for float32: it would draw others."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = function._schema.name.removeprefix("aten::") in _LAYERS  # which may draw, and as a rule does not
        if torch.Tag.nondeterministic_seeded not in function.tags or layer:
            return function(*args, **kwargs)
        if function is aten.native_dropout.default and args[0].dtype == torch.float64:
            value, share, trains = args
            _, mask = function(value.float(), share, trains)
            return (value * mask / (1 - share) if share < 1 else torch.zeros_like(value)), mask
        narrow_args, narrow = torch.utils._pytree.tree_map(_cast(torch.float32, torch.float64), (args, kwargs))
        drawn = function(*narrow_args, **narrow)
        for argument, given, used in zip(function._schema.arguments, args, narrow_args, strict=False):
            if argument.is_write and _is_wide(given):
                given.copy_(used)
        if function._schema.name.endswith("_"):
            return args[0]
        is_wide = any(map(_is_wide, torch.utils._pytree.tree_leaves((args, kwargs))))
        return torch.utils._pytree.tree_map(_cast(torch.float64, torch.float32), drawn) if is_wide else drawn


def _is_wide(value: Any) -> bool:
    return value is torch.float64 or (isinstance(value, Tensor) and value.dtype == torch.float64)


def _cast(to: torch.dtype, *of: torch.dtype) -> Callable[[Any], Any]:
    """Return the function that gives `to` for one of the dtypes `of`, a tensor in it for a tensor in one, all else as it is."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return to if value in of else value
        return value.to(to) if isinstance(value, Tensor) and value.dtype in of else value

    return cast


class Promoted(TorchFunctionMode):
    """While active, all is float64: what is asked for in float32 or less is made so, and what is in it becomes float64."""

    def __enter__(self) -> Any:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function in (Tensor.float, Tensor.half, Tensor.bfloat16) else function
        promoted = _cast(torch.float64, torch.float32, *tensors.HALF.values())
        args, kwargs = torch.utils._pytree.tree_map(promoted, (args, kwargs or {}))
        return function(*args, **kwargs)


def _with_each(change: Callable[[Any], Any], result: Any) -> Any:
    """An operator's result, a tensor or some, with change(value) for each. Pytrees take longer than many an operator."""
    if isinstance(result, list | tuple):
        return type(result)(_with_each(change, value) for value in result)
    return change(result)


@functools.cache
def _is_view(function: Any) -> bool:
    return any(output.alias_info is not None for output in function._schema.returns)
