"""Time, floor and speed-up over a swept constant, as a picture."""

from pathlib import Path

from playground import sweep
from playground.report.figures import baseline_medians, baseline_name, fastest_baseline, on_device
from playground.report.sweep_table import by_variant

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
    """A column of two panels for each model, device and combination of the other axes; the first axis runs to the right."""
    from matplotlib.figure import Figure

    axis = next(iter(axes))
    columns = _columns(report["results"], axes, axis)
    figure = Figure(figsize=(6.4 * len(columns), 7.2), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False, sharex="col")
    for (times, ratios), (title, lines) in zip(panels.T, columns.items(), strict=True):
        times.set_title(title)
        _draw_times(times, lines, axis)
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
    for (model, variant, device), own in by_variant(results).items():
        for others, line in sweep.lines_along(own, axes, axis):
            title = ", ".join([on_device(model, device), *(f"{name}={each}" for name, each in others.items())])
            columns.setdefault(title, {})[variant] = [result for result in line if result["time_ms"]]
    return columns


def _places(line, axis):
    found = [sweep.value(result["shape"]["settings"], axis) for result in line]
    return [each if isinstance(each, (int, float)) else str(each) for each in found]


def _draw_times(panel, lines, axis):
    for variant, line in lines.items():
        panel.plot(_places(line, axis), [result["time_ms"]["median"] for result in line], marker="o", label=variant)
    longest = max(lines.values(), key=len)
    of_pytorch = [(result, baseline_medians([result])) for result in longest]
    with_eager = [(result, medians["eager"]) for result, medians in of_pytorch if "eager" in medians]
    fastest = [(result, fastest_baseline(medians)) for result, medians in of_pytorch if fastest_baseline(medians)]
    names = ", ".join(dict.fromkeys(baseline_name(name) for _, name in fastest))
    with_best = [(result, baseline_medians([result])[name]) for result, name in fastest]
    for label, style, points in (("eager", ":", with_eager), (f"best baseline ({names})", "-.", with_best)):
        if points:
            places = _places([result for result, _ in points], axis)
            panel.plot(places, [median for _, median in points], linestyle=style, color="gray", marker=".", label=label)
    with_floor = [result for result in longest if result["floor_ms"]]
    values = [result["floor_ms"] for result in with_floor]
    panel.plot(_places(with_floor, axis), values, linestyle="--", color="black", label="floor")
    panel.set_yscale("log")
    panel.set_ylabel("median ms")
    panel.legend()
    panel.grid(alpha=0.3)


def _draw_ratios(panel, lines, axis):
    from matplotlib.ticker import LogLocator

    for variant, line in lines.items():
        timed = sweep.measured(line)
        places = _places(timed, axis)
        ratio, low, high = ([result["outcome"][key] for result in timed] for key in ("ratio", "low", "high"))
        (drawn,) = panel.plot(places, ratio, marker="o", label=variant)
        panel.fill_between(places, low, high, alpha=0.25, color=drawn.get_color())
    panel.axhline(1.0, linestyle="--", color="black")
    panel.set_ylabel("speed-up over the best baseline")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}x")
    panel.yaxis.set_minor_formatter("")
    panel.legend()
    panel.grid(alpha=0.3)
