"""README's figures of runs on several GPUs, made from what is recorded in results/many_gpus/.

    python -m playground.report.many_gpus                    rewrites them
    python -m playground.report.many_gpus --check            exits 1 when they are not what this makes
    python -m playground.report.many_gpus --keep FILE ...    records these runs before

Runs to keep are what playground.data_parallel --time --json has written, and what run_all.py or compare.py has, of which the
time that the whole run took is kept, with what was measured and by which rank. A figure is marked where the variant's file has
changed since, but for its docstring, and not shown where the model's has.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from playground.catalog import reading_order
from playground.data_parallel import KIND as TRAINED
from playground.data_parallel import WAYS
from playground.report.document import DocumentError, date_of, read, write_whole
from playground.report.figures import ROOT, machine, one_line, significant, with_unit
from playground.report.marks_of_age import heaviest, legend, mark
from playground.report.readme_table import ReadmeError, cell, is_of_model, sources, with_table

COMMAND = "python -m playground.report.many_gpus"
BEGIN, END = "<!-- many GPUs:begin -->", "<!-- many GPUs:end -->"
FOLDER = Path("results") / "many_gpus"
SHARED = "shared"  # the kind of a record of ranks that share the work; TRAINED is that of DistributedDataParallel
KEPT = ("model", "variant", "ran_on", "verdict", "source_sha256", "code_sha256", "kernels_sha256", "model_sha256", "device")
HEAD = ("trained with", "GPUs", "samples per GPU", "step ms", "samples/s", "efficiency")


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(prog=COMMAND, description="Makes README's figures of runs on several GPUs.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README is out of date")
    parser.add_argument("--keep", nargs="+", default=[], metavar="FILE", type=Path, help="JSON files of runs to record before")
    given = parser.parse_args(arguments)
    if given.check and given.keep:
        parser.error("--check changes nothing: leave out --keep")
    readme = root / "README.md"
    try:
        for record in [condensed(file) for file in given.keep]:
            write_whole(root / FOLDER / _file_name(record), json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        old = readme.read_text(encoding="utf-8")
        new = with_table(old, section(root), "README.md", BEGIN, END)
    except (OSError, DocumentError, ReadmeError) as error:
        print(f"many_gpus: {error}", file=sys.stderr)
        return 2
    if old == new:
        return 0
    if given.check:
        print(f"README.md's figures of several GPUs are out of date; run: {COMMAND}", file=sys.stderr)
        return 1
    write_whole(readme, new)
    return 0


def condensed(file):
    """The record of a run: all that playground.data_parallel has written; of a run that was shared what KEPT names."""
    record = _read(file)
    if not (record.get("environment") or {}).get("gpu"):
        raise DocumentError(f"{file}: measured on no GPU")
    if record.get("kind") == TRAINED:
        if not any(row["step_ms"] for row in record["results"]):
            raise DocumentError(f"{file}: nothing was timed; run it with --time")
        return record
    found = read(file)
    environment = found["environment"]
    if not environment.get("complete") or environment.get("lost_ranks") or "seconds" not in environment:
        raise DocumentError(f"{file}: only a whole run that lost no rank and was not resumed says how long the work takes")
    ranks = len(environment.get("ranks") or [None])
    results = [
        {**{key: row.get(key) for key in KEPT}, "settings": (row["shape"] or {}).get("settings", {})}
        for row in found["results"]
    ]
    return {"kind": SHARED, "ranks": ranks, "device": environment["gpu"], "environment": environment, "results": results}


def _file_name(record):
    """One file a device, a number of ranks, and a kind of work: what is recorded again replaces what was."""
    device = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    work = ""
    if record["kind"] == SHARED:
        work = "-sweep" if _work(record["results"])[2] else "-run"
    return f"{device}-x{record['ranks']}{work}.json"


def _read(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DocumentError(f"{path}: not JSON: {error}") from error


def section(root):
    """The text between the markers."""
    records = [_read(path) for path in sorted((root / FOLDER).glob("*.json"))]
    if not records:
        return "Nothing has been measured on several GPUs yet."
    return "\n\n".join(_of_device(root, records, device) for device in sorted({record["device"] for record in records}))


def _of_device(root, records, device):
    of_device = sorted((record for record in records if record["device"] == device), key=lambda record: record["ranks"])
    trained = [_current(root, record) for record in of_device if record["kind"] == TRAINED and record["ranks"] > 1]
    shared = [_current(root, record) for record in of_device if record["kind"] == SHARED and _is_whole(root, record)]
    parts = [*_shared(root, shared), *_trained(root, trained)]
    newest = max((record["environment"] for record in of_device), key=date_of)
    marks = legend("\n".join(parts))
    day = date_of(newest).date().isoformat()
    parts.append(f"Measured on {cell(machine(newest))}, {day}; recorded in `{FOLDER.as_posix()}/`.{marks}")
    return "\n\n".join(parts)


def _current(root, record):
    """With those rows whose variant and model there still are, in the order of README."""
    rows = [row for row in record["results"] if _source(root, row).is_file() and _is_of_model(root, row)]
    names = {model: [file.stem for file in sources(root / "kernels" / model)] for model in {row["model"] for row in rows}}
    order = sorted(rows, key=lambda row: (reading_order(row["model"]), names[row["model"]].index(row["variant"])))
    return {**record, "results": order}


def _is_whole(root, record):
    """Whether all that was measured is still there: the time of a run says nothing once a part of it is gone."""
    return len(_current(root, record)["results"]) == len(record["results"])


def _source(root, row):
    return root / "kernels" / row["model"] / f"{row['variant']}.py"


def _is_of_model(root, row):
    model = root / "models" / f"{row['model']}.py"
    return model.is_file() and is_of_model(row, model)


# ---- ranks that share the work


def _shared(root, records):
    """A sentence on each piece of work that was recorded."""
    works = {}
    for record in records:
        works.setdefault(_work(record["results"]), []).append(record)
    for (models, results, swept), same in works.items():
        times = [f"{significant(record['environment']['seconds'])} s on {_gpus(record['ranks'])}" for record in same]
        over = f" over {' and '.join(swept)}" if swept else ""
        what = f"{'A sweep' if swept else 'A run'} of {_listed(models)}{over} ({_counted(results, 'measurement')})"
        marks = [mark(row, _source(root, row)) for record in same for row in record["results"]]
        yield f"{what} took {', '.join(times)}{heaviest(marks)}."


def _work(rows):
    """(models, number of results, what was swept) of a run, to be compared with those of another.

    Swept is what one and the same variant was measured at several values of; CPU and GPU have sizes of their own.
    """
    swept = []
    for name in sorted({name for row in rows for name in row["settings"]}):
        values = {}
        for row in rows:
            values.setdefault((row["model"], row["variant"]), set()).add(json.dumps(row["settings"].get(name)))
        most = max(map(len, values.values()))
        swept += [f"{most} values of {name}"] if most > 1 else []
    return tuple(dict.fromkeys(cell(row["model"]) for row in rows)), len(rows), tuple(swept)


def _gpus(count):
    return _counted(count, "GPU")


def _counted(count, what):
    return f"{count} {what}{'' if count == 1 else 's'}"


# ---- training under DistributedDataParallel


def _trained(root, records):
    """A table of each model's last variant, and a sentence on the gradients of all."""
    timed = [(record["ranks"], row) for record in records for row in record["results"] if row["step_ms"]]
    if not timed:
        return
    last = {row["model"]: row["variant"] for _, row in timed}
    rows = [HEAD, ("---", *("--:" for _ in HEAD[1:]))]
    for model, variant in last.items():
        own = [(ranks, row) for ranks, row in timed if (row["model"], row["variant"]) == (model, variant)]
        rows += _scaling(root, own, "")
        rows += _scaling(root, [(ranks, row | row["graphed"]) for ranks, row in own if row.get("graphed")], ", in a CUDA graph")
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)
    yield _explained(root, records)


def _scaling(root, timed, how):
    """The rows of one variant, that of a GPU alone before the others. `timed` are (ranks, row of the record)."""
    if not timed:
        return []
    first = timed[0][1]
    alone = {**first, "step_ms": first["alone_ms"], "samples_per_second": 1e3 * first["samples"] / first["alone_ms"]}
    return [_row(root, ranks, row, how) for ranks, row in [(1, alone | {"efficiency": None}), *timed]]


def _row(root, ranks, row, how):
    return (
        f"{row['model']} [`{row['variant']}`]({_source(root, row).relative_to(root).as_posix()}){how}{_mark(root, row)}",
        str(ranks),
        str(row["samples"]),
        significant(row["step_ms"]),
        significant(row["samples_per_second"]),
        with_unit(100 * row["efficiency"], "%") if row["efficiency"] else "",
    )


def _mark(root, row):
    return mark(row, _source(root, row))


def _explained(root, records):
    rows = [(record["ranks"], row) for record in records for row in record["results"] if row["verdict"] != "skipped"]
    right = [(ranks, row) for ranks, row in rows if _passed(row)]
    others = {"fail": [], "error": []}
    for ranks, row in rows:
        if not _passed(row):
            others[row["verdict"]].append(f"{_name(row)} on {_gpus(ranks)}{_mark(root, row)}: {one_line(row['reason'])}")
    sentences = [
        "Every GPU has the model's whole batch. A step is forward, backward and the exchange of gradients. Efficiency is the "
        "time of a step on one GPU by itself divided by that on all GPUs together."
    ]
    if right:
        worst = max(share for _, row in right for share in row["errors"].values())
        variants = {}
        for ranks, row in right:
            variants.setdefault(ranks, set()).add(_name(row))
        ways = [way for way in WAYS if all(way in row["errors"] for _, row in right)]
        counts = " and ".join(f"of {_counted(len(names), 'variant')} on {_gpus(ranks)}" for ranks, names in variants.items())
        sentences.append(
            f"The gradients {counts} agreed with those of one process, under DistributedDataParallel {_listed(ways)}; the "
            f"largest difference was {with_unit(100 * worst, '%')} of what is allowed."
        )
    for what, those in zip(("Gradients were wrong", "Could not be run"), others.values(), strict=True):
        if those:
            sentences.append(f"{what}: {cell('; '.join(those))}.")
    return " ".join(sentences)


def _name(row):
    return f"{row['variant']} of {row['model']}"


def _passed(row):
    return row["verdict"] == "pass"


def _listed(words):
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


if __name__ == "__main__":
    sys.exit(main())
