"""What results/ says, where people read it: the tables of README.md, docs/ladder_*.md and docs/published_solutions.md, the plot
docs/times-*.svg, and the drawings docs/pictures/*.svg.

    python -m playground.report.publish            writes them
    python -m playground.report.publish --check    writes nothing; exits 1 when one of them is out of date

Of each GPU the newest run counts that measured something at the originals' sizes. A result is stale when the variant's file,
but for its docstring, or the model's is not the one that was measured. No figure of a stale result is shown: README and the
plot leave it out, and the ladders' tables name it.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from playground.catalog import natural_order, reading_order
from playground.report import drawing, figures, memories, page, published, speed_bars, time_parts
from playground.report.document import DocumentError, date_of, is_stale, read, write_whole
from playground.report.text import one_line, scientific, significant, with_unit

COMMAND = "python -m playground.report.publish"
README = Path("README.md")
RESULTS = "<!-- results:begin -->", "<!-- results:end -->"
BEST = "<!-- best:begin -->", "<!-- best:end -->"
PUBLISHED = "<!-- published:begin -->", "<!-- published:end -->"
PLOTS = {Path("docs/times-light.svg"): drawing.LIGHT, Path("docs/times-dark.svg"): drawing.DARK}
SOLUTIONS = Path("docs/published_solutions.md")
LIMITED = Path("results/shared_memory")  # runs of it as built for GPUs with less shared memory; "shared_limit_kb" says how much
OTHERS = "_fp32", "_fp16"  # the ends of the names of baselines that are no headline's
LAUNCHES_SHOW = 0.05  # of a time: what a CUDA graph has to save to be mentioned
BEST_HEAD = ("model, forward pass", "eager, ms", "fastest PyTorch, ms", "best kernel here, ms", "speed-up", "of the floor")
HEAD = (
    *("", "median ms", "over eager", "over the best", "of the floor", "max error (PyTorch's)"),
    *(f"{title}: ms (over the best)" for title in figures.TRAINING.values()),
)
PERMITTED = {"tf32": "TF32 permitted", "fp32": "strict fp32"}  # by PyTorch's settings, to the model's operators
NOTHING_MEASURED = "No kernel has been measured on a GPU in its present form yet."


class PublishError(ValueError):
    """A page cannot hold its table, or the plot cannot be drawn."""


@dataclass(frozen=True)
class Run:
    """A run's results at the originals' sizes, each {(model, variant): result}; `limited` are LIMITED's that are current."""

    path: Path
    environment: dict
    current: dict
    stale: dict
    limited: list

    def of(self, model):
        """Return {variant: result} of the results that are current, in reading order."""
        variants = {variant: result for (of, variant), result in self.current.items() if of == model}
        return {variant: variants[variant] for variant in sorted(variants, key=natural_order)}


def main(arguments=None, root=figures.ROOT):
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Makes README's and the ladders' tables and the plot from results/."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a page or a plot is out of date")
    check = parser.parse_args(arguments).check
    try:
        if missing := page.missing():
            raise PublishError(missing.replace("--html", "the plot"))
        made = {root / path: text for path, text in files(root)}
        outdated = [file for file, text in made.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
        for file in [] if check else outdated:
            write_whole(file, made[file])
    except (OSError, DocumentError, PublishError) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    if check and outdated:
        names = ", ".join(str(file.relative_to(root)) for file in outdated)
        print(f"out of date: {names}; run: {COMMAND}", file=sys.stderr)
    return int(check and bool(outdated))


def files(root):
    """Yield (path from `root`, text) of every file that this command keeps."""
    runs = newest_runs(root)
    models = sorted((file.stem for file in _python_files(root / "models")), key=reading_order)
    readme = _between((root / README).read_text(encoding="utf-8"), BEST, best(runs, models), README)
    if solutions := published.read(root):
        readme = _between(readme, PUBLISHED, published.sentence(solutions), README)
        text = (root / SOLUTIONS).read_text(encoding="utf-8")
        yield SOLUTIONS, _between(text, PUBLISHED, published.table(solutions), SOLUTIONS)
        yield Path("docs") / "pictures" / "published_solutions.svg", published.image(solutions)
    yield README, readme
    ladders = {model: path for model in models if (root / (path := Path("docs") / f"ladder_{model}.md")).is_file()}
    for model, path in ladders.items():
        text = (root / path).read_text(encoding="utf-8")
        yield path, _between(text, RESULTS, table(root, runs, path, model), path)
    newest = max(runs, key=lambda run: date_of(run.environment), default=None)
    timed = {model: [each for each in newest.of(model).values() if each["time_ms"]] for model in models} if newest else {}
    where = f"{figures.machine(newest.environment)}, {_day(newest)}" if newest else ""
    title = f"Forward pass on {where}" if newest else NOTHING_MEASURED
    for model in ladders:
        for name, text in [*memories.images(model), ("time", time_parts.image(model, timed.get(model, []), where))]:
            if text:
                yield Path("docs") / "pictures" / f"{model}-{name}.svg", text
    timed = {model: results for model, results in timed.items() if results}
    for path, colours in PLOTS.items():
        yield path, speed_bars.image(title, timed, colours)


def newest_runs(root):
    """Return the newest run of each GPU that has full-size results, by the GPU's name."""
    runs = {}
    for path in sorted((root / "results").glob("*.json")):
        document = read(path)
        environment, gpu = document["environment"], document["environment"].get("gpu")
        found = {(each["model"], each["variant"]): each for each in document["results"] if _is_full_size(each, root)}
        if gpu and found and (gpu not in runs or date_of(environment) >= date_of(runs[gpu].environment)):
            stale = {key: result for key, result in found.items() if is_stale(result, *_files_of(root, *key))}
            current = {key: found[key] for key in found if key not in stale}
            runs[gpu] = Run(path, environment, current, stale, _limited(root, gpu))
    return [runs[gpu] for gpu in sorted(runs)]


def _limited(root, gpu):
    documents = [read(path) for path in sorted((root / LIMITED).glob("*.json"))]
    results = [each for document in documents if document["environment"].get("gpu") == gpu for each in document["results"]]
    current = [each for each in results if not is_stale(each, *_files_of(root, each["model"], each["variant"]))]
    return sorted(current, key=lambda each: -each["shared_limit_kb"])


def _is_full_size(result, root):
    return result["ran_on"] == "cuda" and not figures.changed_sizes(result, root)


def _files_of(root, model, variant):
    return root / "kernels" / model / f"{variant}.py", root / "models" / f"{model}.py"


def _python_files(folder):
    """In the order of their names, v10 behind v9."""
    return sorted((file for file in folder.glob("[!_]*.py")), key=lambda file: natural_order(file.stem))


def _between(text, markers, block, path):
    """The text of a page with `block` between its markers."""
    begin, end = markers
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise PublishError(f"{path} must contain {begin} and, below it, {end}, once each")
    return text[: text.index(begin) + len(begin)] + f"\n{block}\n" + text[text.index(end) :]


def best(runs, models):
    """Return the text between README's markers: of each GPU and model the fastest kernel beside PyTorch."""
    tables = [(_best_rows(run, models), _best_caption(run)) for run in runs]
    return "\n\n".join(f"{_table(BEST_HEAD, rows)}\n\n{caption}" for rows, caption in tables if rows) or NOTHING_MEASURED


def _best_rows(run, models):
    rows = []
    for model in models:
        results = run.of(model).values()
        as_precise = [each for each in results if each["time_ms"] and not each.get("variant_precision")]
        if as_precise:
            result = min(as_precise, key=lambda each: each["time_ms"]["median"])
            rows.append(_best_row(model, result, figures.baseline_medians(results)))
    return rows


def _best_row(title, result, baselines):
    (fastest, ratio), share, median = figures.headline(result), figures.share_of_floor(result), result["time_ms"]["median"]
    graphed = (result.get("graphed") or {}).get("time_ms")
    # Where launches took a share of the time that shows.
    in_a_graph = graphed and graphed["median"] <= (1 - LAUNCHES_SHOW) * median
    return (
        cell(title),
        significant(baselines.get("eager")),
        f"{significant(baselines[fastest])} ({cell(figures.baseline_name(fastest))})" if fastest else "",
        f"**{significant(median)}**{', in a CUDA graph ' + significant(graphed['median']) if in_a_graph else ''} "
        f"({_link(README, result['model'], result['variant'])})",
        f"**{with_unit(ratio['ratio'], 'x')}**" if ratio else "",
        with_unit(100 * share, "%") if share else "",
    )


def _best_caption(run):
    if not run.current:
        return f"{cell(figures.machine(run.environment))}: no result is of a file in its present form. [All results](#results)"
    timed = {name for result in run.current.values() for name in result["baselines_ms"] or () if not name.endswith(OTHERS)}
    names = [cell(figures.baseline_name(name)) for name in figures.ordered_baselines(timed)]
    baselines = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "no baseline"
    return (
        f"{cell(figures.machine(run.environment))}, {_day(run)}, at each model's own size. *Speed-up* is over the fastest of "
        f"{baselines}, taken in turns with it. *Of the floor*: 100% is as fast as the GPU's measured memory bandwidth and "
        "arithmetic rate allow."
    )


def table(root, runs, path, model):
    """Return the text between a ladder's markers: of each GPU every variant of the model beside the baselines."""
    return "\n\n".join(f"{_rows(root, run, path, model)}\n\n{_caption(run, model)}" for run in runs) or NOTHING_MEASURED


def _caption(run, model):
    remark = run.environment.get("joined")  # on which results of the record are from other runs
    text = (
        f"Measured on {cell(figures.machine(run.environment))}, {_day(run)}{f' ({cell(remark)})' if remark else ''}; recorded "
        f"in `results/{run.path.name}`. 'The best' is the fastest baseline. Where TF32 is permitted, as PyTorch permits it to "
        "convolutions by default, a kernel may still compute in full float32."
    )
    if any(each["model"] == model for each in run.limited):
        text += f" Built for less shared memory than the GPU has: `{LIMITED}/`, short runs."
    return text + " Stale: the file has changed since it was measured." * any(of == model for of, _ in run.stale)


def _rows(root, run, path, model):
    results = run.of(model)
    inputs = next(filter(None, ((result.get("shape") or {}).get("inputs") for result in results.values())), [])
    sizes = ", ".join("x".join(map(str, each)) if isinstance(each, list) else str(each) for each in inputs)
    permitted = {PERMITTED[result["precision"]] for result in results.values() if result["precision"] in PERMITTED}
    title = ", ".join([f"**{model}**", *([f"input {cell(sizes)}"] if sizes else []), *sorted(permitted)])
    rows = [*_baseline_rows(results.values())]
    for file in _python_files(root / "kernels" / model):
        key = model, file.stem
        if not file.stem.startswith("cpu_"):
            figures = ["stale"] if key in run.stale else _figures(run.current.get(key))
            rows.append([_link(path, *key), *figures])
            limited = [each for each in run.limited if (each["model"], each["variant"]) == key]
            rows += [[f"... built for {each['shared_limit_kb']} KB", *_figures(each)] for each in limited]
    return f"{title}\n\n{_table(HEAD, rows)}"


def _baseline_rows(results):
    """One row a baseline: the median of the medians that were taken beside each variant."""
    forward = figures.baseline_medians(results)
    training = [
        figures.baseline_medians([(result["training"] or {}).get(mode) or {} for result in results])
        for mode in figures.TRAINING
    ]
    for name in figures.ordered_baselines(forward):
        over_eager = with_unit(forward["eager"] / forward[name], "x") if "eager" in forward else ""
        times = [significant(medians[name]) if name in medians else "" for medians in training]
        yield (cell(figures.baseline_name(name)), significant(forward[name]), over_eager, "", "", "", *times)


def _figures(result):
    """The cells behind a variant's name, as far as there is something to say; `result` is None where there is none."""
    if result is None:
        yield "not measured yet"
    elif result["verdict"] != "pass":
        yield cell(f"{result['verdict']}: {result['reason']}")
    elif result["time_ms"] is None:
        yield "passed, not timed"
    else:
        check, speedup, share = result["check"], result["speedup"] or {}, figures.share_of_floor(result)
        (best, ratio), precision = figures.headline(result), result.get("variant_precision")
        yield significant(result["time_ms"]["median"]) + (f" in {cell(precision)}" if precision else "")
        yield with_unit(speedup["eager"]["ratio"], "x") if "eager" in speedup else ""
        yield f"{with_unit(ratio['ratio'], 'x')} ({cell(figures.baseline_name(best))})" if best else ""
        yield with_unit(100 * share, "%") if share else ""
        yield f"{scientific(check['max_error'])} ({scientific(check['eager_error'])})"
        yield from (_training_cell((result["training"] or {}).get(mode)) for mode in figures.TRAINING)


def _training_cell(timings):
    if not timings or not timings.get("time_ms"):
        return ""
    _, ratio = figures.headline(timings)
    over = f" ({with_unit(ratio['ratio'], 'x')})" if ratio else ""
    graphed = _training_cell(timings.get("graphed"))
    return significant(timings["time_ms"]["median"]) + over + (f"; {figures.GRAPH} {graphed}" if graphed else "")


def _link(path, model, variant):
    return f"[`{variant}`]({'../' * (len(path.parts) - 1)}kernels/{model}/{variant}.py)"


def _day(run):
    return date_of(run.environment).date().isoformat()


def _table(head, rows):
    """Return a table of Markdown; a row that is too short ends with empty cells."""
    lines = [head, ("---", *("--:" for _ in head[1:])), *((*row, *[""] * len(head))[: len(head)] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text):
    """One line of text that cannot end a table's cell, the comment marker or the table."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
