"""What --lint finds in problem sets: a line for each problem, a table of what their tests let pass, and JSON."""

import collections
import json

from playground.report import document
from playground.report.layout import INDENT, fitted, print_folded, print_indented
from playground.report.text import one_line, significant

NOTHING = "nothing wrong that was tried"
WHAT = "a test lets pass, or a problem is"


def line(found):
    """Return what is to be known of one problem's test, in a line."""
    if found["error"]:
        return one_line(f"{found['problem']}: cannot be examined: {found['error']}")
    wrong, mutants = list(found["passes"]), found["mutants"]
    if mutants and mutants["passed"]:
        wrong.append(f"{len(mutants['passed'])} of {mutants['counted']} mutants ({', '.join(mutants['passed'])})")
    size = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    parts = [f"{found['problem']}: lets pass {', '.join(wrong) or NOTHING}", *found["notes"]]
    parts += [f"{mutants['untried']} mutants not tried: no time"] if mutants and mutants["untried"] else []
    return one_line("; ".join(parts) + (f" (at {size})" if size else ""))


def counts(problems):
    """Return {what is wrong with a test: number of problems}, the most frequent first."""
    found = collections.Counter()
    for each in problems:
        found.update(["cannot be examined"] if each["error"] else [])
        found.update(f"{name} passes" for name in each["passes"])
        found.update(name.partition(":")[0] if name.startswith("too small") else name for name in each["notes"])
        mutants = each["mutants"]
        found.update(["some mutant passes"] if mutants and mutants["passed"] else [])
        found.update(["an operator can be skipped"] if mutants and any("skipped" in name for name in mutants["passed"]) else [])
    return dict(found.most_common())


def show(problems, console):
    """Print the table at the end."""
    console.print()
    rows = [{WHAT: what, "problems": str(count)} for what, count in counts(problems).items()]
    clean = [each for each in problems if not each["error"] and not each["passes"] and not each["notes"]]
    clean = [each for each in clean if not (each["mutants"] and each["mutants"]["passed"])]
    rows.append({WHAT: "nothing found", "problems": str(len(clean))})
    print_indented(console, fitted(rows, console.width - INDENT, (WHAT,)))
    seconds = sum(each["seconds"] for each in problems)
    print_folded(console, f"{len(problems)} problems in {significant(seconds)} s", style="dim")


def write(problems, about, path):
    """Write {"lint": the problems, "counts", and what `about` says of the run} as JSON."""
    value = {"schema": 1, **about, "counts": counts(problems), "lint": problems}
    document.write_whole(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
