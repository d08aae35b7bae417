"""What the emulator counted of a variant (playground.emulator.counting), as rows of a table."""

import json
from dataclasses import dataclass

from playground import catalog
from playground.emulator import counting
from playground.report.figures import NOTHING

COUNTS = ("launches", "barriers", "atomics", "matrix instructions")
TRAFFIC = ("device memory read", "device memory written", "shared memory read", "shared memory written")
HEADS = ("kernel", *COUNTS, *TRAFFIC)
PASSES = {"forward": "forward", "training forward": "forward, training", "backward": "backward"}


@dataclass(frozen=True)
class Counters:
    """`passes` are {title: rows}; `note` says at which sizes, or why there are none; `is_current`: of the file as it is."""

    passes: dict
    note: str
    is_current: bool = True


def of(result, path, digest):
    """The Counters of a result whose variant's file is at `path`, with its SHA-256. None for a variant without CUDA."""
    if result["backend"] != "cuda":
        return None
    known = [
        (model, variant) for model in catalog.models() if model.name == result["model"] for variant in catalog.variants(model)
    ]
    own = next((pair for pair in known if pair[1].path == path), None)
    recording = counting.recording(*own) if own else None
    if recording is None or not recording.exists():
        return Counters({}, "not counted: `python -m playground.emulator.counting --model M --variant V` counts, without a GPU")
    counted = json.loads(recording.read_text(encoding="utf-8"))
    sizes = ", ".join(f"{name} {value}" for name, value in counted["settings"].items()) or "the original sizes"
    passes = {title: list(_rows(counted[key])) for key, title in PASSES.items() if isinstance(counted.get(key), dict)}
    return Counters(passes, f"Counted under the emulator at {sizes}.", digest == counted.get("source_sha256"))


def _rows(kernels):
    """(kernel, (figure, remark), ...)."""
    for name, found in kernels.items():
        numbers = [(f"{found[key]:,}", "") for key in COUNTS]
        yield (name, *numbers, *(_traffic(found.get(key)) for key in TRAFFIC))


def _traffic(found):
    """('43,296 sectors', '3.37x the least')."""
    if not found:
        return NOTHING, ""
    unit = next(key for key in found if f"{key} at least" in found)
    least = found[f"{unit} at least"]
    excess = f"{found[unit] / least:.3g}x the least" if least and found[unit] > least else "the least"
    return f"{found[unit]:,} {unit}", excess
