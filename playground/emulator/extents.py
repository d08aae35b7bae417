"""Index arithmetic at sizes beyond the memory at hand: `python -m playground.emulator.extents --model M --variant V --set ...`.

Tensors get their real extent but no values: pages appear as kernels touch them. Of each launch the first block, the last and
some between run under check mode, for a few seconds, so that an index that is computed in 32 bits and wraps shows as an access
out of bounds. Not known stays an index that wraps and lands within a tensor. Nothing is said of the results, nor of blocks
that did not run. Exit status 1: a finding; 2: bad arguments.
"""

import sys

import torch

import cuda_emulator as emulator
from playground import catalog, tensors
from playground.emulator.step import parse


def run(model, variant, settings, training=False, seconds=5.0):
    """Run one forward pass, with `training` a backward one too. Returns the launches; raises Finding."""
    checked = emulator.install(mode="check", source_file=str(variant.path), time_limit=seconds)
    with emulator.without_values(), checked:
        problem = catalog.load_problem(model.path, settings)
        model = tensors.make_model(problem, catalog.load_variant(variant.path).ModelNew, 0)
        with torch.device("meta"):
            shapes = problem.get_inputs()
        inputs = [torch.empty_like(each, device="cpu") if torch.is_tensor(each) else each for each in shapes]
        emulator.reset_launches()
        with torch.set_grad_enabled(training):
            results = tensors.flatten(model(*inputs))
        if training:
            torch.autograd.backward(results, [torch.empty_like(each) for each in results])
        return emulator.launches()


def main(arguments=None):
    flag = "--training", "run a backward pass, too"
    model, variant, settings, given = parse("playground.emulator.extents", __doc__.split("\n\n")[1], arguments, flag)
    try:
        launches = run(model, variant, settings, given.training)
    except emulator.Finding as finding:
        print(finding)
        return 1
    print(
        f"{len(launches)} launches: nothing found in the blocks that ran. Not checked: the other blocks; an index in 32 bits, "
        "or read from a tensor, that wraps and lands within a tensor"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
