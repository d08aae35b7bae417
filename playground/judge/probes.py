"""Inputs that tell a right kernel from a wrong one, at the problem's own size or a reduced one, in the problem's domain."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from playground import tensors
from playground.judge.checks import check_of
from playground.judge.domain import Domain

NO_DOMAIN = Domain()
Draw = Callable[[Any, int], "Probe"]  # of a problem and a seed


@dataclass
class Probe:
    """A model's inputs; `upstream` holds a gradient for each output where gradients are wanted, and is None elsewhere.

    `step` is what an optimiser's step takes from the parameters it names. The call is under torch.autocast, or `in_eval`, where
    `autocast` or `evaluates` says so. `clean` are the inputs without special values, `model_seed` the seed of other weights.
    """

    name: str
    inputs: list[Any]
    upstream: list[Any] | None = None
    wanted_inputs: tuple[int, ...] = ()
    step: dict[str, Tensor] = field(default_factory=dict)
    autocast: bool = False
    evaluates: bool = False
    clean: list[Any] | None = None
    model_seed: int | None = None


def own(problem: Any, seed: int) -> Probe:
    """Return what the problem itself is run on."""
    return Probe("own", tensors.make_inputs(problem, seed))


def reseeded(problem: Any, seed: int) -> Probe:
    """Return the problem's own inputs, to models whose weights are drawn from another seed."""
    return replace(own(problem, seed), model_seed=seed)


def _each(change: Callable[[Tensor], Tensor]) -> Draw:
    """Return the function of a problem and a seed whose probe has each float input of the problem's own changed."""

    def make(problem: Any, seed: int) -> Probe:
        inputs = tensors.make_inputs(problem, seed)
        torch.manual_seed(~seed)  # get_inputs may have set a seed of its own, which everybody knows
        return Probe("", [change(value) if tensors.differentiable(value) else value for value in inputs])

    return make


def _first(change: Callable[[Tensor], Tensor]) -> Draw:
    """As _each, for normal values, the first of them changed."""

    def make(problem: Any, seed: int) -> Probe:
        made = normal(problem, seed)
        first = next((i for i, value in enumerate(made.inputs) if tensors.differentiable(value)), None)
        if first is not None:
            made.inputs[first] = change(made.inputs[first])
        return made

    return make


def _special(put: Callable[[Tensor], Tensor], clean: Callable[[Tensor], Tensor] = torch.clone) -> Draw:
    """As _first, with `put`; without its special values the first input is changed by `clean`."""
    return lambda problem, seed: replace(_first(put)(problem, seed), clean=_first(clean)(problem, seed).inputs)


def _within(value: Tensor) -> Tensor:
    """The problem's own inputs, each sample within another eighth or more of their range, so that their outputs differ."""
    if value.dim() == 0 or value.numel() == 0 or not torch.isfinite(value).all():
        return value
    low, high = value.min(), value.max()
    part = 0.125 + 0.875 * _one_a_sample(torch.rand, value)
    start = low + (1 - part) * (high - low) * _one_a_sample(torch.rand, value)
    return (start + part * (value - low)).clamp(low, high)


def _scaled(value: Tensor) -> Tensor:
    """Normal values, with a scale (1/4 to 4) and an offset (-1 to 1) of its own for each sample."""
    if value.dim() == 0:
        return torch.randn_like(value)
    scale = 4.0 ** (2 * _one_a_sample(torch.rand, value) - 1)
    offset = 2 * _one_a_sample(torch.rand, value) - 1
    return torch.randn_like(value) * scale + offset


def _one_a_sample(draw: Callable[..., Tensor], value: Tensor) -> Tensor:
    return draw((value.shape[0],) + (1,) * (value.dim() - 1), dtype=value.dtype)


def _large(value: Tensor) -> Tensor:
    """Normal values times 100 000, the last sample's negative; times 250 for values that are float16 themselves."""
    value = (250 if value.dtype == torch.float16 else 1e5) * torch.randn_like(value)
    if value.dim() and len(value):
        value[-1] = -value[-1].abs()
    return value


def _small(value: Tensor) -> Tensor:
    """The scaled values over 1000: what is added to keep a division finite shows."""
    return 1e-3 * _scaled(value)


def _ramp(value: Tensor) -> Tensor:
    """Values that rise along each sample, from an offset of its own: shows shifts by any distance."""
    if value.dim() == 0 or value.numel() == 0:
        return torch.randn_like(value)
    along = torch.linspace(-1, 1, value[0].numel()).view(value.shape[1:])
    offset = torch.randn((value.shape[0],) + (1,) * (value.dim() - 1))
    return (along + offset).to(value.dtype)


def _impulse(value: Tensor) -> Tensor:
    """Zeros but for one element a sample: shows flipped, shifted and transposed weights."""
    zeros = torch.zeros_like(value)
    if value.numel():
        samples = zeros.view(value.shape[0], -1) if value.dim() else zeros.view(1, 1)
        where = torch.randint(samples.shape[1], (samples.shape[0], 1))
        samples.scatter_(1, where, 16 * (1 + torch.rand(where.shape, dtype=value.dtype)))
    return zeros


def _with_one(value: Tensor, special: float) -> Tensor:
    value = value.clone()
    if value.numel():
        sample = value[-1].view(-1) if value.dim() else value.view(-1)
        sample[torch.randint(sample.numel(), ())] = special
    return value


def _has_three_samples(value: Tensor) -> bool:
    return value.dim() > 0 and value.shape[0] > 2


def _with_nan(value: Tensor) -> Tensor:
    """One NaN in the last sample; of three samples or more, half of the first is minus infinity, from its start on."""
    value = _with_one(value, math.nan)
    if _has_three_samples(value):
        first = value[0].view(-1)
        first[: (len(first) + 1) // 2] = -math.inf
    return value


def _with_zeros(value: Tensor) -> Tensor:
    value = value.clone()
    if _has_three_samples(value):
        value[1] = 0
    return value


def _with_infinity(value: Tensor) -> Tensor:
    """One infinity in the last sample; of three or more, the first is minus infinity, the second zeros."""
    value = _with_one(_with_zeros(value), math.inf)
    if _has_three_samples(value):
        value[0] = -math.inf
    return value


# Inputs that are not of a floating-point type stay the problem's own.
normal = _each(torch.randn_like)
within, scaled, large, small, ramp = map(_each, (_within, _scaled, _large, _small, _ramp))
impulse, nan, infinity = _first(_impulse), _special(_with_nan), _special(_with_infinity, _with_zeros)


def weights(problem: Any, seed: int, parameters: dict[str, Tensor]) -> Probe:
    """Return normal values, and weights that are 8 times as large: non-linear functions leave their linear zone."""
    step = {name: -7 * value.detach().cpu() for name, value in parameters.items() if tensors.differentiable(value)}
    return replace(normal(problem, seed), step=step)


def step(problem: Any, seed: int, parameters: dict[str, Tensor]) -> Probe:
    """Return normal values, and an optimiser's step that changes every weight by about its own size, in place."""
    made = normal(problem, seed)
    for name, value in parameters.items():
        if tensors.differentiable(value):
            spread = value.detach().float().square().mean().sqrt().item() if value.numel() else 0.0
            made.step[name] = (torch.randn(value.shape) * (spread or 1.0)).to(value.dtype)
    return made


def autocast(problem: Any, seed: int) -> Probe:
    """Return the scaled values, and the call under torch.autocast."""
    return replace(scaled(problem, seed), autocast=True)


def evaluated(problem: Any, seed: int) -> Probe:
    """Return normal values for eval mode, after a call in the model's own, of which a batch norm keeps running statistics."""
    return replace(normal(problem, seed), evaluates=True)


def in_eval(model: Any, *inputs: Any) -> Any:
    """Return the model's result in eval mode, after a call in its own."""
    model(*inputs)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return model(*inputs)
    finally:
        for module, mode in modes.items():
            module.training = mode


def with_upstream(probe: Probe, outputs: list[Tensor], seed: int) -> Probe:
    """Return the probe with normal upstream gradients for the outputs that can have one; all float inputs get a gradient."""
    torch.manual_seed(seed)
    upstream = [torch.randn(o.shape, dtype=o.dtype) if tensors.differentiable(o) else None for o in outputs]
    wanted = tuple(i for i, value in enumerate(probe.inputs) if tensors.differentiable(value))
    return replace(probe, upstream=upstream, wanted_inputs=wanted)


def make(
    name: str, problem: Any, seed: int, parameters: dict[str, Tensor], domain: Domain = NO_DOMAIN, positive: bool = False
) -> Probe:
    """Return the probe of that name; `problem` is at the probe's size. It keeps the domain; with `positive` also the sign."""
    function = globals()[str(check_of(name).function)]
    made = function(problem, seed, parameters) if check_of(name).parameters else function(problem, seed)
    if domain.texts or positive:
        drawn = tensors.make_inputs(problem, seed)
        made.inputs = domain.keep(drawn, made.inputs, positive)
        made.clean = made.clean and domain.keep(drawn, made.clean, positive)
    return replace(made, name=name)


@dataclass(frozen=True)
class Drawing:
    """How a process draws a probe of the own size itself; `outputs` are [shape, dtype] where it has upstream gradients."""

    name: str
    seed: int
    positive: bool
    domain: dict[int, Any]
    outputs: list[Any] | None = None

    def make(self, problem: Any, device: torch.device, parameters: dict[str, Tensor] | None = None) -> Probe:
        """Return the Probe, on the device where that works."""
        return tensors.made_on(device, lambda: self._make(problem, parameters or {}))

    def _make(self, problem: Any, parameters: dict[str, Tensor]) -> Probe:
        made = make(self.name, problem, self.seed, parameters, Domain.of(self.domain), self.positive)
        if self.outputs is None:
            return made
        forms = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.outputs]
        return with_upstream(made, forms, self.seed)

    def gives(self, made: Probe, problem: Any, device: torch.device) -> bool:
        """Return whether it gives the same bits again, as the draws of most problems do."""
        again = self.make(problem, device)
        pairs = zip([*again.inputs, *(again.upstream or [])], [*made.inputs, *(made.upstream or [])], strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def take_step(model: Any, step: dict[str, Tensor]) -> None:
    """Change the parameters in place as torch.optim.SGD does, which would import torch._dynamo, under the names in `step`."""
    parameters = dict(model.named_parameters())
    for name in step.keys() - parameters.keys():
        raise TypeError(f"{name} is no parameter of {type(model).__name__}, so no optimiser changes it")
    with torch.no_grad():
        for name, change in step.items():
            parameters[name].sub_(change.to(parameters[name]))
