"""Time, floor and speed-up over a swept constant, as a picture."""

import textwrap
from pathlib import Path

from playground import sweep
from playground.report.figures import baseline_medians, baseline_name, fastest_baseline, why_not_measured
from playground.report.sweep_table import by_variant
from playground.report.text import one_line

FORMATS = (".svg", ".png", ".pdf")


class CannotPlot(Exception):
    """No picture can be made; the text says what is missing or was expected."""


def require(file):
    """Raise CannotPlot, before anything is measured, where matplotlib is missing or the file's name stands for no format."""
    if Path(file).suffix not in FORMATS:
        raise CannotPlot(f"--plot {file}: the name has to end with one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CannotPlot("--plot needs matplotlib: python -m pip install -r requirements-html.txt") from None


def write(report, axes, file):
    """Draw a column of two panels for each model and combination of other axes; the first axis runs to the right."""
    from matplotlib.figure import Figure  # which only who draws needs

    axis = next(iter(axes))
    columns = _columns(report["results"], axes, axis)
    has_ratios = any(sweep.measured(line) for lines in columns.values() for line in lines.values())
    figure = Figure(figsize=(8 * len(columns), 7.2 if has_ratios else 4.5), layout="constrained")
    # Where no speed-up was measured, a strip that says why is enough.
    panels = figure.subplots(2, len(columns), squeeze=False, sharex="col", height_ratios=(1, 1 if has_ratios else 0.02))
    for (times, ratios), (title, lines) in zip(panels.T, columns.items(), strict=True):
        _draw_times(times, lines, axis)
        times.set_title(f"{title}\n{times.get_title('left')}", loc="left", fontsize=10)
        _draw_ratios(ratios, lines, axis)
        for panel in (times, ratios):
            if sweep.is_numeric(axes, axis) and min(axes[axis]) > 0 and max(axes[axis]) >= 8 * min(axes[axis]):
                panel.set_xscale("log", base=2)
                panel.set_xticks(sorted(axes[axis]), [str(each) for each in sorted(axes[axis])])
                panel.minorticks_off()
        ratios.set_xlabel(axis)
    figure.savefig(file)


def _columns(results, axes, axis):
    """{title: {variant: results along the axis}}."""
    columns = {}
    for (model, variant), own in by_variant(results).items():
        for others, line in sweep.lines_along(own, axes, axis):
            title = ", ".join([model, *(f"{name}={each}" for name, each in others.items())])
            columns.setdefault(title, {})[variant] = line
    return columns


def _places(line, axis):
    found = [sweep.value(result["shape"]["settings"], axis) for result in line]
    return [each if isinstance(each, (int, float)) else str(each) for each in found]


def _draw_times(panel, lines, axis):
    for number, (variant, line) in enumerate(lines.items()):
        _plot(panel, axis, [(each, each["time_ms"]["median"]) for each in _timed(line)], "-", f"C{number}", variant)
    longest = max(map(_timed, lines.values()), key=len)
    medians = [(result, baseline_medians([result])) for result in longest]
    fastest = [(result, found, fastest_baseline(found)) for result, found in medians if fastest_baseline(found)]
    names = ", ".join(dict.fromkeys(baseline_name(name) for _, _, name in fastest))
    _plot(panel, axis, [(result, found["eager"]) for result, found in medians if "eager" in found], ":", "gray", "eager")
    _plot(panel, axis, [(each, found[name]) for each, found, name in fastest], "-.", "gray", f"best baseline\n({names})")
    _plot(panel, axis, [(result, result["floor_ms"]) for result in longest if result["floor_ms"]], "--", "black", "floor")
    _finish(panel, "median ms", "", lines, axis, lambda result: None if result["time_ms"] else result["reason"])
    if longest:
        panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the panel, where it covers no line


def _plot(panel, axis, points, style, colour, label):
    if points:
        places = _places([result for result, _ in points], axis)
        marker = "o" if style == "-" else "."
        panel.plot(places, [value for _, value in points], linestyle=style, color=colour, marker=marker, label=label)


def _draw_ratios(panel, lines, axis):
    """Draw the speed-ups in the colours of the times, whose legend names them."""
    for number, line in enumerate(lines.values()):
        timed = sweep.measured(line)
        places = _places(timed, axis)
        ratio, low, high = ([result["outcome"][key] for result in timed] for key in ("ratio", "low", "high"))
        panel.plot(places, ratio, marker="o", color=f"C{number}")
        panel.fill_between(places, low, high, alpha=0.25, color=f"C{number}")
    panel.axhline(1.0, linestyle="--", color="black")
    _finish(panel, "speed-up over the best baseline", "x", lines, axis, why_not_measured)
    if not any(map(sweep.measured, lines.values())):
        panel.set_yticks([])
        panel.set_ylabel("")


def _finish(panel, label, unit, lines, axis, why_missing):
    """Label a panel and write above it why points are missing, once for each reason."""
    from matplotlib.ticker import LogLocator

    reasons = {}
    for variant, line in lines.items():
        for result, place in zip(line, _places(line, axis), strict=True):
            if why := why_missing(result):
                reasons.setdefault((variant, one_line(why)), []).append(place)
    said = [f"{variant} at {', '.join(map(str, places))}: {why}" for (variant, why), places in reasons.items()]
    panel.set_title("\n".join(textwrap.fill(f"not measured: {each}", 90) for each in said), loc="left", fontsize=8)
    panel.set_ylabel(label)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}" + unit)
    panel.yaxis.set_minor_formatter("")
    panel.grid(alpha=0.3)


def _timed(line):
    return [result for result in line if result["time_ms"]]
