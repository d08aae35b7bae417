"""Constants of a model that take several values: the points of a grid, and the results along its axes."""

import ast
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from playground.catalog import CatalogError
from playground.record import Result

Axes = dict[str, tuple[Any, ...]]  # {name of a constant: its values}
# How the reason of an exception begins by which a variant refuses what it was given; faults, time limits and a TypeError, which
# is how a wrong call ends, are none. PyTorch raises RuntimeError, too: only one of the variant's own code is a refusal.
REFUSAL = re.compile(r"(ValueError|NotImplementedError): ")
MAYBE_REFUSAL = re.compile(r"RuntimeError: (?!CUDA error|CUDA driver error|cuDNN)")
FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+, in .+\n(?:    (?P<code>.+))?', re.MULTILINE)
COMPILED = "<compiled code of the file>"  # stands in a traceback for what calls a function that the variant has built
# Where a traceback ends when a function or an operator of a variant's own raises: what calls them from Python.
CALLERS = ("torch/_ops.py", COMPILED)


def parse(texts: Iterable[str]) -> Axes:
    """Return {"batch_size": (1, 8)} from ["batch_size=1,8"]; values are Python literals. Raises CatalogError."""
    axes: Axes = {}
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


def grid(axes: Axes) -> list[dict[str, Any]]:
    """Return the settings of every point, the last axis changing fastest; one empty point without axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def is_refusal(result: Result) -> bool:
    """Return whether the variant said no to the shape."""
    reason = result.reason or ""
    if result.verdict != "error":
        return False
    return bool(REFUSAL.match(reason) or (MAYBE_REFUSAL.match(reason) and _is_its_own(result)))


def _is_its_own(result: Result) -> bool:
    """Whether the exception of a result came from the variant's own operators, or a `raise` in its file, by its traceback."""
    traceback, found, _ = result.details.partition(f"\n{result.reason}")
    frames = list(FRAME.finditer(traceback)) if found else []
    if not frames:
        return False
    file, code = Path(frames[-1]["file"]), frames[-1]["code"] or ""
    return file.as_posix().endswith(CALLERS) or (file.stem == result.variant and code.startswith("raise "))


def lines_along(results: Sequence[Result], axes: Axes, axis: str) -> list[tuple[dict[str, Any], list[Result]]]:
    """Return the results of a variant, grouped by all axes but one: [({name: value} of the others, [results along it])]."""
    others = [name for name in axes if name != axis]
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in sorted(results, key=lambda result: [place_on(axes, name, result) for name in (*others, axis)]):
        groups.setdefault(tuple(repr(value(result, name)) for name in others), []).append(result)
    return [({name: value(line[0], name) for name in others}, line) for line in groups.values()]


def value(result: Result, name: str) -> Any:
    """Return the value of a constant in a result, the same before and after JSON."""
    found = result.shape.settings[name]
    return tuple(found) if isinstance(found, list) else found


def place_on(axes: Axes, axis: str, result: Result) -> Any:
    """Return the key that sorts results along an axis: by size where its values are numbers, else as they were given."""
    found = value(result, axis)
    return found if is_numeric(axes, axis) else list(axes[axis]).index(found)


def is_numeric(axes: Axes, axis: str) -> bool:
    return all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in axes[axis])


def measured(line: Iterable[Result]) -> list[Result]:
    """Return the results of which a speed-up is known."""
    return [result for result in line if result.outcome and result.outcome.ratio]
