"""Time, floor and speed-up over a swept constant, as a picture."""

import textwrap
from importlib.util import find_spec
from pathlib import Path

from playground import sweep
from playground.report.figures import baseline_medians, baseline_name, fastest_baseline
from playground.report.sweep_table import VARIANT
from playground.report.text import grouped, one_line

FORMATS = (".svg", ".png", ".pdf")


def missing(file):
    """Return why no picture can be written to that file: its name, or matplotlib is missing; None where one can be."""
    if Path(file).suffix not in FORMATS:
        return f"--plot {file}: the name has to end with one of {', '.join(FORMATS)}"
    return None if find_spec("matplotlib") else "--plot needs matplotlib: python -m pip install matplotlib"


def write(report, axes, file):
    """Draw times and speed-ups along the first axis, a column for each model and combination of the other axes."""
    from matplotlib.figure import Figure  # which only who draws needs

    axis, columns = next(iter(axes)), {}
    for (model, variant), own in grouped(report.results, VARIANT).items():
        for others, line in sweep.lines_along(own, axes, axis):
            title = ", ".join([model, *(f"{name}={each}" for name, each in others.items())])
            columns.setdefault(title, {})[variant] = line
    lines_of_all = [line for lines in columns.values() for line in lines.values()]
    kinds = {_draw_times: _timed, _draw_ratios: sweep.measured}
    drawn = [draw for draw, known in kinds.items() if any(map(known, lines_of_all))]
    figure = Figure(figsize=(8 * len(columns), 1.2 + 3 * len(drawn)), layout="constrained")
    panels = figure.subplots(max(1, len(drawn)), len(columns), squeeze=False, sharex="col")
    for own, (title, lines) in zip(panels.T, columns.items(), strict=True):
        own[0].set_title("\n".join([title, *_reasons(lines, axis)]), loc="left", fontsize=9)
        for panel, draw in zip(own, drawn, strict=False):
            draw(panel, lines, axis)
            if sweep.is_numeric(axes, axis) and min(axes[axis]) > 0 and max(axes[axis]) >= 8 * min(axes[axis]):
                panel.set_xscale("log", base=2)
                panel.set_xticks(sorted(axes[axis]), [str(each) for each in sorted(axes[axis])])
                panel.minorticks_off()
        own[-1].set_xlabel(axis)
        own[0].axis("on" if drawn else "off")
    figure.savefig(file)


def _timed(line):
    return [result for result in line if result.time_ms]


def _places(line, axis):
    found = [sweep.value(result, axis) for result in line]
    return [each if isinstance(each, (int, float)) else str(each) for each in found]


def _reasons(lines, axis):
    reasons = {}
    for variant, line in lines.items():
        for result, place in zip(line, _places(line, axis), strict=True):
            what = "speed-up not measured" if result.time_ms else "not measured"
            if why := result.why_not_measured or (None if result.time_ms else result.reason):
                reasons.setdefault((what, variant, one_line(why)), []).append(str(place))
    said = [f"{what}: {variant} at {', '.join(places)}: {why}" for (what, variant, why), places in reasons.items()]
    return [textwrap.fill(each, 90) for each in said]


def _draw_times(panel, lines, axis):
    longest = max(map(_timed, lines.values()), key=len)
    medians = [(result, baseline_medians([result])) for result in longest]
    fastest = [(result, found, fastest_baseline(found)) for result, found in medians if fastest_baseline(found)]
    names = ", ".join(dict.fromkeys(baseline_name(name) for _, _, name in fastest))
    drawn = {}
    for number, (variant, line) in enumerate(lines.items()):
        drawn[variant] = [(each, each.time_ms.median) for each in _timed(line)], "-", f"C{number}"
    drawn["eager"] = [(result, found["eager"]) for result, found in medians if "eager" in found], ":", "gray"
    drawn[f"best baseline\n({names})"] = [(each, found[name]) for each, found, name in fastest], "-.", "gray"
    drawn["floor"] = [(result, result.floor_ms) for result in longest if result.floor_ms], "--", "black"
    for label, (points, style, colour) in drawn.items():
        if points:
            look = {"linestyle": style, "color": colour, "marker": "o" if style == "-" else ".", "label": label}
            panel.plot(_places([result for result, _ in points], axis), [value for _, value in points], **look)
    _scale(panel, "median ms", "")
    if longest:
        panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the panel, where it covers no line


def _draw_ratios(panel, lines, axis):
    for number, line in enumerate(lines.values()):
        timed = sweep.measured(line)
        ratio, low, high = ([getattr(result.outcome, key) for result in timed] for key in ("ratio", "low", "high"))
        panel.plot(_places(timed, axis), ratio, marker="o", color=f"C{number}")
        panel.fill_between(_places(timed, axis), low, high, alpha=0.25, color=f"C{number}")
    panel.axhline(1.0, linestyle="--", color="black")
    _scale(panel, "speed-up over the best baseline", "x")


def _scale(panel, label, unit):
    from matplotlib.ticker import LogLocator

    panel.set(ylabel=label, yscale="log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}" + unit)
    panel.yaxis.set_minor_formatter("")
    panel.grid(alpha=0.3)
