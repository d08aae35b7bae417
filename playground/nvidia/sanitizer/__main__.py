"""What compute-sanitizer itself prints about a variant, tool by tool.

python -m playground.nvidia.sanitizer --model NAME_OR_PATH --variant NAME_OR_PATH [...] [--set NAME=VALUE ...]

Exits 0 where nothing was found, 1 with a finding, or where a tool's silence would prove nothing, 2 where nothing could be run.
"""

import argparse
import sys
import time

from playground import catalog
from playground.machine import requirements
from playground.nvidia.sanitizer import examine, missing
from playground.nvidia.sanitizer.command import TOOLS
from playground.nvidia.sanitizer.subject import small_case
from playground.worker import WorkerFailure

SEED, LIMIT = 0, 300.0
CLEAN, FAILED, IMPOSSIBLE = 0, 1, 2


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m playground.nvidia.sanitizer", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="NAME_OR_PATH")
    parser.add_argument("--variant", required=True, nargs="+", metavar="NAME_OR_PATH")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(arguments)
    if lacking := requirements.missing_for("cuda") or missing():
        print(lacking, file=sys.stderr)
        return IMPOSSIBLE
    try:
        model = catalog.find_model(given.model)
        variants = [catalog.find_variant(model, name) for name in given.variant]
        settings = catalog.parse_settings(given.set)
        catalog.require_constants(model, "--set", settings)
    except catalog.CatalogError as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE
    original = {"problem": str(model.path), "settings": settings, "place": "cuda", "seed": SEED}
    try:
        with small_case(model, original, SEED, LIMIT) as case:
            examinations = [_show(variant, *case) for variant in variants]
    except WorkerFailure as failure:
        print(f"the original does not run: {failure}", file=sys.stderr)
        return IMPOSSIBLE
    return FAILED if any(found.findings or found.problem for found in examinations) else CLEAN


def _show(variant, original, probes, folder):
    """Print what the tools say. Returns the Examination."""
    began = time.monotonic()
    examination = examine(original | {"variant": str(variant.path)}, probes, folder, LIMIT)
    for tool in TOOLS:
        print(f"== {variant.name}, {tool}")
        for file in (folder / f"{tool}.log", folder / f"{tool}.output"):
            print(file.read_text(errors="replace") if file.exists() else f"no {file.name}")
    print(f"== {variant.name}: {examination.outcome}, {time.monotonic() - began:.1f} s")
    print(examination, flush=True)
    return examination


if __name__ == "__main__":
    sys.exit(main())
