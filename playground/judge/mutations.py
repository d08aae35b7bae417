"""Mistakes that a kernel's author makes, operator by operator: what each makes of one call of PyTorch.

A mutation is a function of a Call that gives a wrong result of it, or raises: Unfit, or whatever PyTorch raises when it does
not suit the call's sizes. None of them leaves a parameter unused (it is multiplied by 0 instead), so that it keeps a gradient.
"""

import math

import torch
import torch.nn.functional as F

ROW = -2  # the dimension of an image's rows, or of a volume's
LOOK_ALIKE = "replaced by a look-alike"  # of an activation


class Unfit(Exception):
    """The mutation does not apply to this call."""


_POSITIONS = {
    "convolution": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "linear": ("input", "weight", "bias"),
    "product": ("input", "other"),
    "sum with a product": ("summand", "input", "other"),
    "maximum pooling": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "average pooling": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "global pooling": ("input", "output_size"),
    "reduction": ("input", "dim", "keepdim"),
    "scan": ("input", "dim"),
    "softmax": ("input", "dim"),
    "batch norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "layer norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group norm": ("input", "num_groups", "weight", "bias", "eps"),
    "instance norm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    "rms norm": ("input", "normalized_shape", "weight", "eps"),
    "activation": ("input",),
    "addition": ("input", "other"),
    "subtraction": ("input", "other"),
    "multiplication": ("input", "other"),
    "division": ("input", "other"),
    "embedding": ("input", "weight"),
    "loss": ("input", "target"),
    "recurrence": ("input", "hx", "params"),
    "attention": ("input", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    "concatenation": ("tensors", "dim"),
    "other": ("input",),
}

_NAMES = {
    "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "linear": "linear",
    "product": "matmul mm bmm __matmul__",
    "sum with a product": "addmm baddbmm addbmm",
    "maximum pooling": "max_pool1d max_pool2d max_pool3d",
    "average pooling": "avg_pool1d avg_pool2d avg_pool3d",
    "global pooling": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    "reduction": "sum mean amax amin max min prod logsumexp norm vector_norm std var",
    "scan": "cumsum cumprod logcumsumexp",
    "softmax": "softmax log_softmax softmin",
    "batch norm": "batch_norm",
    "layer norm": "layer_norm",
    "group norm": "group_norm",
    "instance norm": "instance_norm",
    "rms norm": "rms_norm",
    "activation": "relu relu6 leaky_relu sigmoid tanh gelu silu elu selu celu softplus softsign hardtanh hardswish "
    "hardsigmoid mish log_sigmoid clamp clip clamp_min clamp_max",
    "addition": "add __add__ __radd__ __iadd__",
    "subtraction": "sub __sub__ __isub__",
    "multiplication": "mul multiply __mul__ __rmul__ __imul__",
    "division": "div divide true_divide __truediv__ __div__ __itruediv__ __idiv__",
    "embedding": "embedding",
    "loss": "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss soft_margin_loss poisson_nll_loss",
    "recurrence": "lstm gru rnn_tanh rnn_relu",
    "attention": "scaled_dot_product_attention",
    "concatenation": "cat concat concatenate stack",
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

# Calls that only look at a tensor, or move or copy it.
_NEUTRAL_NAMES = """
    clone contiguous to float double half type_as view reshape view_as reshape_as flatten unflatten squeeze unsqueeze detach
    requires_grad_ __get__ __set__ expand expand_as broadcast_to size dim __getitem__ __setitem__ chunk split unbind t
    dropout dropout1d dropout2d dropout3d zeros_like ones_like empty_like rand_like randn_like full_like new_zeros new_ones
    zero_ fill_ copy_ is_floating_point numel stride data_ptr cpu cuda alias item backward grad register_hook
"""
_NEUTRAL = frozenset(_NEUTRAL_NAMES.split())


class Call:
    """One call of an operator, whose arguments are read and changed by name."""

    def __init__(self, function, args, kwargs):
        self.name = getattr(function, "__name__", "") or ""
        in_place = self.name.endswith("_") and not self.name.endswith("__")
        self.label = self.name.removesuffix("_") if in_place else self.name.strip("_")
        self.kind = KINDS.get(self.name.removesuffix("_") if in_place else self.name, "other")
        self._function = function
        self._in_place = in_place or self.name.startswith("__i")
        self._args = list(args)
        self._kwargs = dict(kwargs or {})
        self._positions = _POSITIONS[self.kind]
        self._operand = "input" if "input" in self._positions else self._positions[0]

    @property
    def is_neutral(self):
        return self.name in _NEUTRAL

    def get(self, name, default=None):
        """The argument of that name."""
        position = self._positions.index(name) if name in self._positions else len(self._args)
        return self._args[position] if position < len(self._args) else self._kwargs.get(name, default)

    def as_it_is(self):
        """What the model itself asked for."""
        return self._function(*self._args, **self._kwargs)

    def again(self, **changes):
        """The operator's result with some of its arguments changed; what works in place gets a copy to work in."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, value in changes.items():
            position = self._positions.index(name) if name in self._positions else len(args)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        if self._in_place and isinstance(args[0], torch.Tensor):
            args[0] = args[0].clone()
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        return self._function(*args, **kwargs)

    @property
    def first(self):
        """The operand on which the operator works, if it is a tensor, else None."""
        value = self.get(self._operand)
        return value if isinstance(value, torch.Tensor) else None

    @property
    def input(self):
        """The first tensor; raises Unfit where the call has none."""
        if self.first is None:
            raise Unfit
        return self.first

    def with_input(self, value):
        return self.again(**{self._operand: value})


def _require(holds):
    if not holds:
        raise Unfit


def _tensor(value):
    _require(isinstance(value, torch.Tensor))
    return value


def _last_zeroed(value, dim):
    """The tensor with zeros where `dim` has its last index."""
    _require(value.shape[dim] > 1)
    mask = torch.ones(value.shape[dim], dtype=value.dtype, device=value.device)
    mask[-1] = 0
    return value * mask.reshape([-1] + [1] * (value.dim() - 1 - dim % value.dim()))


def _rolled(value, dim):
    _require(value.dim() > 0 and value.shape[dim] > 1)
    return value.roll(1, dim)


def _shifted(value):
    """Every element along the last dimension is its successor; the last one is 0."""
    _require(value.shape[-1] > 1)
    return F.pad(value[..., 1:], (0, 1))


def _cropped(value, shape):
    """The beginning of a tensor that is at least as large as `shape`."""
    _require(value.dim() == len(shape) and all(has >= wanted for has, wanted in zip(value.shape, shape, strict=True)))
    return value[tuple(slice(wanted) for wanted in shape)]


def _each(value, count):
    """A size for each of `count` dimensions, from one for all or one for each."""
    return [value] * count if isinstance(value, int) else list(value)


def _form(result, values):
    """`values` in the form of the result: of torch.max over a dimension, for example, which gives indices as well."""
    return values if isinstance(result, torch.Tensor) else type(result)([values, *result[1:]])


def _values(result):
    return _tensor(result if isinstance(result, torch.Tensor) else result[0])


# Convolutions and products


def _bias_times(factor):
    return lambda call: call.again(bias=_tensor(call.get("bias")) * factor)


def _changed_weight(change):
    return lambda call: call.again(weight=change(_tensor(call.get("weight"))))


def _spatial_flip(weight):
    _require(max(weight.shape[2:]) > 1)
    return weight.flip(tuple(range(2, weight.dim())))


def _spatial_transpose(weight):
    _require(weight.dim() > 3 and weight.shape[-1] == weight.shape[-2] > 1)
    return weight.transpose(-1, -2)


def _square_transpose(matrix):
    _require(matrix.dim() > 1 and matrix.shape[-1] == matrix.shape[-2] > 1)
    return matrix.transpose(-1, -2)


def _strides(call):
    """Of a convolution, or of pooling, whose stride is its window unless it is given."""
    return _each(call.get("stride") or call.get("kernel_size", 1), call.again().dim() - 2)


def _stride_smaller(call):
    strides = _strides(call)
    _require(max(strides) > 1)
    return _cropped(call.again(stride=[max(1, stride - 1) for stride in strides]), call.again().shape)


def _stride_larger(call):
    """What would be read beyond the input's end is 0."""
    _require("transpose" not in call.name)
    shape = call.again().shape
    beyond = [side for size in reversed(shape[2:]) for side in (0, size)]
    return _cropped(call.again(input=F.pad(call.input, beyond), stride=[each + 1 for each in _strides(call)]), shape)


def _padding(call):
    padding = call.get("padding", 0)
    _require(not isinstance(padding, str))
    return _each(padding, call.input.dim() - 2)


def _padding_larger(call):
    return _cropped(call.again(padding=[width + 1 for width in _padding(call)]), call.again().shape)


def _padded_with_the_border(call):
    widths = _padding(call)
    _require(max(widths) > 0 and "transpose" not in call.name)
    sides = [width for each in reversed(widths) for width in (each, each)]
    return call.again(input=F.pad(call.input, sides, mode="replicate"), padding=0)


def _output_rolled(dim):
    def mutation(call):
        result = call.again()
        return _form(result, _rolled(_values(result), dim))

    return mutation


def _last_of_output_dropped(dim):
    def mutation(call):
        result = call.again()
        _require(dim != ROW or _values(result).dim() > 3)
        return _form(result, _last_zeroed(_values(result), dim))

    return mutation


def _shifted_input(call):
    return call.again(input=_shifted(call.input))


def _operands_swapped(call):
    first, second = call.input, _tensor(call.get("other"))
    _require(first.dim() > 1 and first.shape == second.shape)
    return call.again(input=second, other=first)


_CONVOLUTION = {
    "kernel flipped": _changed_weight(_spatial_flip),
    "bias dropped": _bias_times(0),
    "kernel transposed": _changed_weight(_spatial_transpose),
    "window off by one": _shifted_input,
    "input channels permuted": _changed_weight(lambda weight: _rolled(weight, 1)),
    "padded with the border": _padded_with_the_border,
    "stride smaller by one": _stride_smaller,
    "bias doubled": _bias_times(2),
    "last column of the kernel dropped": _changed_weight(lambda weight: _last_zeroed(weight, -1)),
    "output channels permuted": _output_rolled(1),
    "last column dropped": _last_of_output_dropped(-1),
    "padding larger by one": _padding_larger,
    "last input channel dropped": _changed_weight(lambda weight: _last_zeroed(weight, 1)),
    "last row dropped": _last_of_output_dropped(ROW),
    "stride larger by one": _stride_larger,
}

_LINEAR = {
    "bias dropped": _bias_times(0),
    "weight transposed": _changed_weight(_square_transpose),
    "last input feature dropped": _changed_weight(lambda weight: _last_zeroed(weight, 1)),
    "output features permuted": _output_rolled(-1),
    "bias doubled": _bias_times(2),
    "input features permuted": _changed_weight(lambda weight: _rolled(weight, 1)),
}

_PRODUCT = {
    "right operand transposed": lambda call: call.again(other=_square_transpose(_tensor(call.get("other")))),
    "last term of the inner sum dropped": lambda call: call.again(input=_last_zeroed(call.input, -1)),
    "left operand transposed": lambda call: call.again(input=_square_transpose(call.input)),
    "operands swapped": _operands_swapped,
    "last column dropped": _last_of_output_dropped(-1),
    "rows permuted": _output_rolled(0),
}

_SUM_WITH_PRODUCT = {
    "summand dropped": lambda call: call.again(beta=0),
    "right operand transposed": _PRODUCT["right operand transposed"],
    "last term of the inner sum dropped": _PRODUCT["last term of the inner sum dropped"],
    "summand doubled": lambda call: call.again(beta=2 * call.get("beta", 1)),
}


# Pooling


def _window(call):
    result = call.again()
    return _each(call.get("kernel_size"), result.dim() - 2)


def _pooled(call, kind):
    """By a `kind` ("max" or "avg") of pooling with the call's window, stride and padding."""
    function = getattr(F, f"{kind}_pool{call.name.removesuffix('d')[-1]}d")
    options = {"padding": call.get("padding", 0), "ceil_mode": call.get("ceil_mode", False)}
    _require(call.get("dilation", 1) in (1, None))
    return function(call.input, call.get("kernel_size"), call.get("stride"), **options)


def _window_smaller(call):
    window = _window(call)
    _require(window[-1] > 1)
    stride = call.get("stride") or call.get("kernel_size")
    smaller = [*window[:-1], window[-1] - 1]
    _require(all(2 * pad <= size for pad, size in zip(_padding(call), smaller, strict=True)))
    return _cropped(call.again(kernel_size=smaller, stride=stride), call.again().shape)


def _padding_counted_otherwise(call):
    _require(max(_padding(call)) > 0)
    return call.again(count_include_pad=not call.get("count_include_pad", True))


_MAXIMUM_POOLING = {
    "average for maximum": lambda call: _pooled(call, "avg"),
    "window off by one": _shifted_input,
    "maximum starts at zero": lambda call: call.again().clamp(min=0),
    "last column dropped": _last_of_output_dropped(-1),
    "minimum for maximum": lambda call: -call.again(input=-call.input),
    "last column of the window dropped": _window_smaller,
    "last row dropped": _last_of_output_dropped(ROW),
    "stride smaller by one": _stride_smaller,
}

_AVERAGE_POOLING = {
    "maximum for average": lambda call: _pooled(call, "max"),
    "sum for average": lambda call: call.again() * math.prod(_window(call)),
    "window off by one": _shifted_input,
    "padding counted otherwise": _padding_counted_otherwise,
    "last column dropped": _last_of_output_dropped(-1),
    "last column of the window dropped": _window_smaller,
    "last row dropped": _last_of_output_dropped(ROW),
    "stride smaller by one": _stride_smaller,
}


def _other_global_pooling(call):
    other = call.name.replace("avg", "max") if "avg" in call.name else call.name.replace("max", "avg")
    return getattr(F, other)(call.input, call.get("output_size"))


def _global_sum(call):
    _require("avg" in call.name)
    result = call.again()
    return result * (call.input.numel() / result.numel())


def _last_input_left_out(call):
    _require(call.input.shape[-1] > 1)
    return call.again(input=call.input[..., :-1])


_GLOBAL_POOLING = {
    "maximum and average exchanged": _other_global_pooling,
    "sum for average": _global_sum,
    "last column left out": _last_input_left_out,
}


# Reductions

_EXTREMES = ("max", "amax", "min", "amin")


def _dims(call):
    dim = call.get("dim")
    count = call.input.dim()
    if dim is None:
        return tuple(range(count))
    _require(count > 0 and not isinstance(dim, torch.Tensor))
    return tuple(each % count for each in ([dim] if isinstance(dim, int) else dim))


def _terms(call):
    return math.prod(call.input.shape[dim] for dim in _dims(call))


def _scaled_reduction(name, factor):
    def mutation(call):
        _require(call.name == name and _terms(call) > 1)
        return call.again() * factor(_terms(call))

    return mutation


def _other_extreme(call):
    _require(call.name in _EXTREMES)
    result = call.with_input(-call.input)
    return _form(result, -_values(result))


def _mean_for(call):
    _require(call.name in (*_EXTREMES, "logsumexp", "prod", "norm", "vector_norm", "std", "var"))
    result = call.again()
    return _form(result, call.input.mean(_dims(call)).reshape(_values(result).shape))


def _maximum_for(call):
    _require(call.name in ("mean", "sum", "logsumexp"))
    return call.input.amax(_dims(call)).reshape(call.again().shape)


def _another_dimension(call):
    dims = _dims(call)
    _require(len(dims) == 1 and call.input.dim() > 1)
    result = call.again()
    for dim in range(call.input.dim()):
        if dim != dims[0]:
            other = call.again(dim=dim)
            if _values(other).shape == _values(result).shape:
                return other
    raise Unfit


def _last_term_left_out(call):
    dim = _dims(call)[-1]
    _require(call.input.shape[dim] > 1)
    return call.with_input(call.input.narrow(dim, 0, call.input.shape[dim] - 1))


def _square_root_left_out(call):
    _require(call.name in ("norm", "vector_norm", "std"))
    return call.again() ** 2


_REDUCTION = {
    "mean for sum": _scaled_reduction("sum", lambda terms: 1 / terms),
    "sum for mean": _scaled_reduction("mean", lambda terms: terms),
    "mean instead": _mean_for,
    "last term left out": _last_term_left_out,
    "maximum instead": _maximum_for,
    "maximum and minimum exchanged": _other_extreme,
    "another dimension": _another_dimension,
    "square root left out": _square_root_left_out,
}

_SCAN = {
    "own term left out": lambda call: call.again() - call.input,
    "from the end": lambda call: call.again(input=call.input.flip(_dims(call))).flip(_dims(call)),
    "another dimension": _another_dimension,
}


def _not_normalised(call):
    (dim,) = _dims(call)
    exponentials = (call.input - call.input.amax(dim, keepdim=True).detach()).exp()
    return exponentials.log() if "log" in call.name else exponentials


_SOFTMAX = {
    "not normalised": _not_normalised,
    "another dimension": _another_dimension,
    "last column dropped": _last_of_output_dropped(-1),
}


# Normalisation


def _times(name, factor):
    return lambda call: call.again(**{name: _tensor(call.get(name)) * factor})


def _mean_not_subtracted(dims):
    """x's mean in units of its standard deviation is added again, to the result without scale and shift."""

    def mutation(call):
        x = call.input
        over = dims(call)
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        factor = (variance + call.get("eps", 1e-5)).rsqrt()
        return call.again() + mean * factor * _broadcast(call.get("weight"), call, x)

    return mutation


def _broadcast(parameter, call, x):
    if parameter is None:
        return 1.0
    return parameter if call.kind == "layer norm" else parameter.reshape([-1] + [1] * (x.dim() - 2))


def _training_exchanged(call):
    _require(isinstance(call.get("running_mean"), torch.Tensor))
    return call.again(training=not call.get("training", False))


def _batch_dims(call):
    _require(call.get("training", False))
    return [dim for dim in range(call.input.dim()) if dim != 1]


def _all_in_one_group(call):
    _require(call.get("num_groups") > 1)
    return call.again(num_groups=1)


_EPSILON_LARGER = {"epsilon a hundred times as large": lambda call: call.again(eps=100 * call.get("eps", 1e-5))}
_SCALE_AND_SHIFT = {"scale doubled": _times("weight", 2), "shift dropped": _times("bias", 0)}

_BATCH_NORM = {
    "running statistics for the batch's, or the reverse": _training_exchanged,
    "mean not subtracted": _mean_not_subtracted(_batch_dims),
    **_EPSILON_LARGER,
    **_SCALE_AND_SHIFT,
}

_LAYER_NORM = {
    "mean not subtracted": _mean_not_subtracted(lambda call: list(range(-len(call.get("normalized_shape")), 0))),
    "last column dropped": _last_of_output_dropped(-1),
    **_EPSILON_LARGER,
    **_SCALE_AND_SHIFT,
}

_GROUP_NORM = {
    "all channels in one group": _all_in_one_group,
    "last column dropped": _last_of_output_dropped(-1),
    **_EPSILON_LARGER,
    **_SCALE_AND_SHIFT,
}

_INSTANCE_NORM = {
    "mean not subtracted": _mean_not_subtracted(lambda call: list(range(2, call.input.dim()))),
    "statistics of the batch": lambda call: F.batch_norm(call.input, None, None, call.get("weight"), call.get("bias"), True),
    "last column dropped": _last_of_output_dropped(-1),
    **_EPSILON_LARGER,
    **_SCALE_AND_SHIFT,
}

_RMS_NORM = {
    "mean subtracted": lambda call: F.layer_norm(call.input, call.get("normalized_shape"), call.get("weight")),
    "last column dropped": _last_of_output_dropped(-1),
    "scale doubled": _times("weight", 2),
}


# Element by element


def _dropped(call):
    """Nothing is done to the first operand."""
    values = call.input
    result = call.again()
    _require(_values(result).dtype == values.dtype)
    return _form(result, values.expand(_values(result).shape))


_LOOK_ALIKES = {
    "relu": F.leaky_relu,
    "relu6": F.relu,
    "leaky_relu": F.relu,
    "sigmoid": lambda x: 0.5 + x / 4,
    "tanh": F.hardtanh,
    "silu": F.gelu,
    "elu": F.relu,
    "selu": F.elu,
    "celu": F.relu,
    "softplus": F.relu,
    "softsign": torch.tanh,
    "hardtanh": torch.tanh,
    "hardswish": F.silu,
    "hardsigmoid": torch.sigmoid,
    "mish": F.silu,
    "log_sigmoid": lambda x: x.clamp(max=0),
    "clamp": F.relu,
    "clip": F.relu,
    "clamp_min": torch.abs,
    "clamp_max": torch.abs,
}


def _look_alike(call):
    if call.name.removesuffix("_") == "gelu":
        return F.gelu(call.input, approximate="none" if call.get("approximate") == "tanh" else "tanh")
    name = call.name.removesuffix("_")
    _require(name in _LOOK_ALIKES)
    return _LOOK_ALIKES[name](call.input)


_ACTIVATION = {
    "dropped": _dropped,
    LOOK_ALIKE: _look_alike,
    "applied twice": lambda call: call.with_input(call.again().clone()),
}


def _other_dropped(call):
    """The second operand alone."""
    other, result = _tensor(call.get("other")), call.again()
    return other.expand(result.shape)


_ADDITION = {
    "dropped": _dropped,
    "second operand doubled": lambda call: call.again(other=2 * call.get("other")),
    "subtracted instead": lambda call: call.again(other=-call.get("other")),
    "first operand dropped": _other_dropped,
}

_SUBTRACTION = {
    "dropped": _dropped,
    "operands swapped": lambda call: -call.again(),
}

_MULTIPLICATION = {
    "dropped": _dropped,
    "done twice": lambda call: call.again(input=call.again().clone()),
    "first operand dropped": _other_dropped,
}

_DIVISION = {
    "dropped": _dropped,
    "multiplied instead": lambda call: call.input * call.get("other"),
    "done twice": lambda call: call.again(input=call.again().clone()),
}


# Everything else


def _index_off_by_one(call):
    return call.again(input=(call.input + 1) % _tensor(call.get("weight")).shape[0])


def _samples_changed(factor):
    """As if the loss were a sum instead of a mean over the samples, or the reverse."""

    def mutation(call):
        samples = call.input.shape[0]
        _require(samples > 1)
        return call.again() * factor(samples)

    return mutation


def _target_off_by_one(call):
    target = _tensor(call.get("target"))
    _require(not target.is_floating_point() and call.input.dim() > 1)
    return call.again(target=(target + 1) % call.input.shape[1])


def _loss_operands_swapped(call):
    target = _tensor(call.get("target"))
    _require(target.is_floating_point() and target.shape == call.input.shape)
    return call.again(input=target, target=call.input)


def _last_sample_left_out(call):
    target = _tensor(call.get("target"))
    _require(call.input.shape[0] == target.shape[0] > 1)
    return call.again(input=call.input[:-1], target=target[:-1])


def _target_doubled(call):
    target = _tensor(call.get("target"))
    _require(target.is_floating_point())
    return call.again(target=2 * target)


_LOSS = {
    "mean for sum over the samples": _samples_changed(lambda samples: 1 / samples),
    "last sample left out": _last_sample_left_out,
    "target off by one": _target_off_by_one,
    "sum for mean over the samples": _samples_changed(lambda samples: samples),
    "operands swapped": _loss_operands_swapped,
    "target doubled": _target_doubled,
}


def _changed_params(change):
    return lambda call: call.again(params=[change(i, parameter) for i, parameter in enumerate(call.get("params"))])


def _recurrent_cut(i, parameter):
    """Weights come as (input, hidden, input bias, hidden bias) a layer; those of the hidden state are set to 0."""
    return parameter * 0 if parameter.dim() == 2 and i % 2 else parameter


_RECURRENCE = {
    "hidden state not carried on": _changed_params(_recurrent_cut),
    "biases dropped": _changed_params(lambda i, parameter: parameter * (parameter.dim() > 1)),
    "gates permuted": _changed_params(lambda i, parameter: parameter.roll(parameter.shape[0] // 4 or 1, 0)),
    "from the end": lambda call: call.again(input=call.input.flip(0)),
    "last feature dropped": _last_of_output_dropped(-1),
}


def _causality_exchanged(call):
    _require(call.get("attn_mask") is None)
    return call.again(is_causal=not call.get("is_causal", False))


def _not_scaled(call):
    return call.again(scale=1.0)


def _keys_for_values(call):
    key, value = call.get("key"), call.get("value")
    _require(key.shape == value.shape)
    return call.again(value=key)


_ATTENTION = {
    "causality exchanged": _causality_exchanged,
    "not scaled": _not_scaled,
    "keys for values": _keys_for_values,
    "heads permuted": _output_rolled(1),
}


def _reversed_order(call):
    tensors = list(call.get("tensors"))
    _require(len(tensors) > 1 and len({each.shape for each in tensors}) == 1)
    return call.again(tensors=tensors[::-1])


_OTHER = {
    "dropped": _dropped,
    "last column dropped": _last_of_output_dropped(-1),
}

MUTATIONS = {
    "convolution": _CONVOLUTION,
    "linear": _LINEAR,
    "product": _PRODUCT,
    "sum with a product": _SUM_WITH_PRODUCT,
    "maximum pooling": _MAXIMUM_POOLING,
    "average pooling": _AVERAGE_POOLING,
    "global pooling": _GLOBAL_POOLING,
    "reduction": _REDUCTION,
    "scan": _SCAN,
    "softmax": _SOFTMAX,
    "batch norm": _BATCH_NORM,
    "layer norm": _LAYER_NORM,
    "group norm": _GROUP_NORM,
    "instance norm": _INSTANCE_NORM,
    "rms norm": _RMS_NORM,
    "activation": _ACTIVATION,
    "addition": _ADDITION,
    "subtraction": _SUBTRACTION,
    "multiplication": _MULTIPLICATION,
    "division": _DIVISION,
    "embedding": {"index off by one": _index_off_by_one, "features permuted": _output_rolled(-1)},
    "loss": _LOSS,
    "recurrence": _RECURRENCE,
    "attention": _ATTENTION,
    "concatenation": {"order reversed": _reversed_order},
    "other": _OTHER,
}
