"""What the reports say about a result: how numbers are written, and the figures that follow from others."""

import ast
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Every baseline, in the order in which reports list them, with its name for people.
BASELINES = {
    "eager": "eager",
    "channels_last": "channels_last",
    "compile": "torch.compile",
    "eager_fp32": "eager fp32",
    "compile_fp32": "compile fp32",
}

TRAINING = {"weights": "training, weights", "weights_and_input": "training, weights and input"}

NOTHING = "-"


def significant(value):
    """Three significant digits: 0.142, 11.3, 206, 12300, 1.2e-5 as 1.20e-5; '-' for what was not measured."""
    if value is None or not math.isfinite(value):
        return NOTHING
    mantissa, exponent = f"{value:.2e}".split("e")
    exponent = int(exponent)
    if value == 0:
        return "0"
    if not -4 <= exponent < 6:
        return f"{mantissa}e{exponent}"
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


def scientific(value):
    """Three significant digits with an exponent, so that errors can be compared at a glance: 1.10e-5."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def with_unit(value, unit):
    text = significant(value)
    return text if text == NOTHING else text + unit


def span(low, high, unit=""):
    return f"{with_unit(low, unit)}-{with_unit(high, unit)}"


def printable(line):
    """`line` without control characters: it may come from a stranger's file or a compiler."""
    return "".join(c if c.isprintable() else " " for c in str(line))


def one_line(text):
    """`text` on one line, printable."""
    return " ".join(printable(text).split())


def ordered_baselines(names):
    """Known baselines first, in their usual order, then any others."""
    names = list(names)
    return [name for name in BASELINES if name in names] + [name for name in names if name not in BASELINES]


def baseline_name(name):
    return BASELINES.get(name, name)


def best_baseline(speedup):
    """The baseline that is hardest to beat, or None when there is no measured one."""
    return min(speedup, key=lambda name: speedup[name]["ratio"]) if speedup else None


def share_of_floor(result):
    """How much of the least possible time the measured time is: 1.0 is at the hardware's limit; None when not measured."""
    if not result.get("floor_ms") or not result.get("time_ms"):
        return None
    return result["floor_ms"] / result["time_ms"]["median"]


def gradients_unsupported(gradients):
    """The reason why the variant has no gradients, or None when it has (or when nobody looked)."""
    reason = (gradients or {}).get("unsupported")
    return reason if isinstance(reason, str) else None


def is_within(check):
    """Whether an error (of the output or of one gradient) is allowed; one that is no number is not."""
    return check["max_error"] is not None and check["allowed"] is not None and check["max_error"] <= check["allowed"]


def gradient_verdict(check):
    """'ok' or 'fail'; 'none' when the variant has no gradients; '-' when they were not checked."""
    gradients = (check or {}).get("gradients")
    if gradients is None:
        return NOTHING
    if not gradients or gradients_unsupported(gradients) is not None:
        return "none"
    return "ok" if all(is_within(each) for each in gradients.values()) else "fail"


def model_constants(path):
    """The literal module-level constants of a model's file, read without running it."""
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return {}
    constants = {}
    for node in body:
        if not isinstance(node, ast.Assign):
            continue
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                constants[target.id] = value
            elif isinstance(target, ast.Tuple) and all(isinstance(name, ast.Name) for name in target.elts):
                constants.update(zip((name.id for name in target.elts), value, strict=True))
    return constants


def _listed(value):
    """`value` as it comes back from JSON, which has no tuples."""
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def changed_sizes(result, root=ROOT):
    """The constants that differ from the original's: {name: (value, original)}; the original is None when it is not known.

    The originals are result["shape"]["defaults"] where the driver recorded them, otherwise the model's file tells.
    """
    shape = result.get("shape") or {}
    settings = shape.get("settings") or {}
    if not settings:
        return {}
    catalogued = Path(root) / "models" / f"{result['model']}.py"
    defaults = shape.get("defaults") or model_constants(catalogued if catalogued.is_file() else result["model"])
    return {
        name: (value, defaults.get(name)) for name, value in settings.items() if _listed(defaults.get(name)) != _listed(value)
    }


def size_note(result, root=ROOT):
    """'batch 4 instead of 128'; '' when the sizes are the original's."""
    parts = []
    for name, (value, original) in changed_sizes(result, root).items():
        what = f"{'batch' if name == 'batch_size' else name} {_listed(value)}"
        parts.append(what if original is None else f"{what} instead of {_listed(original)}")
    return ", ".join(parts)


def machine(environment):
    """One line on where a document was measured."""
    versions = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"))
    parts = [environment.get("gpu") or environment.get("cpu") or "no GPU"]
    parts += [f"{name} {environment[key]}" for name, key in versions if environment.get(key)]
    return one_line(", ".join(parts))
