"""What a problem's inputs have in common from draw to draw, such as zeros, order or sums of one, so that each probe keeps it.

A range is nothing in common: only where the original has no finite result beyond it are its values kept positive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from playground import tensors

DRAWS = 3
SUM_OF_ONE = 1e-4  # how far rows of probabilities may be from it
NO_PROBABILITIES = ("impulse", "large", "small", "nan", "infinity")  # probes whose values are none
OF_FIRST = ("impulse", "nan", "infinity")  # probes that change the first float input alone
OF_VALUES = (*NO_PROBABILITIES, "ramp")  # probes that are nothing but their values


@dataclass(frozen=True)
class Structure:
    """Of one input. `frozen` is why its values stay the problem's own, `twin` the number of an earlier input that it equals."""

    frozen: str | None = None
    zeros: bool = False
    symmetric: bool = False
    definite: bool = False  # symmetric matrices of which there is a Cholesky decomposition
    ascending: bool = False
    probabilities: int | None = None  # the dimension that sums to one
    positive: bool = False
    twin: int | None = None

    def takes(self, probe: str) -> bool:
        """Return whether it can have the values of a probe of that name."""
        return not self.frozen and not (self.probabilities is not None and probe in NO_PROBABILITIES)

    @property
    def text(self) -> str | None:
        """Return the structure in words; None where there is nothing to keep."""
        form = "positive definite" * self.definite or "symmetric" * self.symmetric
        words = [self.frozen, "zeros that stay zeros" * self.zeros, form, "sorted" * self.ascending]
        words += ["probabilities" * (self.probabilities is not None), f"equal to input {self.twin}" * (self.twin is not None)]
        return ", ".join(filter(None, words)) or None

    def keep(self, drawn: torch.Tensor, value: torch.Tensor, positive: bool) -> torch.Tensor:
        """Return `value` with this structure; `drawn` is the problem's own."""
        if self.frozen:
            return drawn
        if self.probabilities is not None:
            total = value.abs().sum(self.probabilities, keepdim=True)
            return value.abs() / total if torch.isfinite(total).all() and (total > 0).all() else drawn
        if positive and self.positive:
            value = value.abs()
        if self.symmetric:
            value = value.triu() + value.triu(1).mT
        if self.definite:  # by Gershgorin's circles: each diagonal element is larger than the rest of its row
            rest = value.abs().sum(-1) - value.diagonal(dim1=-2, dim2=-1)
            value = value + torch.diag_embed(torch.where(rest == 0, 1, 1.125 * rest))
        if self.ascending:
            value = value.sort(-1).values
        return torch.where(drawn == 0, drawn, value) if self.zeros else value


class Domain:
    """The structures of a problem's inputs: {number of a float input: Structure}."""

    def __init__(self, structures: Mapping[int, Structure] | None = None) -> None:
        self._structures = dict(structures or {})
        self.is_positive = any(each.positive for each in self._structures.values())

    @property
    def plain(self) -> dict[int, Any]:
        """Return {number of a float input: the fields of its Structure}, of which `Domain.of` makes the Domain again."""
        return {i: vars(each) for i, each in self._structures.items()}

    @classmethod
    def of(cls, plain: dict[int, Any]) -> "Domain":
        return cls({i: Structure(**fields) for i, fields in plain.items()})

    @property
    def texts(self) -> list[str]:
        """Return ['input 0: sorted', ...] of what there is to keep."""
        return [f"input {i}: {each.text}" for i, each in self._structures.items() if each.text]

    def forbids(self, probe: str) -> str | None:
        """Return why a probe of that name would leave the domain; None where it need not."""
        changed = list(self._structures.values())[: 1 if probe in OF_FIRST else None]
        if probe not in OF_VALUES or not changed or any(each.takes(probe) for each in changed):
            return None
        return f"it would leave the problem's domain ({'; '.join(self.texts)})"

    def free(self, i: int, value: torch.Tensor) -> torch.Tensor | None:
        """Return where input `i`, whose value this is, may vary: not at zeros that stay zeros. None where it may everywhere."""
        return value != 0 if i in self._structures and self._structures[i].zeros else None

    def keep(self, drawn: list[Any], values: list[Any], positive: bool = False) -> list[Any]:
        """Return the list of `values` with every structure; `drawn` are the problem's own inputs of the same form."""
        kept = list(values)
        for i, each in self._structures.items():
            kept[i] = kept[each.twin] if each.twin is not None else each.keep(drawn[i], kept[i], positive)
        return kept


def learn(problem: Any, seed: int) -> "Domain":
    """Return the Domain that several draws of the problem's inputs show; an empty one where their forms differ."""
    draws = [tensors.make_inputs(problem, seed + k) for k in range(DRAWS)]
    forms = [[tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in draw] for draw in draws]
    if any(form != forms[0] for form in forms):
        return Domain()
    floats = [i for i, value in enumerate(draws[0]) if tensors.differentiable(value) and value.numel()]
    return Domain({i: _structure(draws, i) for i in floats})


def is_unchanging(problem: Any, seed: int) -> bool:
    """Return whether get_inputs gives the same tensors twice, so that a result that was kept would be right."""
    first, second = (tensors.make_inputs(problem, seed + k) for k in range(2))
    pairs = [pair for pair in zip(first, second, strict=False) if isinstance(pair[0], torch.Tensor) and pair[0].numel()]
    return bool(pairs) and len(first) == len(second) and all(_equal(*pair) for pair in pairs)


def vary(problem: Any) -> str | None:
    """Have get_inputs of an unchanging problem give the contents of its one draw in another order for each seed of torch.

    What is the same everywhere is changed by up to a quarter; integers are permuted where no float can vary. Returns why
    nothing can vary, or None.
    """
    original = problem.get_inputs

    def drawn() -> list[Any]:
        seed = torch.initial_seed()  # before get_inputs sets one of its own
        return _varied(list(original()), seed)[0]

    why = _varied(list(tensors.inputs_of(problem)), 0)[1]
    if not why:
        problem.get_inputs = drawn
    return why


def _varied(inputs: list[Any], seed: int) -> tuple[list[Any], str | None]:
    whys = []
    floats = [i for i, value in enumerate(inputs) if tensors.differentiable(value)]
    others = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and i not in floats]
    for group in floats, others:
        changed: dict[int, Any] = {}
        for i in group:
            twin = next((j for j in changed if _equal(inputs[j], inputs[i])), None)
            made, why = (changed[twin], None) if twin is not None else _other_order(inputs[i], seed + i)
            if why:
                whys.append(f"input {i}: {why}")
            else:
                changed[i] = made
        if changed:
            return [changed.get(i, value) for i, value in enumerate(inputs)], None
    return inputs, f"get_inputs gives the same content each time, which cannot vary ({'; '.join(whys)})"


def _other_order(value: torch.Tensor, seed: int) -> tuple[torch.Tensor | None, str | None]:
    generator = torch.Generator(value.device).manual_seed(seed % (1 << 63))
    flat = value.flatten()
    if not len(flat) or flat.dtype == torch.bool or flat.is_complex():
        return None, "neither floats nor integers"
    if value.is_floating_point() and value.element_size() == 1:  # of which PyTorch compares nothing
        return None, "floats of one byte"
    if bool((flat == flat[0]).all()):
        if not value.is_floating_point() or not flat[0]:
            return None, "one value everywhere" if flat[0] else "zeros"
        noise = torch.rand(flat.shape, generator=generator, device=flat.device) / 4
        return (flat * (1 - noise)).to(value.dtype).view(value.shape), None
    if len(flat.unique()) <= 2:
        return None, _frozen_by_values([value])
    mixed = flat[torch.randperm(len(flat), generator=generator, device=flat.device)].view(value.shape)
    if not value.is_floating_point():
        is_sorted = bool((value.diff(dim=-1) >= 0).all())
        return (None, "sorted integers") if is_sorted else (mixed, None)
    structure = _structure([[value]], 0)
    if structure.zeros:  # which stay where they are
        mixed = value.clone()
        free = value != 0
        mixed[free] = value[free][torch.randperm(int(free.sum()), generator=generator, device=flat.device)]
    anywhere = torch.rand(value.shape, generator=generator, device=flat.device) * (flat.max() - flat.min()) + flat.min()
    for other in mixed, anywhere.to(value.dtype):  # the same numbers in order are the same numbers
        kept = structure.keep(value, other, positive=False)
        if not torch.equal(kept, value):
            return kept, None
    return None, "nothing else has its form"


def _structure(draws: list[list[Any]], i: int) -> "Structure":
    values = [draw[i] for draw in draws]
    twin = next((j for j in range(i) if all(_equal(draw[j], draw[i]) for draw in draws)), None)
    if twin is not None:
        return Structure(twin=twin)
    if len(draws) > 1:
        same = all(_equal(values[0], value) for value in values[1:])
        if frozen := "the same in each draw" if same else _frozen_by_values(values):
            return Structure(frozen=frozen)
    zeros = [value == 0 for value in values]
    symmetric = all(value.dim() > 1 and value.shape[-1] > 1 and _equal(value, value.mT) for value in values)
    positive = all(bool((value >= 0).all()) for value in values)
    return Structure(
        zeros=bool(zeros[0].any()) and all(torch.equal(zeros[0], each) for each in zeros[1:]),
        symmetric=symmetric,
        definite=symmetric and not any(torch.linalg.cholesky_ex(value.double()).info.any() for value in values),
        ascending=all(value.dim() and value.shape[-1] > 2 and bool((value.diff(dim=-1) >= 0).all()) for value in values),
        probabilities=_dimension_of_probabilities(values) if positive else None,
        positive=positive,
    )


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def _frozen_by_values(values: list[torch.Tensor]) -> str | None:
    """Why values that a probe would draw are none of this input's; None where they may be."""
    if all(bool((value == value.round()).all()) for value in values):
        low, high = min(value.min().item() for value in values), max(value.max().item() for value in values)
        rows = [value.sum(-1) for value in values if value.dim()]
        if (low, high) == (0, 1) and rows and all(bool((row == 1).all()) for row in rows):
            return "one-hot"
        return f"integers from {low:g} to {high:g}"
    distinct = torch.cat([value.flatten()[:4096] for value in values]).unique()
    if len(distinct) == 2:
        return f"a mask of {distinct[0]:g} and {distinct[1]:g}"
    return None


def _dimension_of_probabilities(values: list[torch.Tensor]) -> int | None:
    for dimension in range(values[0].dim() - 1, -1, -1):
        off = max((value.double().sum(dimension) - 1).abs().max().item() for value in values)
        if values[0].shape[dimension] > 1 and off < max(SUM_OF_ONE, 8 * torch.finfo(values[0].dtype).eps):
            return dimension
    return None
