"""The plot on README's first screen: the forward times of every variant, beside eager PyTorch and its fastest baseline."""

from playground.report.figures import (
    baseline_medians,
    baseline_name,
    fastest_baseline,
    headline,
    one_line,
    share_of_floor,
    with_unit,
)

FILES = {"light": "docs/times-light.svg", "dark": "docs/times-dark.svg"}
# Those of GitHub's pages; the background is the page's own.
NAMES = ("ink", "soft", "faint", "variant", "baseline", "floor")
COLOURS = {
    "light": dict(zip(NAMES, ("#1f2328", "#59636e", "#d1d9e0", "#0969da", "#59636e", "#bc4c00"), strict=True)),
    "dark": dict(zip(NAMES, ("#f0f6fc", "#9198a1", "#3d444d", "#4493f8", "#9198a1", "#f0883e"), strict=True)),
}
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
WIDTH, LEFT, BARS_END, TOP, BOTTOM = 820, 150, 480, 34, 40
HEAD, BETWEEN = 26, 12  # above and below a model's rows


def image(title, models, theme):
    """The text of an SVG file. `models` are {model: results that have times}; of none the image is its title alone."""
    from playground.report import bars
    from playground.report.page import svg  # matplotlib, which only who draws needs

    drawn = {_heading(model, results): (_bars(results), _floor(results)) for model, results in models.items()}
    inner = sum(HEAD + bars.ROW * len(rows) + BETWEEN for rows, _ in drawn.values()) or 1
    height = TOP + inner + BOTTOM
    with svg.style():
        figure = svg.figure(WIDTH, height)
        axes = figure.add_axes([0, BOTTOM / height, 1, inner / height])
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(inner, 0)
        axes.text(8, -16, title, fontsize=13, weight="bold")
        if drawn:
            _draw(axes, drawn, inner)
        names = {svg.NAMES[colour]: colour for colour in svg.NAMES}
        colours = {names[name]: colour for name, colour in COLOURS[theme].items()} | {svg.PAPER: "none"}
        words = " ".join(f"{heading}: {bars.in_words(rows, floor)}" for heading, (rows, floor) in drawn.items())
        size = {"width": str(WIDTH), "height": str(height), "font-family": FONTS}
        return svg.element(figure, "times", title, words, colours, **size) + "\n"


def _heading(model, results):
    inputs = ", ".join("×".join(map(str, each)) for each in results[0]["shape"]["inputs"] if isinstance(each, list))
    return f"{model}, {inputs}"


def _floor(results):
    return next((result["floor_ms"] for result in results if result["floor_ms"]), None)


def _bars(results):
    """One for eager, one for the fastest baseline, one a variant."""
    from playground.report import bars

    medians = baseline_medians(results)
    shown = dict.fromkeys(["eager", fastest_baseline(medians)])
    rows = [bars.Bar(one_line(baseline_name(name)), bars.BASELINE, medians[name]) for name in shown if name in medians]
    for result in results:
        best, ratio = headline(result)
        over = f", {with_unit(ratio['ratio'], 'x')} over {baseline_name(best)}" if ratio else ""
        share = share_of_floor(result)
        of_floor = f", {with_unit(100 * share, '%')} of the floor" if share else ""
        rows.append(bars.Bar(result["variant"], bars.VARIANT, result["time_ms"]["median"], after=over + of_floor))
    return rows


def _draw(axes, models, bottom):
    """The ticks, then model below model. `models` are {heading: (bars, floor in ms or None)}."""
    from playground.report import bars
    from playground.report.page import svg

    times = [bar.median for rows, _ in models.values() for bar in rows]
    scale = bars.Scale(min(times + [floor for _, floor in models.values() if floor]) / 1.6, max(times), LEFT, BARS_END)
    for tick in scale.ticks(BARS_END + 40):
        axes.plot([scale(tick)] * 2, [0, bottom], color=svg.FAINT, linewidth=0.7, zorder=0)
        axes.text(scale(tick), bottom + 14, f"{tick:g}", ha="center", fontsize=11, color=svg.SOFT)
    text = "milliseconds, logarithmic scale; dashed: the floor at measured ceilings"
    axes.text(LEFT, bottom + 30, text, fontsize=11, color=svg.SOFT)
    top = 0
    for heading, (rows, floor) in models.items():
        text = f"{heading}; floor {with_unit(floor, ' ms')}" if floor else heading
        axes.text(8, top + 16, text, fontsize=12, color=svg.SOFT)
        for row, bar in enumerate(rows):
            bars.draw_bar(axes, scale, top + HEAD + bars.ROW * (row + 0.5), bar)
        if floor:
            ends = [top + HEAD - 5, top + HEAD + bars.ROW * len(rows) + 3]
            axes.plot([scale(floor)] * 2, ends, color=svg.FLOOR, linewidth=1.6, linestyle=(0, (4, 2.5)), zorder=4)
        top += HEAD + bars.ROW * len(rows) + BETWEEN
