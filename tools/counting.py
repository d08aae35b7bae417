"""What count mode of the emulator counts of a variant, forward and backward, at the emulator's size, as JSON.

python -m tools.counting --model NAME_OR_PATH --variant NAME_OR_PATH
"""

import json
import sys

import cuda_emulator as emulator
from playground import catalog
from playground.emulator.step import parse

SEED = 0


def counted(function):
    """Return (function's result, {kernel: {figure: number}} of what it ran); memory that a kernel does not use is left out."""
    emulator.reset_counts()
    result, figures = function(), {}
    for kernel, found in emulator.counts().items():
        accesses = {
            "device memory read": (found.global_read, "sectors"),
            "device memory written": (found.global_write, "sectors"),
            "shared memory read": (found.shared_read, "wavefronts"),
            "shared memory written": (found.shared_write, "wavefronts"),
        }
        figures[kernel] = {
            "launches": found.launches,
            "barriers": found.barriers,
            "atomics": found.atomics,
            "matrix instructions": found.matrix_instructions,
        } | {
            where: {"requests": of.requests, unit: of.transactions, f"{unit} at least": of.ideal, "bytes": of.bytes}
            for where, (of, unit) in accesses.items()
            if of.requests
        }
    return result, figures


def measure(model, variant, settings):
    """Return {"settings", "compiler", "source_sha256", "forward", "training forward", "backward"}.

    The last two are None for one that does not train.

    Inputs and weights are those of a fixed seed. Needs a process of its own: the emulator's libraries serve one mode.
    """
    import torch

    from playground import tensors

    with emulator.install(mode="count", source_file=str(variant.path)):
        problem = catalog.load_problem(model.path, settings)
        new = tensors.make_model(problem, catalog.load_variant(variant.path).ModelNew, SEED)
        inputs = tensors.make_inputs(problem, SEED)
        with torch.no_grad():
            _, forward = counted(lambda: new(*inputs))
        training, backward = None, None
        given = [value.requires_grad_() if tensors.differentiable(value) else value for value in inputs]
        try:
            outputs, training = counted(lambda: tensors.flatten(new(*given)))
            loss = sum(output.sum() for output in outputs if output.requires_grad)
            _, backward = counted(loss.backward)
        except NotImplementedError:
            training, backward = None, None
    return {
        "settings": {name: repr(value) for name, value in settings.items()},
        "compiler": emulator.compiler_name(),  # which decides what loads of the text remain
        "source_sha256": catalog.sha256(variant.path),
        "forward": forward,
        "training forward": "as forward" if training == forward else training,
        "backward": backward,
    }


def main(arguments=None):
    model, variant, *_ = parse("tools.counting", __doc__.splitlines()[0], arguments, sets=False)
    json.dump(measure(model, variant, model.settings("counted")), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
