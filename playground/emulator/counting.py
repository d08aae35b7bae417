"""What count mode of the emulator counts of a variant, forward and backward, at the emulator's size: printed, or recorded.

    python -m playground.emulator.counting --model NAME_OR_PATH --variant NAME_OR_PATH [--record]
    python -m playground.emulator.counting --record                 # every CUDA variant of every model

A recording is results/emulator_counts/<model>.<variant>.json: the HTML page shows it, and a test compares with it.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import cuda_emulator as emulator
from playground import catalog, tensors

RECORDED = catalog.ROOT / "results" / "emulator_counts"
SEED = 0


def traffic(found, unit):
    return {"requests": found.requests, unit: found.transactions, f"{unit} at least": found.ideal, "bytes": found.bytes}


def figures():
    """{kernel: {figure: number}} of what has run since the last reset; memory that a kernel does not use is left out."""
    result = {}
    for kernel, found in emulator.counts().items():
        accesses = {
            "device memory read": traffic(found.global_read, "sectors"),
            "device memory written": traffic(found.global_write, "sectors"),
            "shared memory read": traffic(found.shared_read, "wavefronts"),
            "shared memory written": traffic(found.shared_write, "wavefronts"),
        }
        result[kernel] = {
            "launches": found.launches,
            "barriers": found.barriers,
            "atomics": found.atomics,
            "matrix instructions": found.matrix_instructions,
        } | {where: numbers for where, numbers in accesses.items() if numbers["requests"]}
    return result


def counted(function):
    """(function's result, the figures of the kernels that it ran)"""
    emulator.reset_counts()
    result = function()
    return result, figures()


def compiler_name():
    """The compiler that decides which loads of the text remain: its first line without the distribution's remarks."""
    return emulator.compiler_name()


def measure(model, variant, settings):
    """{"settings", "compiler", "source_sha256", "forward", "training forward", "backward"}.

    The last two are None for one that does not train.

    Inputs and weights are those of a fixed seed. Needs a process of its own: the emulator's libraries serve one mode.
    """
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
        "compiler": compiler_name(),
        "source_sha256": catalog.sha256(variant.path),
        "forward": forward,
        "training forward": "as forward" if training == forward else training,
        "backward": backward,
    }


def variants():
    """(model, variant) of every CUDA variant of the project."""
    return [(m, v) for m in catalog.models() for v in catalog.variants(m) if v.backend == "cuda"]


def recording(model, variant):
    return RECORDED / f"{model.name}.{variant.name}.json"


def command(model, variant):
    return ["-m", "playground.emulator.counting", "--model", str(model.path), "--variant", str(variant.path)]


def measure_apart(model, variant):
    """measure() in a process of its own. Raises RuntimeError with what it printed when it fails."""
    done = subprocess.run([sys.executable, *command(model, variant)], cwd=catalog.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"counting {model.name}/{variant.name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def differences(old, new, where=""):
    """A line for each figure that changed: where it stands, from what to what."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [
            line for name in names for line in differences(old.get(name), new.get(name), f"{where}{', ' * bool(where)}{name}")
        ]
    return [] if old == new else [f"{where}: {old} -> {new}"]


def record(model, variant):
    path = recording(model, variant)
    new = measure_apart(model, variant)
    old = json.loads(path.read_text()) if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(new, indent=1) + "\n")
    changes = differences(old, new) if old else ["recorded for the first time"]
    print(f"{path.relative_to(catalog.ROOT)}: {'; '.join(changes) or 'unchanged'}", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m playground.emulator.counting", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="NAME_OR_PATH")
    parser.add_argument("--variant", metavar="NAME_OR_PATH")
    parser.add_argument("--record", action="store_true", help="write the recording that the tests compare with")
    given = parser.parse_args(arguments)
    if bool(given.model) != bool(given.variant) or not (given.model or given.record):
        parser.error("name a --model and its --variant, or --record all of them")
    try:
        chosen = variants()
        if given.model:
            model = catalog.find_model(given.model)
            chosen = [(model, catalog.find_variant(model, given.variant))]
    except catalog.CatalogError as complaint:
        sys.exit(str(complaint))
    if given.record:
        with ThreadPoolExecutor(2) as pool:
            for job in [pool.submit(record, *pair) for pair in chosen]:
                job.result()
    else:
        model, variant = chosen[0]
        settings = model.settings("counted")
        json.dump(measure(model, variant, settings), sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
