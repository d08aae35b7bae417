"""README's table of results, made from the runs recorded in results/.

    python -m playground.report.readme_table            rewrites README.md
    python -m playground.report.readme_table --check    exits 1 when README.md is not what this makes

Of each GPU the newest run counts that measured something at the original's sizes. A figure whose source has changed
since is not shown: the variant's file (source_sha256) or, where the run recorded its hash (model_sha256), the model's.
"""

import argparse
import hashlib
import re
import statistics
import sys

from playground.catalog import reading_order
from playground.report.document import DocumentError, date_of, read, write_whole
from playground.report.figures import (
    ROOT,
    TRAINING,
    baseline_name,
    best_baseline,
    changed_sizes,
    machine,
    one_line,
    ordered_baselines,
    scientific,
    share_of_floor,
    significant,
    with_unit,
)

COMMAND = "python -m playground.report.readme_table"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEAD = (
    *("", "precision", "median ms", "over eager", "over the best", "of the floor", "error (eager's)"),
    *(f"{title}: ms (over the best)" for title in TRAINING.values()),
)


class ReadmeError(ValueError):
    """README.md cannot hold the table."""


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(prog=COMMAND, description="Makes README.md's table of results from results/*.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README.md is out of date")
    check = parser.parse_args(arguments).check
    readme = root / "README.md"
    try:
        old = readme.read_text(encoding="utf-8")
        new = with_table(old, table(root))
    except (OSError, DocumentError, ReadmeError) as error:
        print(f"readme_table: {error}", file=sys.stderr)
        return 2
    if check:
        if old != new:
            print(f"README.md's table of results is out of date; run: {COMMAND}", file=sys.stderr)
        return int(old != new)
    if old != new:
        write_whole(readme, new)
    return 0


def with_table(readme, block):
    """`readme` with `block` between its markers."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ReadmeError(f"README.md must contain {BEGIN} and, below it, {END}, once each")
    return readme[: readme.index(BEGIN) + len(BEGIN)] + f"\n{block}\n" + readme[readme.index(END) :]


def table(root=ROOT):
    """The text between the markers."""
    runs = newest_runs(root)
    if not runs:
        return "Nothing has been measured on a GPU yet."
    return "\n\n".join(_run(root, path, document) for path, document in runs)


def newest_runs(root):
    """(path, document) of the newest full-size run of each GPU, by the GPU's name."""
    runs = {}
    for path in sorted((root / "results").glob("*.json")):
        document = read(path)
        environment = document["environment"]
        if not environment.get("gpu") or not any(_is_full_size(result, root) for result in document["results"]):
            continue
        newest = runs.get(environment["gpu"])
        if newest is None or date_of(environment) >= date_of(newest[1]["environment"]):
            runs[environment["gpu"]] = (path, document)
    return [runs[gpu] for gpu in sorted(runs)]


def _is_full_size(result, root):
    return result["ran_on"] == "cuda" and not changed_sizes(result, root)


def _run(root, path, document):
    parts = []
    for model_file in sorted(_sources(root / "models"), key=lambda file: reading_order(file.stem)):
        of_model = [result for result in document["results"] if result["model"] == model_file.stem]
        full_size = {result["variant"]: result for result in of_model if _is_full_size(result, root)}
        parts.append(_model(root, model_file, full_size))
    day = date_of(document["environment"]).date().isoformat()
    parts.append(
        f"Measured on {_cell(machine(document['environment']))}, {day}; recorded in `results/{path.name}`. 'The best' is the "
        "fastest baseline."
    )
    return "\n\n".join(parts)


def _model(root, model_file, results):
    model = model_file.stem
    inputs = next(filter(None, ((result.get("shape") or {}).get("inputs") for result in results.values())), [])
    sizes = ", ".join("x".join(map(str, each)) if isinstance(each, list) else str(each) for each in inputs)
    of_this_model = [result for result in results.values() if result.get("model_sha256") in (None, _sha256(model_file))]
    rows = [HEAD, ("---", *("--:" for _ in HEAD[1:])), *_baseline_rows(of_this_model)]
    for source in _sources(root / "kernels" / model):
        if not source.stem.startswith("cpu_"):
            result = results.get(source.stem)
            changed = result is not None and (result not in of_this_model or result["source_sha256"] != _sha256(source))
            rows.append(_variant_row(source, result, changed))
    title = f"**{model}**" + (f", input {_cell(sizes)}" if sizes else "")
    return title + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _sources(folder):
    """The Python files of a folder in the order of their names, v10 behind v9."""
    files = (file for file in folder.glob("*.py") if not file.stem.startswith("_"))
    return sorted(files, key=lambda file: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.stem)])


def _sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _baseline_rows(results):
    """One row a baseline: the median of the medians that were taken beside each variant."""
    modes = {"forward": _baseline_medians(results)}
    for mode in TRAINING:
        modes[mode] = _baseline_medians([(result["training"] or {}).get(mode) or {} for result in results])
    forward = modes["forward"]
    for name in ordered_baselines(forward):
        over_eager = with_unit(forward["eager"] / forward[name], "x") if "eager" in forward else ""
        training = [significant(modes[mode][name]) if name in modes[mode] else "" for mode in TRAINING]
        yield (_cell(baseline_name(name)), "", significant(forward[name]), over_eager, "", "", "", *training)


def _baseline_medians(timings):
    samples = {}
    for each in timings:
        for name, spread in (each.get("baselines_ms") or {}).items():
            if spread is not None:
                samples.setdefault(name, []).append(spread["median"])
    return {name: statistics.median(medians) for name, medians in samples.items()}


def _variant_row(source, result, changed):
    name = f"[`{source.stem}`](kernels/{source.parent.name}/{source.name})"
    blank = ("",) * (len(HEAD) - 3)
    if result is None:
        return (name, "", "not measured yet", *blank)
    if changed:
        return (name, "", "not measured since it changed", *blank)
    if result["verdict"] != "pass":
        return (name, "", _cell(f"{result['verdict']}: {result['reason']}"), *blank)
    if result["time_ms"] is None:
        return (name, "", "passed, not timed", *blank)
    check, speedup, share = result["check"], result["speedup"] or {}, share_of_floor(result)
    training = [_training_cell((result["training"] or {}).get(mode)) for mode in TRAINING]
    return (
        name,
        _cell(result.get("precision") or ""),
        significant(result["time_ms"]["median"]),
        with_unit(speedup["eager"]["ratio"], "x") if "eager" in speedup else "",
        _over_best(speedup),
        with_unit(100 * share, "%") if share else "",
        f"{scientific(check['max_error'])} ({scientific(check['eager_error'])})",
        *training,
    )


def _over_best(speedup):
    best = best_baseline(speedup)
    return f"{with_unit(speedup[best]['ratio'], 'x')} ({_cell(baseline_name(best))})" if best else ""


def _training_cell(timings):
    if not timings or not timings["time_ms"]:
        return ""
    best = best_baseline(timings["speedup"])
    over = f" ({with_unit(timings['speedup'][best]['ratio'], 'x')})" if best else ""
    return significant(timings["time_ms"]["median"]) + over


def _cell(text):
    """One line of text that cannot end a table's cell, the comment marker or the table."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
