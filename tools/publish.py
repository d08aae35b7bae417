"""What results/ says, where people read it: README's plot (docs/times-*.svg) and tables, those of docs/ladder_*.md and
docs/published_solutions.md, and the drawings docs/pictures/*.svg; results/*.json itself with a line a result.

    python -m tools.publish            writes them
    python -m tools.publish --check    writes nothing; exits 1 when one of them is out of date

Of each GPU, and of fp16 and bf16 there, the newest run counts that measured something at the originals' sizes. No figure of a
stale result is shown.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from playground.catalog import ROOT, ladder_order, reading_order
from playground.record import NOT_TIMED, Result
from playground.report import drawing, figures, page, speed_bars
from playground.report.document import is_stale, read, write_whole
from playground.report.text import NOTHING, grouped, significant, with_unit
from playground.run_record import Environment, load_document
from playground.serial import DocumentError, dump
from playground.subject import HALF
from tools import memories, published
from tools.markdown import markdown_cell, markdown_table
from tools.records import as_lines

COMMAND = "python -m tools.publish"
README, SOLUTIONS, PICTURES = Path("README.md"), Path("docs/published_solutions.md"), Path("docs/pictures")
PLOTS = {Path("docs/times-light.svg"): drawing.LIGHT, Path("docs/times-dark.svg"): drawing.DARK}
DIGITS = 5  # of a recorded figure
OTHERS = "_fp32", "_fp16"  # the ends of the names of baselines that are no headline's
LAUNCHES_SHOW = 0.05  # of a time: what a CUDA graph has to save to be mentioned
BEST_HEAD = (
    *("model, forward pass", "eager, ms", "fastest PyTorch, ms", "best kernel here, ms"),
    *("speed-up", "of the floor", "on"),
)
HEAD = (
    *("", "median ms", "over eager", "over the best", "of the floor", "max error (PyTorch's)"),
    *(f"{title}: ms (over the best)" for title in figures.TRAINING.values()),
)
OTHER_KERNELS = {  # those that are not the variant's, by a part of their names
    "implicit_gemm": "cuDNN: convolution",
    "nchwToNhwc": "cuDNN: to channels last",
    "nhwcToNchw": "cuDNN: back from it",
    "max_pool3d": "PyTorch: max pool",
    "FillFunctor": "PyTorch: fill",
    "elementwise_kernel": "PyTorch: elementwise",
}
OUTSIDE, LEAST_SHARE = "outside the profiled kernels", 0.02  # what these leave of the measured time; of it, to be told
WIDTH, LINE = 400, 16  # units: of the plot, which is read on a phone of 390 pixels, too; from one line of text to the next
BELOW = (
    "speed, on a linear scale from 0: twice as long is twice as fast",
    "dashed: the floor, the roofline's bound; speed-up: over PyTorch's fastest",
)
LONGEST_REASON = 100  # characters of a cell
KERNELS_HEAD = ("step", "where its time goes, by PyTorch's profiler")
PERMITTED = {"tf32": "TF32 permitted", "fp32": "strict fp32"}  # by PyTorch's settings, to the model's operators
PICTURE = (
    '<picture><source media="(prefers-color-scheme: dark)" srcset="docs/times-dark.svg"><img alt="Speed of every variant\'s '
    'forward pass as bars beside eager PyTorch and its fastest baseline, up to the floor" src="docs/times-light.svg"></picture>'
)
NOTHING_MEASURED = "No kernel has been measured on a GPU in its present form yet."


@dataclass(frozen=True, eq=False)
class Run:
    """A run's results at the originals' sizes: {(model, variant): result} of those that are current, the keys of the others.

    `half` is "fp16" or "bf16" where models and inputs were converted to it, else "".
    """

    name: str
    half: str
    environment: Environment
    current: dict[tuple[str, str], Result]
    stale: set[tuple[str, str]]

    @property
    def title(self):
        return f"{figures.machine(self.environment)}, {self.environment.moment.date().isoformat()}"

    def of(self, model):
        """Return the results of a model that are current, in reading order."""
        keys = sorted((key for key in self.current if key[0] == model), key=lambda key: ladder_order(key[1]))
        return [self.current[key] for key in keys]


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(prog=COMMAND, description="Makes README's and the ladders' tables and plots of results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a page or a plot is out of date")
    check = parser.parse_args(arguments).check
    try:
        if missing := page.missing():
            raise DocumentError(missing.replace("--html", "the plot"))
        made = {root / path: text for path, text in files(root)}
        outdated = [file for file, text in made.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
        for file in [] if check else outdated:
            write_whole(file, made[file])
    except (OSError, DocumentError) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    if check and outdated:
        names = ", ".join(str(file.relative_to(root)) for file in outdated)
        print(f"out of date: {names}; run: {COMMAND}", file=sys.stderr)
    return int(check and bool(outdated))


def files(root):
    """Yield (path from `root`, text) of every file that this command keeps."""
    runs = newest_runs(root)
    models = sorted((file.stem for file in (root / "models").glob("[!_]*.py")), key=reading_order)
    readme = _between(root, README, "best", best(runs, models))
    if solutions := published.read(root):
        readme = _between(root, README, "published", published.sentence(solutions), readme)
        yield SOLUTIONS, _between(root, SOLUTIONS, "published", published.table(solutions))
        yield PICTURES / "published_solutions.svg", published.image(solutions)
    yield README, readme
    for path in sorted((root / "results").glob("*.json")):
        yield path.relative_to(root), recorded(path)
    for model in models:
        ladder = Path("docs") / f"ladder_{model}.md"
        if (root / ladder).is_file():
            yield ladder, _between(root, ladder, "results", table(root, runs, ladder, model))
            for variant in (variant for of, variant in memories.PICTURES if of == model):
                yield PICTURES / f"{model}-{variant}.svg", memories.image(model, variant)
    newest = max((run for run in runs if not run.half), key=lambda run: run.environment.moment, default=None)
    title = f"Forward pass on {newest.title}" if newest else NOTHING_MEASURED
    timed = {model: [each for each in newest.of(model) if each.time_ms] for model in models if newest}
    for path, colours in PLOTS.items():
        yield path, speed_bars_of(title, {model: results for model, results in timed.items() if results}, colours)


def speed_bars_of(title, models, colours):
    """Return the text of an SVG file; `models` are {model: results that have times}. Of none the image is its title alone."""
    drawn = {}
    for model, results in models.items():
        shown = speed_bars.pictures([(result, None) for result in results], brief=True)
        drawn[f"{model}, {figures.inputs_text(results[0])}"] = shown[0]
    titles = textwrap.wrap(title, 52)
    top = LINE * len(titles) + 12
    bottom = top + sum(28 + picture.height for picture in drawn.values())
    with drawing.style():
        figure = drawing.figure(WIDTH, bottom + LINE * len(BELOW) * bool(drawn) + 4)
        axes = drawing.sheet(figure)
        for line, text in enumerate(titles, 1):
            axes.text(8, LINE * line + 2, text, fontsize=13, weight="bold")
        for heading, picture in drawn.items():
            axes.text(8, top + 16, heading, fontsize=12, color=drawing.SOFT)
            speed_bars.draw(axes, picture, top + 18, 8, 152, WIDTH - 8)
            top += 28 + picture.height
        for line, text in enumerate(BELOW if drawn else (), 1):
            axes.text(8, bottom + LINE * line - 4, text, fontsize=10, color=drawing.SOFT)
        words = " ".join(f"{heading}: {picture.words()}" for heading, picture in drawn.items())
        return drawing.svg(figure, "times", title, words or title, colours) + "\n"


def recorded(path):
    """Return the text of a recorded run in the form in which it is kept: without its timeline."""
    document = read(path)
    return as_lines(dump(replace(document, environment=replace(document.environment, timeline=None))), DIGITS)


def newest_runs(root):
    """Return the newest run of each GPU, and of fp16 and bf16 there, that has full-size results, by the GPU's name."""
    runs = {}
    for path in sorted((root / "results").glob("*.json")):
        document = load_document(json.loads(recorded(path)))
        environment, gpu = document.environment, document.environment.gpu
        full_size = [r for r in document.results if r.ran_on == "cuda" and not figures.size_note(r, root)]
        half = next((each.precision for each in full_size if each.precision in HALF), "")
        took = [each for each in full_size if not half or each.precision == half]  # other variants refuse 16 bits
        found = {(each.model, each.variant): each for each in took}
        key = gpu, ["", *HALF].index(half)
        if gpu and found and (key not in runs or environment.moment >= runs[key].environment.moment):
            stale = {name for name, each in found.items() if _is_stale(root, each)}
            current = {name: each for name, each in found.items() if name not in stale}
            runs[key] = Run(path.name, half, environment, current, stale)
    return [runs[key] for key in sorted(runs)]


def _is_stale(root, result):
    model, variant = result.model, result.variant
    return is_stale(result, root / "kernels" / model / f"{variant}.py", root / "models" / f"{model}.py")


def _between(root, path, name, block, text=None):
    """Return the text of a page with `block` between its markers of that name."""
    text = text or (root / path).read_text(encoding="utf-8")
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise DocumentError(f"{path} must contain {begin} and, below it, {end}, once each")
    return text[: text.index(begin) + len(begin)] + f"\n{block}\n" + text[text.index(end) :]


def best(runs, models):
    """Return the text between README's markers: the plot, and of each model and GPU the fastest kernel beside PyTorch."""
    rows = [(run, row) for model in models for run in runs if (row := _best_row(run.of(model)))]
    gpu = {run: run.environment.gpu for run, _ in rows}
    alike = grouped(gpu, lambda run: run.title.removeprefix(gpu[run]))  # but for the GPU
    titles = "; ".join(markdown_cell(" and ".join(dict.fromkeys(map(gpu.get, own))) + rest) for rest, own in alike.items())
    timed = {name for run in runs for result in run.current.values() for name in result.baselines_ms}
    names = figures.ordered_baselines(name for name in timed if not name.endswith(OTHERS))
    baselines = ", ".join(markdown_cell(figures.baseline_name(name)) for name in names) or "no baseline"
    caption = (
        f"At each model's own size. *Speed-up* is over the fastest of PyTorch's ways ({baselines}), taken in turns with it. "
        "*Of the floor*: 100% is as fast as the GPU's measured memory bandwidth and arithmetic rate allow."
    )
    table = markdown_table(BEST_HEAD, [(*row, gpu[run]) for run, row in rows])
    return "\n\n".join([PICTURE, f"{titles}:", table, caption]) if titles else NOTHING_MEASURED


def _best_row(results):
    as_precise = [each for each in results if each.time_ms and not each.variant_precision]
    if not as_precise:
        return None
    result = min(as_precise, key=lambda each: each.time_ms.median)
    texts, baselines, (fastest, _) = figures.texts(result), figures.baseline_medians(results), figures.headline(result)
    graphed = (result.in_a_graph or NOT_TIMED).median_ms or math.inf
    launches_show = graphed <= (1 - LAUNCHES_SHOW) * result.time_ms.median
    in_a_graph = f", in a CUDA graph {significant(graphed)}" * launches_show
    return (
        *(result.model + _in_half(result), significant(baselines.get("eager"))),
        f"{significant(baselines[fastest])} ({texts['over']})" if fastest else NOTHING,
        f"**{texts['median ms']}**{in_a_graph} ({_link(README, result.model, result.variant)})",
        *(f"**{texts['speed-up']}**" if fastest else NOTHING, texts["of floor"]),
    )


def _in_half(result):
    """Return ', fp16', with what is judged where the original's outputs in it say nothing; "" of other precisions."""
    is_wide = any(each.tag == "out-dtype" for each in result.caveats)
    return f", {result.precision}{' (float32 sum)' * is_wide}" if result.precision in HALF else ""


def table(root, runs, path, model):
    """Return the text between a ladder's markers: of each run every variant of the model beside the baselines."""
    shown = [run for run in runs if not run.half or run.of(model)]
    return "\n\n".join(_ladder(root, run, path, model) for run in shown) or NOTHING_MEASURED


def _ladder(root, run, path, model):
    results = run.of(model)
    inputs = next(filter(None, map(figures.inputs_text, results)), "")
    title = [f"**{markdown_cell(run.environment.gpu)}**", *[f"input {markdown_cell(inputs)}"] * bool(inputs)]
    title += sorted({PERMITTED[result.precision] for result in results if result.precision in PERMITTED})
    title += sorted({_in_half(result).removeprefix(", ") for result in results}) if run.half else []
    rows = list(_baseline_rows(results))
    for variant in sorted((file.stem for file in (root / "kernels" / model).glob("[!_]*.py")), key=ladder_order):
        result = run.current.get((model, variant))
        is_shown = not run.half or result or (model, variant) in run.stale
        if is_shown and not variant.startswith("cpu_"):
            own = ["stale"] if (model, variant) in run.stale else _figures(result)
            rows.append([_link(path, model, variant), *own])
    joined = run.environment.joined  # which results of the record are from other runs
    caption = (
        f"Measured on {markdown_cell(run.title)}{f' ({markdown_cell(joined)})' if joined else ''}; recorded in "
        f"`results/{run.name}`. 'The best' is the fastest baseline."
    )
    caption += " Stale: the file has changed since it was measured." * any(of == model for of, _ in run.stale)
    steps = [(_link(path, model, each.variant), *_kernels(each)) for each in results if each.time_ms]
    several = [step for step in steps if "%, " in "".join(step[1:])]
    kernels = f"\n\n{markdown_table(KERNELS_HEAD, several)}" if several and not run.half else ""
    head = HEAD[: -len(figures.TRAINING)] if run.half else HEAD
    return f"{', '.join(title)}\n\n{markdown_table(head, rows)}\n\n{caption}{kernels}"


def _kernels(result):
    """Yield 'own 50.0%, PyTorch: elementwise 30.0%, ...', the parts of the measured time, where they were recorded."""
    spent = {}
    for kernel in result.checked.work.kernels if result.checked.work else ():
        other = next((name for part, name in OTHER_KERNELS.items() if part in kernel.name), None)
        name = other or f"`{re.sub(r'^void |[<(].*', '', kernel.name)}`"
        spent[name] = spent.get(name, 0.0) + kernel.microseconds
    whole = max(sum(spent.values()), 1e3 * result.time_ms.median)  # the profiled pass may have taken longer
    if spent:
        shares = {name: part / whole for name, part in (spent | {OUTSIDE: whole - sum(spent.values())}).items()}
        yield ", ".join(f"{name} {with_unit(100 * share, '%')}" for name, share in shares.items() if share >= LEAST_SHARE)


def _baseline_rows(results):
    """One row a baseline: the median of the medians that were taken beside each variant."""
    forward = figures.baseline_medians(results)
    steps = [[(result.training or {}).get(mode) or NOT_TIMED for result in results] for mode in figures.TRAINING]
    for name in figures.ordered_baselines(forward):
        over_eager = with_unit(forward["eager"] / forward[name], "x") if "eager" in forward else NOTHING
        times = [significant(figures.baseline_medians(each).get(name)) for each in steps]
        yield (figures.baseline_name(name), significant(forward[name]), over_eager, *[NOTHING] * 3, *times)


def _figures(result):
    """Return the cells behind a variant's name; `result` is None where there is none."""
    if result is None or result.time_ms is None:
        why = result and textwrap.shorten(f"{result.verdict}: {result.reason}", LONGEST_REASON, placeholder=" ...")
        return ["not measured yet" if result is None else "passed, not timed" if result.verdict == "pass" else why]
    texts, precision, (best, ratio) = figures.texts(result), result.variant_precision, figures.headline(result)
    return [
        texts["median ms"] + (f" in {precision}" if precision else ""),
        with_unit(result.ratios["eager"].ratio if "eager" in result.ratios else None, "x"),
        f"{with_unit(ratio.ratio, 'x')} ({texts['over']})" if best else NOTHING,
        texts["of floor"],
        f"{texts['max error']} ({texts[figures.OF_PYTORCH]})",
        *(_training_cell((result.training or {}).get(mode)) for mode in figures.TRAINING),
    ]


def _training_cell(timings):
    if not timings or not timings.time_ms:
        return NOTHING
    _, ratio = figures.headline(timings)
    over = f" ({with_unit(ratio.ratio, 'x')})" if ratio else ""
    graphed = _training_cell(timings.in_a_graph)
    return significant(timings.time_ms.median) + over + (f"; {figures.GRAPH} {graphed}" if graphed != NOTHING else "")


def _link(path, model, variant):
    return f"[`{variant}`]({'../' * (len(path.parts) - 1)}kernels/{model}/{variant}.py)"


if __name__ == "__main__":
    sys.exit(main())
