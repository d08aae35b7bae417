"""What outputs and gradients of a probe are compared with: a Reference for each."""

from playground import tensors
from playground.judge.oracle import gradients_of
from playground.judge.tolerance import Reference


def references_of(reference, eager, permitted, others=(), decisions=None, ties=None):
    """Return (list for the outputs, {name: Reference} for the gradients that the original has).

    `decisions()` gives how far near decisions move each gradient, by name, and `ties()` how far near ties of rounding do each
    output that is in steps.
    """
    outputs = []
    for i, (true, in_eager) in enumerate(zip(reference.outputs, eager.outputs, strict=True)):
        moved = ties and tensors.in_steps(true) and (lambda i=i: ties()[i])
        more = {"others": [other[i] for other in others], "decisions": moved or None}
        outputs.append(Reference(true, in_eager, *(outcome.outputs[i] for outcome in permitted), **more))
    gradients = {}
    for name, true in reference.gradients.items():
        if true is not None:
            moved = decisions and (lambda name=name: decisions()[name])
            gradients[name] = Reference(true, eager.gradients[name], *gradients_of(permitted, name), decisions=moved)
    return outputs, gradients


def beside(checked, reference, eager, decisions=None):
    """Return what `references` gives, for other inputs, beside what the check allowed for `checked`, which are such."""
    outputs, gradients = checked
    beside = [each.beside(*pair) for each, *pair in zip(outputs, reference.outputs, eager.outputs, strict=True)]
    return beside, {
        name: each.beside(reference.gradients[name], eager.gradients[name], lambda name=name: decisions()[name])
        for name, each in gradients.items()
        if reference.gradients.get(name) is not None
    }
