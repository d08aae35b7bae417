"""A sweep on the terminal: for each variant a row a point, and where it becomes faster or slower."""

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
            lines = [f"{'; '.join(points)}: {reason}" for reason, points in reasons.items()]
            for line in (*lines, *crossover_lines(results, axes)):
                print_folded(console, line, indent=INDENT)


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


def crossover_lines(results, axes):
    """Yield a sentence on each place along each axis where a variant becomes faster or slower than PyTorch, or on none."""
    for axis in axes:
        for others, line in sweep.lines_along(results, axes, axis):
            timed, found = sweep.measured(line), sweep.crossovers(line, axes, axis)
            where = f" at {', '.join(f'{name}={each}' for name, each in others.items())}" if others else ""
            for each in found:
                about = f", at about {significant(each.at)}" if each.at else ""
                verb = "becomes faster" if each.starts else "stops being faster"
                yield f"{verb} between {axis}={each.before} and {each.after}{about}{where}"
            if len(timed) > 1 and not found:
                wins = timed[0].outcome.verdict == "win"
                yield f"faster {'everywhere' if wins else 'nowhere'} along {axis}{where}"
