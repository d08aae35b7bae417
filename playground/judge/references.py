"""What outputs and gradients of a probe are compared with: a Reference for each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from playground import tensors
from playground.judge.oracle import gradients_of
from playground.judge.tolerance import Reference
from playground.tensors import Results

Found = tuple[list[Reference], dict[str, Reference]]


def references_of(
    reference: Results,
    eager: Results,
    permitted: Sequence[Results],
    others: Sequence[list[torch.Tensor]] = (),
    decisions: Callable[[], Any] | None = None,
    ties: Callable[[], Any] | None = None,
) -> Found:
    """Return (list for the outputs, {name: Reference} for gradients)."""
    outputs = []
    for i, (true, in_eager) in enumerate(zip(reference.outputs, eager.outputs, strict=True)):
        moved = _later(ties, i) if tensors.in_steps(true) else None
        beside = [other[i] for other in others]
        results = (outcome.outputs[i] for outcome in permitted)
        outputs.append(Reference(true, in_eager, *results, others=beside, decisions=moved))
    gradients = {}
    for name, true in reference.gradients.items():
        if true is not None:
            gradients[name] = Reference(
                true, eager.gradients[name], *gradients_of(permitted, name), decisions=_later(decisions, name)
            )
    return outputs, gradients


def _later(found: Callable[[], Any] | None, key: Any) -> Callable[[], Any] | None:
    """What `found()` has under a key, looked for when it is called; None without `found`."""
    return found and (lambda: found()[key])


def beside(
    checked: Found,
    reference: Results,
    eager: Results,
    decisions: Callable[[], Any] | None = None,
    ties: Callable[[], Any] | None = None,
) -> Found:
    """Return what `references_of` gives, for other inputs, beside what the check allowed for `checked`, which are such."""
    outputs, gradients = checked
    of_outputs = []
    for i, (each, true, in_eager) in enumerate(zip(outputs, reference.outputs, eager.outputs, strict=True)):
        of_outputs.append(each.beside(true, in_eager, _later(ties, i) if tensors.in_steps(true) else None))
    return of_outputs, {
        name: each.beside(reference.gradients[name], eager.gradients[name], _later(decisions, name))
        for name, each in gradients.items()
        if reference.gradients.get(name) is not None
    }
