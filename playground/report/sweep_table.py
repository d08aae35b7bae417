"""A sweep on the terminal: for each variant a row a point, and where it becomes faster or slower."""

from playground import sweep
from playground.report import against, figures
from playground.report.layout import INDENT, cells, print_folded, print_rows, verdict
from playground.report.terminal import View
from playground.report.text import NOTHING, one_line, significant, with_unit


class Sweep(View):
    """The view of a sweep over `axes`, {name: values}: it has no tables before its end."""

    def __init__(self, console, axes):
        super().__init__(console)
        self._axes = axes

    def update(self, report):
        pass

    def end(self, report):
        show(report, self._axes, self._console)
        against.show(report, self._console)


def show(report, axes, console):
    """Everything about a swept document; `axes` are {name: values}."""
    print_folded(console, figures.machine(report["environment"]), style="dim")
    for (model, variant), results in by_variant(report["results"]).items():
        console.print()
        print_folded(console, f"{model} {variant}", style="bold")
        ordered = sorted(results, key=lambda result: [sweep.place_on(axes, axis, result) for axis in axes])
        rows = [_row(result, axes) for result in ordered]
        print_rows(console, rows, {*axes, "verdict", "over", "outcome"})
        console.print()
        for reason, points in _reasons(ordered, axes).items():
            print_folded(console, f"{'; '.join(points)}: {reason}", indent=INDENT)
        for line in crossover_lines(results, axes):
            print_folded(console, line, indent=INDENT)


def by_variant(results):
    """Return {(model, variant): results}, in their order."""
    groups = {}
    for result in results:
        groups.setdefault((result["model"], result["variant"]), []).append(result)
    return groups


def _row(result, axes):
    (best, ratio), share = figures.headline(result), figures.share_of_floor(result)
    values = {
        **{axis: one_line(sweep.value(result["shape"]["settings"], axis)) for axis in axes},
        "verdict": verdict("refused" if sweep.is_refusal(result) else result["verdict"]),
        "median ms": significant((result["time_ms"] or {}).get("median")),
        "eager ms": significant(figures.baseline_medians([result]).get("eager")),
        "floor ms": significant(result["floor_ms"]),
        "of floor": with_unit(share and 100 * share, "%"),
        "speed-up": figures.labelled(with_unit(ratio["ratio"], "x"), result) if ratio else NOTHING,
        "over": one_line(figures.baseline_name(best)) if best else NOTHING,
        "outcome": verdict(figures.outcome_verdict(result)),
    }
    return cells(values, values.values())


def _reasons(results, axes):
    """Return {reason: points} of what is no pass, or has no speed-up."""
    reasons = {}
    for result in results:
        reason = result["reason"] if result["verdict"] != "pass" else figures.why_not_measured(result)
        if reason:
            settings = result["shape"]["settings"]
            point = ", ".join(f"{axis}={sweep.value(settings, axis)}" for axis in axes)
            reasons.setdefault(one_line(reason), []).append(point)
    return reasons


def crossover_lines(results, axes):
    """Yield a sentence on each place along each axis where a variant becomes faster or slower than PyTorch, or on none."""
    for axis in axes:
        for others, line in sweep.lines_along(results, axes, axis):
            timed = sweep.measured(line)
            where = f" at {', '.join(f'{name}={each}' for name, each in others.items())}" if others else ""
            found = sweep.crossovers(line, axes, axis)
            for each in found:
                about = f", at about {significant(each.at)}" if each.at else ""
                verb = "becomes faster" if each.starts else "stops being faster"
                yield f"{verb} between {axis}={each.before} and {each.after}{about}{where}"
            if len(timed) > 1 and not found:
                wins = timed[0]["outcome"]["verdict"] == "win"
                yield f"faster {'everywhere' if wins else 'nowhere'} along {axis}{where}"
