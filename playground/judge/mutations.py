"""Mistakes of a kernel's author, functions of a Call with a wrong result; each keeps every parameter's gradient."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from playground.judge.calls import Call, Unfit, require, tensor_of
from playground.judge.classes import LOOK_ALIKE

Mutation = Callable[[Any], Any]  # of a Call
Change = Callable[[Tensor], Tensor]

ROW = -2  # the dimension of an image's rows, or of a volume's


def _if(test: Callable[[Any], Any], mutation: Callable[[Any], Any]) -> Mutation:
    def limited(call: Any) -> Any:
        require(test(call))
        return mutation(call)

    return limited


def _only(names: str, mutation: Callable[[Any], Any]) -> Mutation:
    return _if(lambda call: call.name in names.split(), mutation)


# What is changed in a tensor


def _times(factor: float) -> Change:
    return lambda value: value * factor


def _last_zeroed(dim: int) -> Change:
    def change(value: Tensor) -> Tensor:
        require(value.shape[dim] > 1)
        mask = torch.ones(value.shape[dim], dtype=value.dtype, device=value.device)
        mask[-1] = 0
        return value * mask.reshape([-1] + [1] * (value.dim() - 1 - dim % value.dim()))

    return change


def _rolled(dim: int) -> Change:
    return _if(lambda value: value.dim() > 0 and value.shape[dim] > 1, lambda value: value.roll(1, dim))


def _transposed(least: int) -> Change:
    return _if(
        lambda value: value.dim() >= least and value.shape[-1] == value.shape[-2] > 1,
        lambda value: value.transpose(-1, -2),
    )


_LAST_LEFT_OUT = _if(lambda value: value.shape[-1] > 1, lambda value: value[..., :-1])
# Every element along the last dimension is its successor, the last one is 0.
_SHIFTED = _if(lambda value: value.shape[-1] > 1, lambda value: F.pad(value[..., 1:], (0, 1)))
_FLIPPED = _if(lambda weight: max(weight.shape[2:]) > 1, lambda weight: weight.flip(tuple(range(2, weight.dim()))))


# What is changed in a call


def _with(**changes: Any) -> Mutation:
    return lambda call: call.again(**{name: change(tensor_of(call.get(name))) for name, change in changes.items()})


def _cropped(call: Call, **changes: Any) -> Tensor:
    """Return the beginning of the changed call's result, which is at least as large as that of the call as it is."""
    value, shape = call.again(**changes), call.again().shape
    require(value.dim() == len(shape) and all(has >= wanted for has, wanted in zip(value.shape, shape, strict=True)))
    return value[tuple(slice(wanted) for wanted in shape)]


def _of_result(change: Callable[[Any], Any]) -> Mutation:
    return lambda call: _changed(call.again(), change)


def _changed(result: Any, change: Callable[[Any], Any]) -> Any:
    """Change the values of a result: of torch.max over a dimension, for example, which gives indices as well."""
    return change(result) if isinstance(result, Tensor) else type(result)([change(_values(result)), *result[1:]])


def _values(result: Any) -> Tensor:
    return tensor_of(result if isinstance(result, Tensor) else result[0])


_LAST_COLUMN_DROPPED = _of_result(_last_zeroed(-1))
_LAST_ROW_DROPPED = _of_result(_if(lambda value: value.dim() > 3, _last_zeroed(ROW)))


def _dropped(call: Call) -> Any:
    values, result = call.input, call.again()
    require(_values(result).dtype == values.dtype)
    return _changed(result, lambda found: values.expand(found.shape))


def _other_alone(call: Call) -> Tensor:
    other, result = tensor_of(call.get("other")), call.again()
    return other.expand(result.shape)


def _done_twice(call: Call) -> Any:
    return call.with_input(call.again().clone())


# Convolutions, products and pooling


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value)


def _strides(call: Call) -> list[int]:
    """Of a convolution, or of pooling, whose stride is its window unless it is given."""
    return _each(call.get("stride") or call.get("kernel_size", 1), call.again().dim() - 2)


def _stride_larger(call: Call) -> Any:
    """What would be read beyond the input's end is 0."""
    require("transpose" not in call.name)
    beyond = [side for size in reversed(call.again().shape[2:]) for side in (0, size)]
    return _cropped(call, input=F.pad(call.input, beyond), stride=[each + 1 for each in _strides(call)])


def _padding(call: Call) -> list[int]:
    padding = call.get("padding", 0)
    require(not isinstance(padding, str))
    return _each(padding, call.input.dim() - 2)


def _padded_with_the_border(call: Call) -> Any:
    widths = _padding(call)
    require(max(widths) > 0 and "transpose" not in call.name)
    sides = [width for each in reversed(widths) for width in (each, each)]
    return call.again(input=F.pad(call.input, sides, mode="replicate"), padding=0)


def _operands_swapped(call: Call) -> Any:
    first, second = call.input, tensor_of(call.get("other"))
    require(first.dim() > 1 and first.shape == second.shape)
    return call.again(input=second, other=first)


def _window(call: Call) -> list[int]:
    return _each(call.get("kernel_size"), call.again().dim() - 2)


def _pooled(kind: str) -> Mutation:
    def mutation(call: Call) -> Any:
        function = getattr(F, f"{kind}_pool{call.name.removesuffix('d')[-1]}d")
        options = {"padding": call.get("padding", 0), "ceil_mode": call.get("ceil_mode", False)}
        require(call.get("dilation", 1) in (1, None))
        return function(call.input, call.get("kernel_size"), call.get("stride"), **options)

    return mutation


def _window_smaller(call: Call) -> Any:
    window = _window(call)
    require(window[-1] > 1)
    stride = call.get("stride") or call.get("kernel_size")
    smaller = [*window[:-1], window[-1] - 1]
    require(all(2 * pad <= size for pad, size in zip(_padding(call), smaller, strict=True)))
    return _cropped(call, kernel_size=smaller, stride=stride)


# Reductions and normalisation


def _dims(call: Call) -> tuple[int, ...]:
    dim, count = call.get("dim"), call.input.dim()
    if dim is None:
        return tuple(range(count))
    require(count > 0 and not isinstance(dim, Tensor))
    return tuple(each % count for each in ([dim] if isinstance(dim, int) else dim))


def _scaled_by_terms(power: int) -> Mutation:
    def mutation(call: Call) -> Any:
        terms = math.prod(call.input.shape[dim] for dim in _dims(call))
        require(terms > 1)
        return call.again() * (terms if power > 0 else 1 / terms)

    return mutation


def _mean(call: Call) -> Any:
    return _changed(call.again(), lambda found: call.input.mean(_dims(call)).reshape(found.shape))


def _another_dimension(call: Call) -> Any:
    dims = _dims(call)
    require(len(dims) == 1 and call.input.dim() > 1)
    shape = _values(call.again()).shape
    for dim in range(call.input.dim()):
        if dim != dims[0]:
            other = call.again(dim=dim)
            if _values(other).shape == shape:
                return other
    raise Unfit


def _last_term_left_out(call: Call) -> Any:
    dim = _dims(call)[-1]
    require(call.input.shape[dim] > 1)
    return call.with_input(call.input.narrow(dim, 0, call.input.shape[dim] - 1))


def _not_normalised(call: Call) -> Any:
    (dim,) = _dims(call)
    exponentials = (call.input - call.input.amax(dim, keepdim=True).detach()).exp()
    return exponentials.log() if "log" in call.name else exponentials


def _mean_not_subtracted(dims: Callable[[Call], Any]) -> Mutation:
    """Add x's mean in units of its standard deviation again, to the result without scale and shift."""

    def mutation(call: Call) -> Any:
        x, weight = call.input, call.get("weight")
        variance, mean = torch.var_mean(x, dims(call), correction=0, keepdim=True)
        factor = (variance + call.get("eps", 1e-5)).rsqrt()
        if weight is not None and call.kind != "layer norm":
            weight = weight.reshape([-1] + [1] * (x.dim() - 2))
        return call.again() + mean * factor * (1.0 if weight is None else weight)

    return mutation


def _batch_dims(call: Call) -> list[int]:
    require(call.get("training", False))
    return [dim for dim in range(call.input.dim()) if dim != 1]


# Element by element, and everything else

_LOOK_ALIKES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("relu6", "leaky_relu", "elu", "celu", "softplus", "clamp", "clip"), F.relu),
    **{"relu": F.leaky_relu, "silu": F.gelu, "selu": F.elu, "tanh": F.hardtanh, "hardsigmoid": torch.sigmoid},
    **dict.fromkeys(("softsign", "hardtanh"), torch.tanh),
    **dict.fromkeys(("hardswish", "mish"), F.silu),
    **dict.fromkeys(("clamp_min", "clamp_max"), torch.abs),
    **{"sigmoid": lambda x: 0.5 + x / 4, "log_sigmoid": lambda x: x.clamp(max=0)},
}


def _look_alike(call: Call) -> Any:
    name = call.name.removesuffix("_")
    if name == "gelu":
        return F.gelu(call.input, approximate="none" if call.get("approximate") == "tanh" else "tanh")
    require(name in _LOOK_ALIKES)
    return _LOOK_ALIKES[name](call.input)


def _samples_changed(power: int) -> Mutation:
    return _if(lambda call: call.input.shape[0] > 1, lambda call: call.again() * call.input.shape[0] ** power)


def _target(call: Call) -> Tensor:
    return tensor_of(call.get("target"))


def _has_values(call: Call) -> bool:
    return _target(call).is_floating_point()


def _params(change: Callable[[int, Any], Any]) -> Mutation:
    return lambda call: call.again(params=[change(i, parameter) for i, parameter in enumerate(call.get("params"))])


def _reversed_order(call: Call) -> Any:
    tensors = list(call.get("tensors"))
    require(len(tensors) > 1 and len({each.shape for each in tensors}) == 1)
    return call.again(tensors=tensors[::-1])


_STRIDE_SMALLER = _if(
    lambda call: max(_strides(call)) > 1, lambda call: _cropped(call, stride=[max(1, each - 1) for each in _strides(call)])
)
_EPSILON = {"epsilon a hundred times as large": lambda call: call.again(eps=100 * call.get("eps", 1e-5))}
_SCALE = {"scale doubled": _with(weight=_times(2))}
_SCALE_AND_SHIFT = {**_EPSILON, **_SCALE, "shift dropped": _with(bias=_times(0))}

# Kind -> what can be wrong with a call of it, the likeliest first.
MUTATIONS: dict[str, dict[str, Mutation]] = {
    "convolution": {
        "kernel flipped": _with(weight=_FLIPPED),
        "bias dropped": _with(bias=_times(0)),
        "kernel transposed": _with(weight=_transposed(4)),
        "window off by one": _with(input=_SHIFTED),
        "input channels permuted": _with(weight=_rolled(1)),
        "padded with the border": _padded_with_the_border,
        "stride smaller by one": _STRIDE_SMALLER,
        "bias doubled": _with(bias=_times(2)),
        "last column of the kernel dropped": _with(weight=_last_zeroed(-1)),
        "output channels permuted": _of_result(_rolled(1)),
        "last column dropped": _LAST_COLUMN_DROPPED,
        "padding larger by one": lambda call: _cropped(call, padding=[width + 1 for width in _padding(call)]),
        "last input channel dropped": _with(weight=_last_zeroed(1)),
        "last row dropped": _LAST_ROW_DROPPED,
        "stride larger by one": _stride_larger,
    },
    "linear": {
        "bias dropped": _with(bias=_times(0)),
        "weight transposed": _with(weight=_transposed(2)),
        "last input feature dropped": _with(weight=_last_zeroed(1)),
        "output features permuted": _of_result(_rolled(-1)),
        "bias doubled": _with(bias=_times(2)),
        "input features permuted": _with(weight=_rolled(1)),
    },
    "product": {
        "right operand transposed": _with(other=_transposed(2)),
        "last term of the inner sum dropped": _with(input=_last_zeroed(-1)),
        "left operand transposed": _with(input=_transposed(2)),
        "operands swapped": _operands_swapped,
        "last column dropped": _LAST_COLUMN_DROPPED,
        "rows permuted": _of_result(_rolled(0)),
    },
    "sum with a product": {
        "summand dropped": lambda call: call.again(beta=0),
        "right operand transposed": _with(other=_transposed(2)),
        "last term of the inner sum dropped": _with(input=_last_zeroed(-1)),
        "summand doubled": lambda call: call.again(beta=2 * call.get("beta", 1)),
    },
    "maximum pooling": {
        "average for maximum": _pooled("avg"),
        "window off by one": _with(input=_SHIFTED),
        "maximum starts at zero": lambda call: call.again().clamp(min=0),
        "last column dropped": _LAST_COLUMN_DROPPED,
        "minimum for maximum": lambda call: -call.again(input=-call.input),
        "last column of the window dropped": _window_smaller,
        "last row dropped": _LAST_ROW_DROPPED,
        "stride smaller by one": _STRIDE_SMALLER,
    },
    "average pooling": {
        "maximum for average": _pooled("max"),
        "sum for average": lambda call: call.again() * math.prod(_window(call)),
        "window off by one": _with(input=_SHIFTED),
        "padding counted otherwise": _if(
            lambda call: max(_padding(call)) > 0,
            lambda call: call.again(count_include_pad=not call.get("count_include_pad", True)),
        ),
        "last column dropped": _LAST_COLUMN_DROPPED,
        "last column of the window dropped": _window_smaller,
        "last row dropped": _LAST_ROW_DROPPED,
        "stride smaller by one": _STRIDE_SMALLER,
    },
    "global pooling": {
        "maximum and average exchanged": lambda call: getattr(
            F, re.sub("avg|max", lambda kind: {"avg": "max", "max": "avg"}[kind[0]], call.name)
        )(call.input, call.get("output_size")),
        "sum for average": _if(
            lambda call: "avg" in call.name, lambda call: call.again() * (call.input.numel() / call.again().numel())
        ),
        "last column left out": _with(input=_LAST_LEFT_OUT),
    },
    "reduction": {
        "mean for sum": _only("sum", _scaled_by_terms(-1)),
        "sum for mean": _only("mean", _scaled_by_terms(1)),
        "mean instead": _only("max amax min amin logsumexp prod norm vector_norm std var", _mean),
        "last term left out": _last_term_left_out,
        "maximum instead": _only("mean sum logsumexp", lambda call: call.input.amax(_dims(call)).reshape(call.again().shape)),
        "maximum and minimum exchanged": _only(
            "max amax min amin", lambda call: _changed(call.with_input(-call.input), torch.neg)
        ),
        "another dimension": _another_dimension,
        "square root left out": _only("norm vector_norm std", lambda call: call.again() ** 2),
    },
    "scan": {
        "own term left out": lambda call: call.again() - call.input,
        "from the end": lambda call: call.again(input=call.input.flip(_dims(call))).flip(_dims(call)),
        "another dimension": _another_dimension,
    },
    "softmax": {
        "not normalised": _not_normalised,
        "another dimension": _another_dimension,
        "last column dropped": _LAST_COLUMN_DROPPED,
    },
    "batch norm": {
        "running statistics for the batch's, or the reverse": _if(
            lambda call: isinstance(call.get("running_mean"), Tensor),
            lambda call: call.again(training=not call.get("training", False)),
        ),
        "mean not subtracted": _mean_not_subtracted(_batch_dims),
        **_SCALE_AND_SHIFT,
    },
    "layer norm": {
        "mean not subtracted": _mean_not_subtracted(lambda call: list(range(-len(call.get("normalized_shape")), 0))),
        "last column dropped": _LAST_COLUMN_DROPPED,
        **_SCALE_AND_SHIFT,
    },
    "group norm": {
        "all channels in one group": _if(lambda call: call.get("num_groups") > 1, lambda call: call.again(num_groups=1)),
        "last column dropped": _LAST_COLUMN_DROPPED,
        **_SCALE_AND_SHIFT,
    },
    "instance norm": {
        "mean not subtracted": _mean_not_subtracted(lambda call: list(range(2, call.input.dim()))),
        "statistics of the batch": lambda call: F.batch_norm(
            call.input, None, None, call.get("weight"), call.get("bias"), True
        ),
        "last column dropped": _LAST_COLUMN_DROPPED,
        **_SCALE_AND_SHIFT,
    },
    "rms norm": {
        "mean subtracted": lambda call: F.layer_norm(call.input, call.get("normalized_shape"), call.get("weight")),
        "last column dropped": _LAST_COLUMN_DROPPED,
        **_SCALE,
    },
    "activation": {"dropped": _dropped, LOOK_ALIKE: _look_alike, "applied twice": _done_twice},
    "addition": {
        "dropped": _dropped,
        "second operand doubled": lambda call: call.again(other=2 * call.get("other")),
        "subtracted instead": lambda call: call.again(other=-call.get("other")),
        "first operand dropped": _other_alone,
    },
    "subtraction": {"dropped": _dropped, "operands swapped": lambda call: -call.again()},
    "multiplication": {"dropped": _dropped, "done twice": _done_twice, "first operand dropped": _other_alone},
    "division": {
        "dropped": _dropped,
        "multiplied instead": lambda call: call.input * call.get("other"),
        "done twice": _done_twice,
    },
    "embedding": {
        "index off by one": lambda call: call.again(input=(call.input + 1) % tensor_of(call.get("weight")).shape[0]),
        "features permuted": _of_result(_rolled(-1)),
    },
    "loss": {
        "mean for sum over the samples": _samples_changed(-1),
        "last sample left out": _if(
            lambda call: call.input.shape[0] == _target(call).shape[0] > 1,
            lambda call: call.again(input=call.input[:-1], target=_target(call)[:-1]),
        ),
        "target off by one": _if(
            lambda call: not _has_values(call) and call.input.dim() > 1,
            lambda call: call.again(target=(_target(call) + 1) % call.input.shape[1]),
        ),
        "sum for mean over the samples": _samples_changed(1),
        "operands swapped": _if(
            lambda call: _has_values(call) and _target(call).shape == call.input.shape,
            lambda call: call.again(input=_target(call), target=call.input),
        ),
        "target doubled": _if(_has_values, lambda call: call.again(target=2 * _target(call))),
    },
    "recurrence": {
        "hidden state not carried on": _params(lambda i, value: value * 0 if value.dim() == 2 and i % 2 else value),
        "biases dropped": _params(lambda i, value: value * (value.dim() > 1)),
        "gates permuted": _params(lambda i, value: value.roll(value.shape[0] // 4 or 1, 0)),
        "from the end": lambda call: call.again(input=call.input.flip(0)),
        "last feature dropped": _LAST_COLUMN_DROPPED,
    },
    "attention": {
        "causality exchanged": _if(
            lambda call: call.get("attn_mask") is None, lambda call: call.again(is_causal=not call.get("is_causal", False))
        ),
        "not scaled": lambda call: call.again(scale=1.0),
        "keys for values": _if(
            lambda call: call.get("key").shape == call.get("value").shape, lambda call: call.again(value=call.get("key"))
        ),
        "heads permuted": _of_result(_rolled(1)),
    },
    "concatenation": {"order reversed": _reversed_order},
    "other": {"dropped": _dropped, "last column dropped": _LAST_COLUMN_DROPPED},
}
