"""The tables of results in README.md and on the models' pages in docs/, made from the runs recorded in results/.

    python -m playground.report.readme_table            rewrites them
    python -m playground.report.readme_table --check    exits 1 when one is not what this makes

README begins with the best of each model (below <!-- best:begin -->). Of each GPU the newest run counts that measured something
at the original's sizes. A figure is marked where the variant's file has changed since, but for its docstring (code_sha256;
source_sha256 in older runs), otherwise where its kernels have not (kernels_sha256), and not shown where the model's has
(model_sha256, where the run recorded it).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from playground.catalog import natural_order, reading_order, sha256
from playground.report.document import DocumentError, date_of, read, write_whole
from playground.report.figures import (
    GRAPH,
    ROOT,
    TRAINING,
    baseline_medians,
    baseline_name,
    changed_sizes,
    headline,
    machine,
    one_line,
    ordered_baselines,
    scientific,
    share_of_floor,
    significant,
    with_unit,
)
from playground.report.marks_of_age import OTHER_KERNELS, legend, mark

COMMAND = "python -m playground.report.readme_table"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
BEST_BEGIN, BEST_END = "<!-- best:begin -->", "<!-- best:end -->"
BEST_HEAD = ("model, forward pass", "eager, ms", "fastest PyTorch, ms", "best kernel here, ms", "speed-up", "of the floor")
HEAD = (
    *("", "median ms", "over eager", "over the best", "of the floor", "error (eager's)"),
    *(f"{title}: ms (over the best)" for title in TRAINING.values()),
)
PERMITTED = {"tf32": "TF32 permitted", "fp32": "strict fp32"}  # by PyTorch's settings, to the model's operators
LAUNCHES_SHOW = 0.05  # of a time: what a CUDA graph has to save to be mentioned


class ReadmeError(ValueError):
    """A page cannot hold the table."""


@dataclass(frozen=True)
class Page:
    """A file with a table; `models` are the names of those in it. A `short` one has two baselines and no training."""

    path: Path
    models: tuple
    short: bool = False

    @property
    def to_root(self):
        """What stands before a path from the project's folder to make it one from the page's."""
        return "../" * (len(self.path.parts) - 1)


def pages(root):
    """README.md with all models, and docs/ladder_<model>.md, where there is one, with its own."""
    models = [file.stem for file in sorted(sources(root / "models"), key=lambda file: reading_order(file.stem))]
    ladders = [Page(Path("docs") / f"ladder_{model}.md", (model,)) for model in models]
    return [Page(Path("README.md"), tuple(models), short=True), *(page for page in ladders if (root / page.path).exists())]


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(prog=COMMAND, description="Makes the pages' tables of results from results/*.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a page is out of date")
    check = parser.parse_args(arguments).check
    outdated = []
    try:
        for page in pages(root):
            file = root / page.path
            old = file.read_text(encoding="utf-8")
            new = with_table(old, table(root, page), page.path)
            if page.short:
                new = with_table(new, best(root, page), page.path, BEST_BEGIN, BEST_END)
            if old != new:
                outdated.append(page.path)
                if not check:
                    write_whole(file, new)
    except (OSError, DocumentError, ReadmeError) as error:
        print(f"readme_table: {error}", file=sys.stderr)
        return 2
    for path in outdated if check else ():
        print(f"{path}'s table of results is out of date; run: {COMMAND}", file=sys.stderr)
    return int(check and bool(outdated))


def with_table(text, block, path="README.md", begin=BEGIN, end=END):
    """The text of a page with `block` between its markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ReadmeError(f"{path} must contain {begin} and, below it, {end}, once each")
    return text[: text.index(begin) + len(begin)] + f"\n{block}\n" + text[text.index(end) :]


def table(root, page):
    """The text between the markers of a page."""
    runs = newest_runs(root)
    if not runs:
        return "Nothing has been measured on a GPU yet."
    return "\n\n".join(_run(root, page, path, document) for path, document in runs)


def best(root, page):
    """The text between README's first markers: of each GPU and model the fastest kernel beside PyTorch."""
    tables = []
    for _, document in newest_runs(root):
        rows = [BEST_HEAD, ("---", *("--:" for _ in BEST_HEAD[1:]))]
        for model in page.models:
            timed = [result for result in document["results"] if result["model"] == model and _counts(root, result)]
            if timed:
                fastest = min(timed, key=lambda result: result["time_ms"]["median"])
                rows.append(_best_row(root, page, fastest, baseline_medians(timed)))
        text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        tables.append(f"{text}\n\n{_caption(document)}{legend(text)} [All results](#results)")
    return "\n\n".join(tables) or "Nothing has been measured on a GPU yet."


def _caption(document):
    day = date_of(document["environment"]).date().isoformat()
    return (
        f"{cell(machine(document['environment']))}, {day}, at each model's own size. *Speed-up* is over the fastest of "
        f"{_names_of_baselines(document)}: the median over paired rounds, which need not equal the quotient of the times "
        "shown. *Of the floor*: 100% is as fast as the GPU's measured memory bandwidth and arithmetic rate allow."
    )


def _names_of_baselines(document):
    """'eager, channels_last and torch.compile': those timed in the run, of which those with strict fp32 are not named."""
    timed = {name for result in document["results"] for name in result["baselines_ms"] or () if not name.endswith("_fp32")}
    names = [cell(baseline_name(name)) for name in ordered_baselines(timed)]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "no baseline"


def _counts(root, result):
    """Whether it was timed at full size, in no lower precision than the original's, with these kernels and this model."""
    source = root / "kernels" / result["model"] / f"{result['variant']}.py"
    timed = result["verdict"] == "pass" and result["time_ms"] is not None and not result.get("variant_precision")
    current = (
        source.exists()
        and OTHER_KERNELS not in mark(result, source)
        and is_of_model(result, root / "models" / f"{result['model']}.py")
    )
    return timed and current and is_full_size(result, root)


def _best_row(root, page, result, forward):
    """`forward` are the baselines' times, as in the tables of all variants."""
    fastest, ratio = headline(result)
    share = share_of_floor(result)
    source = f"kernels/{result['model']}/{result['variant']}.py"
    link = f"[`{result['variant']}`]({page.to_root}{source}){mark(result, root / source)}"
    return (
        cell(result["model"]),
        significant(forward.get("eager")),
        f"{significant(forward[fastest])} ({cell(baseline_name(fastest))})" if fastest else "",
        f"**{significant(result['time_ms']['median'])}**{_in_a_graph(result)} ({link})",
        f"**{with_unit(ratio['ratio'], 'x')}**" if ratio else "",
        with_unit(100 * share, "%") if share else "",
    )


def _in_a_graph(result):
    """', in a CUDA graph 0.199' where launches took a share of the time that shows."""
    graphed = result.get("graphed") or {}
    if "time_ms" not in graphed or graphed["time_ms"]["median"] > (1 - LAUNCHES_SHOW) * result["time_ms"]["median"]:
        return ""
    return f", in a CUDA graph {significant(graphed['time_ms']['median'])}"


def newest_runs(root):
    """(path, document) of the newest full-size run of each GPU, by the GPU's name."""
    runs = {}
    for path in sorted((root / "results").glob("*.json")):
        document = read(path)
        environment = document["environment"]
        if not environment.get("gpu") or not any(is_full_size(result, root) for result in document["results"]):
            continue
        newest = runs.get(environment["gpu"])
        if newest is None or date_of(environment) >= date_of(newest[1]["environment"]):
            runs[environment["gpu"]] = (path, document)
    return [runs[gpu] for gpu in sorted(runs)]


def is_full_size(result, root):
    return result["ran_on"] == "cuda" and not changed_sizes(result, root)


def _run(root, page, path, document):
    parts = []
    for model in page.models:
        of_model = [result for result in document["results"] if result["model"] == model]
        full_size = {result["variant"]: result for result in of_model if is_full_size(result, root)}
        parts.append(_model(root, page, root / "models" / f"{model}.py", full_size))
    day = date_of(document["environment"]).date().isoformat()
    earlier = document["environment"].get("joined")  # a remark on which results of the record are from other runs
    day += f" ({cell(earlier)})" if earlier else ""
    parts.append(
        f"Measured on {cell(machine(document['environment']))}, {day}; recorded in `results/{path.name}`. 'The best' is the "
        "fastest baseline. Where TF32 is permitted, as PyTorch permits it to convolutions by default, a kernel may still "
        "compute in full float32." + legend("\n".join(parts))
    )
    return "\n\n".join(parts)


def _model(root, page, model_file, results):
    model = model_file.stem
    inputs = next(filter(None, ((result.get("shape") or {}).get("inputs") for result in results.values())), [])
    sizes = ", ".join("x".join(map(str, each)) if isinstance(each, list) else str(each) for each in inputs)
    of_this_model = [result for result in results.values() if is_of_model(result, model_file)]
    rows = [HEAD, ("---", *("--:" for _ in HEAD[1:])), *_baseline_rows(of_this_model, page.short)]
    for source in sources(root / "kernels" / model):
        if not source.stem.startswith("cpu_"):
            result = results.get(source.stem)
            rows.append(_variant_row(page, source, result, result is None or result in of_this_model))
    permitted = {PERMITTED[result["precision"]] for result in of_this_model if result["precision"] in PERMITTED}
    title = ", ".join([f"**{model}**", *([f"input {cell(sizes)}"] if sizes else []), *sorted(permitted)])
    shown = len(HEAD) - len(TRAINING) if page.short else len(HEAD)
    return title + "\n\n" + "\n".join(f"| {' | '.join(row[:shown])} |" for row in rows)


def sources(folder):
    """The Python files of a folder in the order of their names, v10 behind v9."""
    files = (file for file in folder.glob("*.py") if not file.stem.startswith("_"))
    return sorted(files, key=lambda file: natural_order(file.stem))


def is_of_model(result, model_file):
    """Whether the model's file is still the one that was measured, as far as the run recorded it."""
    return result.get("model_sha256") in (None, sha256(model_file))


def _baseline_rows(results, short):
    """One row a baseline: the median of the medians that were taken beside each variant. `short`: eager and the fastest."""
    modes = {"forward": baseline_medians(results)}
    for mode in TRAINING:
        modes[mode] = baseline_medians([(result["training"] or {}).get(mode) or {} for result in results])
    forward = modes["forward"]
    shown = {"eager", min(forward, key=forward.get)} if short and forward else set(forward)
    for name in ordered_baselines(forward):
        if name not in shown:
            continue
        over_eager = with_unit(forward["eager"] / forward[name], "x") if "eager" in forward else ""
        training = [significant(modes[mode][name]) if name in modes[mode] else "" for mode in TRAINING]
        yield (cell(baseline_name(name)), significant(forward[name]), over_eager, "", "", "", *training)


def _variant_row(page, source, result, of_this_model):
    name = f"[`{source.stem}`]({page.to_root}kernels/{source.parent.name}/{source.name})"
    blank = ("",) * (len(HEAD) - 2)
    if result is None:
        return (name, "not measured yet", *blank)
    if not of_this_model:
        return (name, "not measured since the model changed", *blank)
    name += mark(result, source)
    if result["verdict"] != "pass":
        return (name, cell(f"{result['verdict']}: {result['reason']}"), *blank)
    if result["time_ms"] is None:
        return (name, "passed, not timed", *blank)
    if result.get("variant_precision"):
        name += f" ({cell(result['variant_precision'])})"
    check, speedup, share = result["check"], result["speedup"] or {}, share_of_floor(result)
    training = [_training_cell((result["training"] or {}).get(mode)) for mode in TRAINING]
    return (
        name,
        significant(result["time_ms"]["median"]),
        with_unit(speedup["eager"]["ratio"], "x") if "eager" in speedup else "",
        _over_best(result),
        with_unit(100 * share, "%") if share else "",
        f"{scientific(check['max_error'])} ({scientific(check['eager_error'])})",
        *training,
    )


def _over_best(result):
    best, ratio = headline(result)
    return f"{with_unit(ratio['ratio'], 'x')} ({cell(baseline_name(best))})" if best else ""


def _training_cell(timings):
    if not timings or not timings["time_ms"]:
        return ""
    _, ratio = headline(timings)
    over = f" ({with_unit(ratio['ratio'], 'x')})" if ratio else ""
    graphed = _training_cell({"time_ms": None} | (timings.get("graphed") or {}))
    return significant(timings["time_ms"]["median"]) + over + (f"; {GRAPH} {graphed}" if graphed else "")


def cell(text):
    """One line of text that cannot end a table's cell, the comment marker or the table."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
