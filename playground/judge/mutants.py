"""Wrong versions of a model, made from its own recorded operators, and how many of them the check rejects.

In a mutant one call gives something else (mutations.py), neighbouring operators change places, one gradient is wrong, or inputs
or outputs are tampered with. One that passes counts only if it differs from the original in float64, on other inputs, by more
than float32 could hide. One that crashes, or changes the outputs' form, does not count, unless it has passed all cheap probes.
"""

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from playground import tensors
from playground.judge import probes
from playground.judge.calls import Call, Unfit
from playground.judge.domain import Domain
from playground.judge.mutations import MUTATIONS
from playground.judge.tolerance import FLOAT32_EPSILON
from playground.tensors import as_real

# A model with a dozen operators has no more than these; they bound the time that one with a hundred takes.
MOST = 64  # that count
MOST_TRIED = 96  # of those that run
MOST_BACKWARD = 3
NEGLIGIBLE = 1e-6  # of the largest output or gradient: the size below which a difference is float64's rounding
CHEAP = 1 << 21  # elements of a probe's inputs: larger probes are for mutants that pass all others
WIDE = 30.0  # times the scaled probe's values
Patch = Callable[[Call], Any]
Fresh = list[tuple[probes.Probe, Any]]  # Results in float64 on each
Run = Callable[[Any, Sequence[Any]], Any]  # of a model and its inputs
VISIBLE = 16 * FLOAT32_EPSILON  # of the largest value: a smaller difference could be the rounding of any float32 result


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`make()` gives a fresh function of the model and its inputs, which gives the wrong outputs."""

    name: str
    make: Callable[[], Run]


@dataclasses.dataclass(frozen=True)
class Exam:
    """One probe of the check, from `draw()`, with the oracle that runs it and what it is compared with."""

    draw: Callable[[], probes.Probe]
    elements: int
    oracle: Any
    outputs: list[Any]
    gradients: dict[str, Any]


class MutatedModel:
    """What is run in place of the model: it has the model's parameters. `run` is what a Mutant's make() gave."""

    def __init__(self, model: Any, run: Run) -> None:
        self._model, self._run = model, run
        self.parameters = model.parameters
        self.named_parameters = model.named_parameters

    def __call__(self, *inputs: Any) -> Any:
        return self._run(self._model, inputs)


@dataclasses.dataclass(frozen=True)
class Site:
    """One call of the recorded run; `follows` says that its first operand is what the site before it gave."""

    label: str
    kind: str
    follows: bool


class Patched(TorchFunctionMode):
    """While active, calls that compute something are counted, as `sites`; the patch of a call's number gives its result."""

    def __init__(self, patches: dict[int, Patch]) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self._patches = patches
        self._last = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(function, args, kwargs)
        if call.is_neutral or not any(isinstance(each, Tensor) for each in _pytree.tree_leaves((args, kwargs))):
            return function(*args, **(kwargs or {}))
        patch = self._patches.get(len(self.sites), Call.as_it_is)
        self.sites.append(Site(call.label, call.kind, call.first is not None and call.first is self._last))
        self._last = patch(call)
        return self._last


def _patched(patches: dict[int, Patch]) -> Run:
    def run(model: Any, inputs: Sequence[Any]) -> Any:
        with Patched(patches):
            return model(*inputs)

    return run


def mutants_of(model: Any, inputs: Sequence[Any], differentiable: bool) -> list[Mutant]:
    """Return mutants of the model, those most worth trying first. `differentiable` adds some whose outputs are right."""
    with Patched({}) as recorder, torch.no_grad():
        model(*inputs)
    sites = recorder.sites
    ranked: list[tuple[int, float, Mutant]] = []
    seen: Counter[str] = Counter()
    for number, site in enumerate(sites):
        options = [_exchanged(sites, number)] * site.follows
        for title, mutation in MUTATIONS[site.kind].items():
            options.append(Mutant(_named(sites, number, title), functools.partial(_patched, {number: mutation})))
        for place, mutant in enumerate(options):
            title = mutant.name.partition(" (call")[0]
            ranked.append((seen[title], (place + 1) / len(options), mutant))
            seen[title] += 1
    at_sites = [mutant for _, _, mutant in sorted(ranked, key=lambda each: each[:2])]
    backward = _of_the_gradient(sites) if differentiable else []
    return [*_OF_THE_WHOLE, *backward, *at_sites]


def skipping(model: Any, inputs: Sequence[Any]) -> list[Mutant]:
    """Return mutants that leave out one operator each: its first operand is its result."""

    def skip(call: Call) -> Tensor:
        value = call.input
        if value.shape != call.as_it_is().shape:
            raise Unfit
        return value.clone()

    copy = tensors.copy_model(model)  # of a buffer the copy would count as a call
    with Patched({}) as recorder, torch.no_grad():
        copy(*inputs)
    sites = recorder.sites
    return [Mutant(_named(sites, at, "skipped"), functools.partial(_patched, {at: skip})) for at in range(len(sites))]


def _named(sites: list[Site], number: int, what: str) -> str:
    """'conv2d: bias dropped', with the number of the call where the model has several of its kind."""
    label = sites[number].label
    several = sum(site.label == label for site in sites) > 1
    which = f" (call {1 + sum(site.label == label for site in sites[:number])} of {label})" if several else ""
    return f"{label}: {what}{which}"


def _exchanged(sites: list[Site], number: int) -> Mutant:
    def make() -> Run:
        earlier: list[Call] = []

        def skip(call: Call) -> Tensor:
            earlier[:] = [call]
            return call.input.clone()

        def both(call: Call) -> Any:
            first = earlier.pop()
            return first.with_input(call.with_input(first.input))

        return _patched({number - 1: skip, number: both})

    return Mutant(_named(sites, number, f"done before {sites[number - 1].label}"), make)


def _of_the_gradient(sites: list[Site]) -> list[Mutant]:
    found = {}
    for number, site in enumerate(sites):
        if site.kind not in found and site.kind != "other":
            title, mutation = next(iter(MUTATIONS[site.kind].items()))
            name = _named(sites, number, f"gradient of '{title}'")
            found[site.kind] = Mutant(name, functools.partial(_patched, {number: _backward(mutation)}))
    return list(found.values())[:MOST_BACKWARD]


def _backward(mutation: Patch) -> Patch:
    def patch(call: Call) -> Any:
        value, wrong = call.again(), mutation(call)
        if not isinstance(value, Tensor) or value.shape != wrong.shape:
            raise Unfit
        return value.detach() + (wrong - wrong.detach()) if torch.is_grad_enabled() else value

    return patch


def _on_outputs(name: str, change: Callable[..., Any]) -> Mutant:
    """`change` is a function of one output and of a dict that is kept for it from call to call."""

    def make() -> Run:
        kept: dict[int, dict[str, Tensor]] = {}

        def run(model: Any, inputs: Sequence[Any]) -> Any:
            outputs, form = _pytree.tree_flatten(model(*inputs))
            floats = _floats(outputs)
            changed = [change(each, kept.setdefault(i, {})) if i in floats else each for i, each in enumerate(outputs)]
            if all(a is b for a, b in zip(outputs, changed, strict=True)):
                raise Unfit
            return _pytree.tree_unflatten(changed, form)

        return run

    return Mutant(name, make)


def _on_inputs(name: str, change: Callable[..., Any]) -> Mutant:
    return Mutant(name, lambda: lambda model, inputs: model(*change(list(inputs))))


def _has_samples(value: Tensor) -> bool:
    return value.dim() > 0 and value.shape[0] > 1


def _constant(value: Tensor, kept: dict[str, Tensor]) -> Tensor:
    mean = kept.setdefault("mean", (value.mean(0) if _has_samples(value) else value).detach())
    fits = mean.shape == value.shape or mean.shape == value.shape[1:]
    return (mean if fits else mean.mean()).expand(value.shape).clone()


def _of_samples(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, kept: change(value) if _has_samples(value) else value


def _floats(inputs: Sequence[Any]) -> list[int]:
    return [i for i, value in enumerate(inputs) if tensors.differentiable(value)]


def _first_two_exchanged(inputs: list[Any]) -> list[Any]:
    floats = _floats(inputs)
    if len(floats) < 2 or inputs[floats[0]].shape != inputs[floats[1]].shape:
        raise Unfit
    inputs[floats[0]], inputs[floats[1]] = inputs[floats[1]], inputs[floats[0]]
    return inputs


def _last_column_of_inputs(inputs: list[Any]) -> list[Any]:
    columns = [i for i in _floats(inputs) if inputs[i].dim() > 1 and inputs[i].shape[-1] > 1]
    if not columns:
        raise Unfit
    for i in columns:
        inputs[i] = torch.cat([inputs[i][..., :-1], torch.zeros_like(inputs[i][..., -1:])], -1)
    return inputs


_OF_THE_WHOLE = (
    _on_outputs("constant output", _constant),
    _on_outputs("output of an earlier call", lambda value, kept: kept.setdefault(value.shape, value.detach())),
    _on_outputs("the neighbouring sample's result", _of_samples(lambda value: value.roll(1, 0))),
    _on_outputs("the first sample's result for all", _of_samples(lambda value: value[:1].expand(value.shape).clone())),
    _on_outputs("last sample left out", _of_samples(lambda value: torch.cat([value[:-1], torch.zeros_like(value[-1:])]))),
    _on_inputs("first two inputs exchanged", _first_two_exchanged),
    _on_inputs("last column of the input ignored", _last_column_of_inputs),
)


def fresh(problem: Any, oracle: Any, seed: int, differentiable: bool, domain: Domain = probes.NO_DOMAIN) -> Fresh:
    """Return [(probe, Results in float64)] on inputs that no check has, one at least, to tell mutants from the original."""
    varied = probes.make("scaled", problem, seed, {}, domain)
    if domain.is_positive and not _is_finite(oracle, varied):
        varied = probes.make("scaled", problem, seed, {}, domain, positive=True)
    wider = [WIDE * value if tensors.differentiable(value) else value for value in varied.inputs]
    wide = dataclasses.replace(varied, inputs=domain.keep(varied.inputs, wider))
    first, *others = [probe for probe in (varied, wide) if _is_finite(oracle, probe) is not None] or [probes.own(problem, seed)]
    if differentiable:
        first = probes.with_upstream(first, oracle.whole(first).outputs, seed)
    return [(probe, oracle.reference(probe)) for probe in (first, *others)]


def _is_finite(oracle: Any, probe: probes.Probe) -> bool | None:
    try:
        return all(torch.isfinite(as_real(output)).all() for output in oracle.whole(probe).outputs)
    except Exception:
        return None


def score(mutants: list[Mutant], exams: list[Exam], oracle: Any, fresh: Fresh) -> dict[str, Any]:
    """Return {"counted", "rejected", "survivors": [name]} of a check, a list of Exams; `oracle` runs those of `fresh`."""
    cheap = [exam for exam in exams if exam.elements <= CHEAP] or exams
    costly = [exam for exam in exams if all(exam is not each for each in cheap)]
    fates: Counter[str] = Counter()
    survivors: list[str] = []
    for mutant in mutants:
        if fates["rejected"] + len(survivors) == MOST or fates.total() - fates["crashed"] == MOST_TRIED:
            break
        fate = _fate(mutant, cheap, costly, oracle, fresh)
        fates[fate] += 1
        survivors += [mutant.name] if fate == "survived" else []
    return {"counted": fates["rejected"] + len(survivors), "rejected": fates["rejected"], "survivors": survivors}


def _fate(mutant: Mutant, cheap: list[Exam], costly: list[Exam], oracle: Any, fresh: Fresh) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if _is_rejected(mutant, cheap):
                return "rejected"
            if not differs(mutant, oracle, fresh):
                return "equivalent"
        except Exception:  # the mutation does not fit this call, in one of many ways
            return "crashed"
        try:
            return "rejected" if _is_rejected(mutant, costly) else "survived"
        except Exception:  # no memory for it, for example
            return "survived"


def outputs_of(mutant: Mutant, oracle: Any, probe: probes.Probe) -> Any:
    """Return the outputs in float64 of a mutant on a probe."""
    return oracle.reference(probe, _mutating(mutant)).outputs


def _mutating(mutant: Mutant) -> Callable[[Any], MutatedModel]:
    """model -> MutatedModel; what a mutant remembers lasts from model to model, as from call to call in a process."""
    hooks = mutant.make()
    return lambda model: MutatedModel(model, hooks)


def _is_rejected(mutant: Mutant, exams: list[Exam]) -> bool:
    """By the rule for variants: outputs on every probe, then gradients. Raises Unfit when the outputs have another form."""
    mutate = _mutating(mutant)
    for exam in exams:
        forward = dataclasses.replace(exam.draw(), upstream=None, wanted_inputs=())
        outputs = exam.oracle.eager(forward, mutate).outputs
        _require_form([as_real(output) for output in outputs], [reference.float64 for reference in exam.outputs])
        if any(reference.compare("", value).complaint for reference, value in zip(exam.outputs, outputs, strict=True)):
            return True
    for exam in exams:
        if exam.gradients:
            found = exam.oracle.eager(exam.draw(), mutate).gradients
            for name, reference in exam.gradients.items():
                if reference.compare("", _or_zeros(found[name], reference.float64.to(reference.dtype))).complaint:
                    return True
    return False


def differs(mutant: Mutant, oracle: Any, fresh: Fresh) -> bool:
    """Return whether a mutant's results are others than the original's on `fresh`, by more than float32 could hide."""
    mutate = _mutating(mutant)
    for probe, reference in fresh:
        outcome = oracle.reference(probe, mutate)
        _require_form(outcome.outputs, reference.outputs)
        outputs, expected = ([as_real(output) for output in each.outputs] for each in (outcome, reference))
        gradients = {name: true for name, true in reference.gradients.items() if true is not None}
        if _any_visible(outputs, expected) or _any_visible(
            [_or_zeros(outcome.gradients[name], true) for name, true in gradients.items()], list(gradients.values())
        ):
            return True
    return False


def _any_visible(found: Sequence[Tensor], true: Sequence[Tensor]) -> bool:
    """Whether any tensor differs by more than float32 could hide. One much smaller than the others is zero in mathematics."""
    sizes = [_size(each) for each in true]
    for value, expected, size in zip(found, true, sizes, strict=True):
        if not torch.equal(torch.isfinite(value), torch.isfinite(expected)):
            return True
        if _size(value.double() - expected.double()) > VISIBLE * max(size, NEGLIGIBLE * max(sizes)):
            return True
    return False


def _size(value: Tensor) -> float:
    finite = value[torch.isfinite(value)]
    return finite.abs().max().item() if finite.numel() else 0.0


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient  # which a kernel would give an ignored parameter


def _require_form(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if [value.shape for value in outputs] != [value.shape for value in expected]:
        raise Unfit
