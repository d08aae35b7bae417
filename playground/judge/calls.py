"""A call of an operator of PyTorch's, whose arguments are read and changed by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Kind of operators -> the names of its functions, and of their arguments in order.
_OPERATORS = {
    "convolution": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
        "input weight bias stride padding dilation groups",
    ),
    "linear": ("linear", "input weight bias"),
    "product": ("matmul mm bmm __matmul__", "input other"),
    "sum with a product": ("addmm baddbmm addbmm", "summand input other"),
    "maximum pooling": ("max_pool1d max_pool2d max_pool3d", "input kernel_size stride padding dilation ceil_mode"),
    "average pooling": ("avg_pool1d avg_pool2d avg_pool3d", "input kernel_size stride padding ceil_mode count_include_pad"),
    "global pooling": (
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
        "input output_size",
    ),
    "reduction": ("sum mean amax amin max min prod logsumexp norm vector_norm std var", "input dim keepdim"),
    "scan": ("cumsum cumprod logcumsumexp", "input dim"),
    "softmax": ("softmax log_softmax softmin", "input dim"),
    "batch norm": ("batch_norm", "input running_mean running_var weight bias training momentum eps"),
    "layer norm": ("layer_norm", "input normalized_shape weight bias eps"),
    "group norm": ("group_norm", "input num_groups weight bias eps"),
    "instance norm": ("instance_norm", "input running_mean running_var weight bias use_input_stats momentum eps"),
    "rms norm": ("rms_norm", "input normalized_shape weight eps"),
    "activation": (
        "relu relu6 leaky_relu sigmoid tanh gelu silu elu selu celu softplus softsign hardtanh hardswish hardsigmoid mish "
        "log_sigmoid clamp clip clamp_min clamp_max",
        "input",
    ),
    "addition": ("add __add__ __radd__ __iadd__", "input other"),
    "subtraction": ("sub __sub__ __isub__", "input other"),
    "multiplication": ("mul multiply __mul__ __rmul__ __imul__", "input other"),
    "division": ("div divide true_divide __truediv__ __div__ __itruediv__ __idiv__", "input other"),
    "embedding": ("embedding", "input weight"),
    "loss": (
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss soft_margin_loss poisson_nll_loss",
        "input target",
    ),
    "recurrence": ("lstm gru rnn_tanh rnn_relu", "input hx params"),
    "attention": ("scaled_dot_product_attention", "input key value attn_mask dropout_p is_causal"),
    "concatenation": ("cat concat concatenate stack", "tensors dim"),
    "other": ("", "input"),
}

KINDS = {name: kind for kind, (names, _) in _OPERATORS.items() for name in names.split()}

# Calls that only look at a tensor, or move or copy it.
_NEUTRAL_NAMES = """
    clone contiguous to float double half type_as view reshape view_as reshape_as flatten unflatten squeeze unsqueeze detach
    requires_grad_ __get__ __set__ expand expand_as broadcast_to size dim __getitem__ __setitem__ chunk split unbind t
    dropout dropout1d dropout2d dropout3d zeros_like ones_like empty_like rand_like randn_like full_like new_zeros new_ones
    zero_ fill_ copy_ is_floating_point numel stride data_ptr cpu cuda alias item backward grad register_hook
"""

_NEUTRAL = frozenset(_NEUTRAL_NAMES.split())


class Unfit(Exception):
    """The mutation does not apply to this call."""


class Call:
    """One call of an operator, whose arguments are read and changed by name."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        self.name = getattr(function, "__name__", "") or ""
        in_place = self.name.endswith("_") and not self.name.endswith("__")
        self.label = self.name.removesuffix("_") if in_place else self.name.strip("_")
        self.is_neutral = self.name in _NEUTRAL
        self.kind = KINDS.get(self.name.removesuffix("_") if in_place else self.name, "other")
        self._function = function
        self._in_place = in_place or self.name.startswith("__i")
        names = _OPERATORS[self.kind][1].split()
        self._operand = "input" if "input" in names else names[0]
        # Those beyond the names go by numbers.
        self._by_place: dict[Any, Any] = dict(zip([*names, *range(len(args))], args, strict=False))
        self._kwargs = dict(kwargs or {})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument of that name."""
        return self._by_place.get(name, self._kwargs.get(name, default))

    def as_it_is(self) -> Any:
        """Return what the model itself asked for."""
        return self._function(*self._by_place.values(), **self._kwargs)

    def again(self, **changes: Any) -> Any:
        """Return the operator's result with some of its arguments changed; what works in place gets a copy to work in."""
        args = [changes.pop(name, value) for name, value in self._by_place.items()]
        kwargs = self._kwargs | changes | ({"inplace": False} if self._kwargs.get("inplace") else {})
        if self._in_place and isinstance(args[0], torch.Tensor):
            args[0] = args[0].clone()
        return self._function(*args, **kwargs)

    @property
    def first(self) -> torch.Tensor | None:
        """Return the operand on which the operator works, if it is a tensor, else None."""
        value = self.get(self._operand)
        return value if isinstance(value, torch.Tensor) else None

    @property
    def input(self) -> torch.Tensor:
        """Return the first tensor; raises Unfit where the call has none."""
        return tensor_of(self.first)

    def with_input(self, value: torch.Tensor) -> Any:
        return self.again(**{self._operand: value})


def require(holds: Any) -> None:
    if not holds:
        raise Unfit


def tensor_of(value: Any) -> torch.Tensor:
    require(isinstance(value, torch.Tensor))
    return value
