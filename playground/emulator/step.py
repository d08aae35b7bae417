"""Runs a variant's forward pass once under the emulator, built without optimisation, in this process: what a debugger starts.

python -m playground.emulator.step --model NAME_OR_PATH --variant NAME_OR_PATH [--set NAME=VALUE ...]
"""

import argparse

import cuda_emulator as emulator
from playground import catalog


def parse(module, about, arguments, *more, sets=True):
    """Return (model, variant, settings of --set, all arguments) of a `module`'s command, or exit with status 2."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--model", metavar="NAME_OR_PATH", required=True)
    parser.add_argument("--variant", metavar="NAME_OR_PATH", required=True)
    if sets:
        about = "constants of the model's file"
        parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=about)
    for name, help_ in more:
        parser.add_argument(name, action="store_true", help=help_)
    given = parser.parse_args(arguments)
    try:
        model = catalog.find_model(given.model)
        settings = catalog.parse_settings(given.set) if sets else {}
        catalog.require_constants(model.path, f"--set: {model.name}", settings)
        return model, catalog.find_variant(model, given.variant), settings, given
    except catalog.CatalogError as complaint:
        parser.error(str(complaint))


def recipe(model, variant, settings):
    """Return the text that tells how to step through the variant."""
    kernel = emulator.first_kernel(variant.path.read_text())
    if kernel is None:
        lacks = "no text that looks like a kernel (__global__ void name(...))"
        return f"{variant.path} has {lacks}; there is nothing to step through"
    chosen = [f"{name}={value!r}" for name, value in settings.items()]
    command = ["-m", "playground.emulator.step", "--model", str(model.path), "--variant", str(variant.path)]
    return emulator.recipe(variant.path, kernel, catalog.ROOT, [*command, *(["--set", *chosen] if chosen else [])])


def main(arguments=None):
    import torch

    from playground import tensors

    model, variant, settings, _ = parse("playground.emulator.step", __doc__.splitlines()[0], arguments)
    problem = catalog.load_problem(model.path, model.settings("emulator") | settings)
    with emulator.install(mode="fast", debug=True, source_file=str(variant.path)), torch.no_grad():
        module = catalog.load_variant(variant.path)
        tensors.make_model(problem, module.ModelNew, 0)(*tensors.make_inputs(problem, 0))
    for launch in emulator.launches():
        print(f"ran {launch.kernel} on {launch.grid} blocks of {launch.block} threads")


if __name__ == "__main__":
    main()
