"""What runs under Nsight Compute: one forward pass of a variant on the GPU, in this process.

python -m playground.nvidia.profiler.target --model PATH --variant PATH [--set NAME=VALUE ...]
"""

import argparse

import torch

from playground import catalog, tensors
from playground.machine import requirements

SEED = 0


def arguments_for(model, variant, settings):
    """The arguments of Python that run this module on a model's variant at these settings."""
    chosen = [f"{name}={value!r}" for name, value in settings.items()]
    command = ["-m", "playground.nvidia.profiler.target", "--model", str(model.path), "--variant", str(variant.path)]
    return [*command, *(["--set", *chosen] if chosen else [])]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m playground.nvidia.profiler.target", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="PATH")
    parser.add_argument("--variant", required=True, metavar="PATH")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(arguments)
    requirements.prepare_environment()
    problem = catalog.load_problem(given.model, catalog.parse_settings(given.set))
    model = tensors.make_model(problem, catalog.load_variant(given.variant).ModelNew, SEED).to("cuda")
    inputs = tensors.to(tensors.make_inputs(problem, SEED), "cuda")
    with torch.no_grad():
        model(*inputs)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
