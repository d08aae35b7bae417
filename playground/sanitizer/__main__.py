"""What compute-sanitizer itself prints about a variant, tool by tool.

python -m playground.sanitizer --model NAME_OR_PATH --variant NAME_OR_PATH [...] [--set NAME=VALUE ...]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from playground import catalog
from playground.judging import Truth
from playground.machine import requirements
from playground.sanitizer import examine, missing
from playground.sanitizer.command import TOOLS

SEED, LIMIT = 0, 300.0


def main():
    parser = argparse.ArgumentParser(prog="python -m playground.sanitizer", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="NAME_OR_PATH")
    parser.add_argument("--variant", required=True, nargs="+", metavar="NAME_OR_PATH")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    if lacking := requirements.missing_for("cuda") or missing():
        print(lacking, file=sys.stderr)
        return 2
    try:
        model = catalog.find_model(given.model)
        variants = [catalog.find_variant(model, name) for name in given.variant]
        settings = catalog.parse_settings(given.set)
    except catalog.CatalogError as complaint:
        print(complaint, file=sys.stderr)
        return 2
    original = {"problem": str(model.path), "settings": settings, "place": "cuda", "seed": SEED}
    with tempfile.TemporaryDirectory(prefix="playground-") as folder:
        truth = Truth(original, Path(folder), SEED, LIMIT)
        try:
            truth.prepare()
            for variant in variants:
                _show(variant, original | {"weights": truth.weights}, truth, Path(folder))
        finally:
            truth.close()
    return 0


def _show(variant, original, truth, folder):
    began = time.monotonic()
    probes = [truth.inputs(probe) for probe in truth.probes_for_training()]
    examination = examine(original | {"variant": str(variant.path)}, probes, folder, LIMIT)
    for tool in TOOLS:
        print(f"== {variant.name}, {tool}")
        for file in (folder / f"{tool}.log", folder / f"{tool}.output"):
            print(file.read_text(errors="replace") if file.exists() else f"no {file.name}")
    print(f"== {variant.name}: {examination.outcome}, {time.monotonic() - began:.1f} s")
    print(examination, flush=True)


if __name__ == "__main__":
    sys.exit(main())
