"""The plot on README's first screen, made from the runs recorded in results/: docs/times-light.svg and docs/times-dark.svg.

    python -m playground.report.readme_plot            writes both
    python -m playground.report.readme_plot --check    exits 1 when they are not what this makes

Shown is the newest full-size run on a GPU; marked are variants whose files have changed since.
"""

import argparse
import sys

from playground.catalog import reading_order
from playground.report import page
from playground.report.document import DocumentError, date_of, write_whole
from playground.report.figures import (
    ROOT,
    baseline_medians,
    baseline_name,
    headline,
    machine,
    one_line,
    share_of_floor,
    with_unit,
)
from playground.report.marks_of_age import OTHER_HOST_CODE, OTHER_KERNELS, mark
from playground.report.readme_table import is_full_size, is_of_model, newest_runs, sources

COMMAND = "python -m playground.report.readme_plot"
FILES = {"light": "docs/times-light.svg", "dark": "docs/times-dark.svg"}
# Those of GitHub's pages; the background is the page's own.
NAMES = ("ink", "soft", "faint", "variant", "baseline", "floor")
COLOURS = {
    "light": dict(zip(NAMES, ("#1f2328", "#59636e", "#d1d9e0", "#0969da", "#59636e", "#bc4c00"), strict=True)),
    "dark": dict(zip(NAMES, ("#f0f6fc", "#9198a1", "#3d444d", "#4493f8", "#9198a1", "#f0883e"), strict=True)),
}
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
SHORT_MEANINGS = {OTHER_KERNELS: "before the file's last change", OTHER_HOST_CODE: "only the code around the kernels is newer"}
WIDTH, LEFT, BARS_END, TOP, BOTTOM = 820, 150, 480, 34, 40
HEAD, BETWEEN = 26, 12  # above and below a model's rows


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a plot is out of date")
    check = parser.parse_args(arguments).check
    try:
        if missing := page.missing():
            raise DocumentError(missing.replace("--html", "the plot"))
        made = {root / file: image(root, theme) for theme, file in FILES.items()}
        old = [file for file, text in made.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
        if check and old:
            print(f"{', '.join(file.name for file in old)}: out of date; run: {COMMAND}", file=sys.stderr)
        for file in [] if check else old:
            write_whole(file, made[file])
    except (OSError, DocumentError) as error:
        print(f"readme_plot: {error}", file=sys.stderr)
        return 2
    return int(check and bool(old))


def image(root, theme):
    """The text of an SVG file. Raises DocumentError where nothing was measured."""
    from playground.report.page import bars, svg

    run = max((document for _, document in newest_runs(root)), key=lambda each: date_of(each["environment"]), default=None)
    models = _models(root, run) if run else {}
    if not models:
        raise DocumentError("no run on a GPU is recorded in results/ whose sources are still the present ones")
    times = [bar.spread["median"] for rows, _ in models.values() for bar in rows]
    shortest = min(times + [floor for _, floor in models.values() if floor])
    scale = bars.Scale(shortest / 1.6, max(times), LEFT, BARS_END)
    inner = sum(HEAD + bars.ROW * len(rows) + BETWEEN for rows, _ in models.values())
    height = TOP + inner + BOTTOM
    title = f"Forward pass on {machine(run['environment'])}, {date_of(run['environment']).date().isoformat()}"
    with svg.style():
        figure = svg.figure(WIDTH, height)
        axes = figure.add_axes([0, BOTTOM / height, 1, inner / height])
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(inner, 0)
        axes.text(8, -16, title, fontsize=13, weight="bold")
        labels = "".join(bar.label for rows, _ in models.values() for bar in rows)
        remarks = [f"; {each} {meaning}" for each, meaning in SHORT_MEANINGS.items() if each in labels]
        _draw_ticks(axes, scale, inner, "".join(remarks))
        top = 0
        for model, (rows, floor) in models.items():
            _draw_model(axes, scale, top, model, rows, floor)
            top += HEAD + bars.ROW * len(rows) + BETWEEN
        names = {svg.NAMES[colour]: colour for colour in svg.NAMES}
        colours = {names[name]: colour for name, colour in COLOURS[theme].items()} | {svg.PAPER: "none"}
        words = " ".join(f"{model}: {bars.in_words(rows, floor)}" for model, (rows, floor) in models.items())
        size = {"width": str(WIDTH), "height": str(height), "font-family": FONTS}
        return svg.element(figure, "times", title, words, colours, **size) + "\n"


def _models(root, run):
    """{title: (bars, floor in ms)} of the models that were measured: eager, the fastest baseline, and the variants."""
    models = {}
    for model_file in sorted(sources(root / "models"), key=lambda file: reading_order(file.stem)):
        results = [result for result in _current(root, run, model_file) if result["time_ms"]]
        if results:
            inputs = ", ".join("×".join(map(str, each)) for each in results[0]["shape"]["inputs"] if isinstance(each, list))
            floor = next((result["floor_ms"] for result in results if result["floor_ms"]), None)
            files = {file.stem: file for file in sources(root / "kernels" / model_file.stem)}
            names = [result["variant"] + mark(result, files[result["variant"]]) for result in results]
            models[f"{model_file.stem}, {inputs}"] = (_bars(results, names), floor)
    return models


def _current(root, run, model_file):
    """The full-size results of the model as it is now, in reading order."""
    files = {file.stem: file for file in sources(root / "kernels" / model_file.stem)}
    of_model = [result for result in run["results"] if result["model"] == model_file.stem and is_full_size(result, root)]
    unchanged = [result for result in of_model if is_of_model(result, model_file)]
    known = [result for result in unchanged if result["variant"] in files]
    return sorted(known, key=lambda result: list(files).index(result["variant"]))


def _bars(results, names):
    """One for eager, one for the fastest baseline, one a variant, under `names`."""
    from playground.report.page import bars

    medians = baseline_medians(results)
    shown = dict.fromkeys(["eager", min(medians, key=medians.get)]) if medians else {}
    rows = [bars.Bar(one_line(baseline_name(name)), bars.BASELINE, _only(medians[name])) for name in shown if name in medians]
    for result, name in zip(results, names, strict=True):
        best, ratio = headline(result)
        over = f", {with_unit(ratio['ratio'], 'x')} over {baseline_name(best)}" if ratio else ""
        share = share_of_floor(result)
        of_floor = f", {with_unit(100 * share, '%')} of the floor" if share else ""
        rows.append(bars.Bar(name, bars.VARIANT, _only(result["time_ms"]["median"]), after=over + of_floor))
    return rows


def _only(median):
    return {"median": median, "p20": median, "p80": median}


def _draw_ticks(axes, scale, bottom, remark):
    from playground.report.page import svg

    for tick in scale.ticks(BARS_END + 40):
        axes.plot([scale(tick)] * 2, [0, bottom], color=svg.FAINT, linewidth=0.7, zorder=0)
        axes.text(scale(tick), bottom + 14, f"{tick:g}", ha="center", fontsize=11, color=svg.SOFT)
    text = f"milliseconds, logarithmic scale; dashed: the floor at measured ceilings{remark}"
    axes.text(LEFT, bottom + 30, text, fontsize=11, color=svg.SOFT)


def _draw_model(axes, scale, top, model, rows, floor):
    from playground.report.page import bars, svg

    heading = f"{model}; floor {with_unit(floor, ' ms')}" if floor else model
    axes.text(8, top + 16, heading, fontsize=12, color=svg.SOFT)
    for row, bar in enumerate(rows):
        bars.draw_bar(axes, scale, top + HEAD + bars.ROW * (row + 0.5), bar)
    if floor:
        ends = [top + HEAD - 5, top + HEAD + bars.ROW * len(rows) + 3]
        axes.plot([scale(floor)] * 2, ends, color=svg.FLOOR, linewidth=1.6, linestyle=(0, (4, 2.5)), zorder=4)


if __name__ == "__main__":
    sys.exit(main())
