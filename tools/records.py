"""What is kept of runs in results/: a line a result, and of others' solutions what may be kept.

    python -m tools.records results.json facts.json

writes the facts of a run over other people's solutions: no line of their text, which tracebacks quote.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from playground.report import document
from playground.report.suite import NOT_COMPILED, STANDARDS, is_correct
from playground.serial import DocumentError, dump

FACTS = ("ran_on", "precision", "variant_precision", "weights", "verdict", "source_sha256", "shape")
FACTS += ("accuracy", "time_ms", "baselines_ms", "speedup", "measured", "proved", "outer", "outcome", "control", "peak_mib")
FACTS += ("floor_ms",)
DIGITS = 4  # of a kept figure
ABOUT = ("date", "gpu", "driver", "cuda", "torch", "python", "cpu", "options", "complete")  # of the environment


def as_lines(value, digits):
    """Return the JSON of a dumped document with a line a result and figures of so many digits."""

    def brief(value):
        if isinstance(value, dict):
            return {key: brief(each) for key, each in value.items()}
        if isinstance(value, list):
            return [brief(each) for each in value]
        return float(f"{value:.{digits}g}") if isinstance(value, float) else value

    def line(value):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    value = brief(value)
    results = ",\n".join(map(line, value.pop("results")))
    return f'{line(value)[:-1]},"results":[\n{results}\n]}}\n'


def facts(report):
    """Return what may be kept of a run over other people's solutions: hashes, verdicts, figures, the judge's sentences."""
    environment = {key: getattr(report.environment, key) for key in ABOUT}
    results = []
    for result in report.results:
        pair, reason, known = dump(result.pair) or {}, result.reason, dump(result)
        if reason:  # an exception or a compiler's message may quote the solution
            own = reason.partition(":")[0], re.sub(f"({NOT_COMPILED}).*", r"\1", reason, flags=re.DOTALL)
            reason = own[result.verdict != "error"]
        standards = {standard: is_correct(result, standard) for standard in STANDARDS}
        caveats = [each.tag for each in result.caveats]
        names = {key: Path(pair[key]).name for key in ("problem", "solution") if pair.get(key)}
        kept = {key: known.get(key) for key in FACTS}
        found = {**pair, **names, **kept, "reason": reason, "standards": standards, "caveats": caveats}
        results.append({key: value for key, value in found.items() if value is not None or key == "outer"})
    return {"schema": report.schema, "environment": environment, "suite": dump(report.suite), "results": results}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tools.records", description="Keeps the facts of a run.")
    parser.add_argument("results", help="what compare.py --suite --json wrote")
    parser.add_argument("facts", help="the file for what may be kept of it")
    given = parser.parse_args(arguments)
    try:
        found = facts(document.read(given.results))
    except DocumentError as complaint:
        sys.exit(str(complaint))
    document.write_whole(given.facts, as_lines(found, DIGITS))


if __name__ == "__main__":
    main()
