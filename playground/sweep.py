"""Constants of a model that take several values: the points of a grid, and where along it a variant becomes faster."""

import ast
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from playground.catalog import CatalogError

# How the reason of an exception begins by which a variant refuses what it was given; faults, time limits and a TypeError, which
# is how a wrong call ends, are none. PyTorch raises RuntimeError, too: only one of the variant's own code is a refusal.
REFUSAL = re.compile(r"(ValueError|NotImplementedError): ")
MAYBE_REFUSAL = re.compile(r"RuntimeError: (?!CUDA error|CUDA driver error|cuDNN)")
FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+, in .+\n(?:    (?P<code>.+))?', re.MULTILINE)
COMPILED = "<compiled code of the file>"  # stands in a traceback for what calls a function that the variant has built
# Where a traceback ends when a function or an operator of a variant's own raises: what calls them from Python.
CALLERS = ("torch/_ops.py", COMPILED)


def parse(texts):
    """Return {"batch_size": (1, 8)} from ["batch_size=1,8"]; values are Python literals. Raises CatalogError."""
    axes = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier() or not values.strip():
            raise CatalogError(f"--sweep takes NAME=VALUE,VALUE,..., for example batch_size=1,8,64; got {text!r}")
        if name in axes:
            raise CatalogError(f"--sweep {name} is given twice; name all its values in one, with commas between")
        try:
            axes[name] = tuple(dict.fromkeys(ast.literal_eval(f"({values},)")))
        except (ValueError, SyntaxError, TypeError):
            raise CatalogError(
                f"--sweep {text}: expected Python literals such as 4, 2.0 or (3, 3), with commas between"
            ) from None
    return axes


def grid(axes):
    """Return the settings of every point, the last axis changing fastest; one empty point without axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def is_refusal(result):
    """Return whether the variant said no to the shape."""
    reason = result.reason or ""
    if result.verdict != "error":
        return False
    return bool(REFUSAL.match(reason) or (MAYBE_REFUSAL.match(reason) and _is_its_own(result)))


def _is_its_own(result):
    """Whether the exception of a result came from the variant's own text: its operators', or a `raise` in its file.

    Where it was raised is what the traceback in "details" ends with. An operator of PyTorch's that the variant calls ends it in
    the variant's own line, or in PyTorch's files. Without a traceback nothing says that it was meant.
    """
    traceback, found, _ = result.details.partition("\n" + result.reason)
    frames = list(FRAME.finditer(traceback)) if found else []
    if not frames:
        return False
    file, code = Path(frames[-1]["file"]), frames[-1]["code"] or ""
    return file.as_posix().endswith(CALLERS) or (file.stem == result.variant and code.startswith("raise "))


def lines_along(results, axes, axis):
    """Return the results of a variant, grouped by all axes but one: [({name: value} of the others, [results along it])]."""
    others = [name for name in axes if name != axis]
    groups = {}
    for result in sorted(results, key=lambda result: [place_on(axes, name, result) for name in (*others, axis)]):
        groups.setdefault(tuple(repr(value(result, name)) for name in others), []).append(result)
    return [({name: value(line[0], name) for name in others}, line) for line in groups.values()]


def value(result, name):
    """Return the value of a constant in a result, the same before and after JSON."""
    found = result.shape.settings[name]
    return tuple(found) if isinstance(found, list) else found


def place_on(axes, axis, result):
    """Return the key that sorts results along an axis: by size where its values are numbers, else as they were given."""
    found = value(result, axis)
    return found if is_numeric(axes, axis) else list(axes[axis]).index(found)


def is_numeric(axes, axis):
    return all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in axes[axis])


@dataclass(frozen=True)
class Crossover:
    """Between two neighbouring values of an axis a variant `starts` or stops being faster; `at`: where the ratio is 1."""

    starts: bool
    before: object
    after: object
    at: float | None


def measured(line):
    """Return the results of which a speed-up is known."""
    return [result for result in line if result.outcome and result.outcome.ratio]


def crossovers(line, axes, axis):
    """Return where a variant starts or stops being faster along a line of results; those without a time are skipped.

    Between two points the ratio over the best baseline is taken as a power of the swept value, where that is a positive number.
    """
    timed = measured(line)
    found = []
    for one, other in itertools.pairwise(timed):
        wins = [result.outcome.verdict == "win" for result in (one, other)]
        if wins[0] != wins[1]:
            ends = [value(result, axis) for result in (one, other)]
            ratios = [result.outcome.ratio for result in (one, other)]
            at = _where_ratio_is_one(ends, ratios) if is_numeric(axes, axis) else None
            found.append(Crossover(wins[1], *ends, at))
    return found


def _where_ratio_is_one(ends, ratios):
    """None where the ratios are on one side of 1: the smaller then counts as a tie."""
    (x0, x1), (y0, y1) = ends, [math.log(ratio) for ratio in ratios]
    if min(x0, x1) <= 0 or y0 * y1 >= 0:
        return None
    share = y0 / (y0 - y1)
    return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
