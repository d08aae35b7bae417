"""A sweep on the terminal: for each variant a row a point, and why a point has no pass or no speed-up."""

import operator

from playground import sweep
from playground.report import figures
from playground.report.layout import INDENT, print_folded, print_rows, verdict
from playground.report.terminal import View
from playground.report.text import grouped, one_line, significant

VARIANT = operator.attrgetter("model", "variant")


class Sweep(View):
    """The view of a sweep over `axes`, {name: values}: it has no tables before its end."""

    def __init__(self, console, axes):
        super().__init__(console)
        self._axes = axes

    def conclude(self, report):
        console, axes = self._console, self._axes
        for (model, variant), results in grouped(report.results, VARIANT).items():
            console.print()
            print_folded(console, f"{model} {variant}", style="bold")
            ordered = sorted(results, key=lambda result: [sweep.place_on(axes, axis, result) for axis in axes])
            print_rows(console, [_row(result, axes) for result in ordered], {*axes, "verdict", "over", "outcome"})
            console.print()
            reasons = {}  # why what is no pass is none, or has no speed-up: {reason: points}
            for result in ordered:
                if reason := result.reason if result.verdict != "pass" else result.why_not_measured:
                    point = ", ".join(f"{axis}={sweep.value(result, axis)}" for axis in axes)
                    reasons.setdefault(one_line(reason), []).append(point)
            for reason, points in reasons.items():
                print_folded(console, f"{'; '.join(points)}: {reason}", indent=INDENT)


def _row(result, axes):
    texts = figures.texts(result)
    return {
        **{axis: sweep.value(result, axis) for axis in axes},
        "verdict": verdict("refused" if sweep.is_refusal(result) else result.verdict),
        "median ms": texts["median ms"],
        "eager ms": significant(figures.baseline_medians([result]).get("eager")),
        "floor ms": significant(result.floor_ms),
        **{name: texts[name] for name in ("of floor", "speed-up", "over")},
        "outcome": verdict(texts["outcome"]),
    }
