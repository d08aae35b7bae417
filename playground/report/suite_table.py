"""A suite on the terminal: a line a pair as soon as it is judged, then what all of them come to."""

import collections

from rich.text import Text

from playground.judge.accuracy import named as accuracy_named
from playground.report import against, document, suite
from playground.report.figures import (
    NOTHING,
    TIMED,
    baseline_name,
    label,
    one_line,
    significant,
    span,
    why_not_measured,
    with_unit,
)
from playground.report.layout import INDENT, print_folded, print_rows, verdict
from playground.report.terminal import View

RANKS = {"geom": "geometric mean", "mean": "mean", "last": "the last"}  # of the benchmarks, as the problem's file says
BY_SEED = "weights-by-seed"  # the caveat that explains a wrong output best
TITLES = {key: title for title, key in document.STANDARDS.items()}


class Pairs(View):
    """The view of a run over `count` pairs. `update` and `end` are called as those of terminal.Summary are."""

    def __init__(self, console, count):
        super().__init__(console)
        self._count = count

    def update(self, report):
        """Print what is new."""
        if report["results"]:
            self.print_machine(report)
        for result in report["results"]:
            key = result["model"], result["variant"], result["source_sha256"], str((result.get("shape") or {}).get("settings"))
            if key not in self._printed:
                self._printed.add(key)
                number = f"{len(self._printed):{len(str(self._count))}}/{self._count} "
                print_folded(self._console, Text(number).append_text(_line(result)), hanging=len(number))

    def end(self, report):
        self.update(report)
        self._console.print()
        show(report["suite"], self._console)
        against.show(report, self._console)


def _line(result):
    """'fail gelu/problem, gelu/wrong: what was wrong', or times, accuracy and caveats of what is right."""
    line = Text.assemble(verdict(result["verdict"]), " ", (one_line(named(result)), "bold"))
    parts = []
    over = {} if not result["time_ms"] else suite.speedups(result)
    if result["time_ms"]:
        parts.append(with_unit(result["time_ms"]["median"], " ms"))
        ratios = [f"{with_unit(over[name]['ratio'], 'x')} over {_baseline(name)}" for name in suite.BASELINES if name in over]
        parts += [", ".join(ratios) + (f" ({label(result, 'in ')})" if label(result) else "")] if ratios else []
    if result["verdict"] in TIMED and (kind := suite.accuracy_class(result)):
        parts.append(f"accuracy: {accuracy_named(kind)}")
    if differs := suite.own_check(result):
        parts.append(differs)
    if tags := [each["tag"] for each in result.get("caveats") or []]:
        parts.append(f"caveats: {', '.join(dict.fromkeys(tags))}")
    if result["time_ms"] and (why := why_not_measured(result)):
        parts.append(f"speed-up not measured: {why}")
    if result["verdict"] not in TIMED:
        by_seed = [each["text"] for each in result.get("caveats") or [] if each["tag"] == BY_SEED]
        parts = [*by_seed, result["reason"], *parts]
    return line.append(f": {'; '.join(map(one_line, parts))}") if parts else line


def named(result):
    """The problem and, where its name does not say it, which solution."""
    pair = result.get("pair") or {}
    if pair.get("sample_id") is not None and pair.get("problem_id") is not None:
        return f"{result['model']}, sample {pair['sample_id']}"
    case = f", {pair['case']['name']}" if pair.get("case") else ""
    return f"{result['model']}, {result['variant']}{case}"


def show(summary, console):
    """Print the "suite" key of a document."""
    pairs = summary["pairs"]
    counts = [f"{summary['verdicts'][word]} {word}" for word in document.VERDICTS if summary["verdicts"].get(word)]
    print_folded(console, f"{pairs} pair{'s' * (pairs != 1)}: {', '.join(counts)}", style="bold")
    for line in remarks(summary):
        print_folded(console, line, INDENT, hanging=INDENT)
    print_rows(console, summary_rows(summary), {"standard", "right", "over"})
    if cases := summary.get("cases"):
        print_rows(console, list(case_rows(cases)), {"problem", "solution", "tests", "benchmarks", "own check", "ranks by"})


def remarks(summary):
    """How often which caveat and which accuracy was seen, and what else is to be known of the figures."""
    for what in ("caveats", "accuracy"):
        counted = collections.Counter()
        for tag, count in (summary[what] or {}).items():
            counted[accuracy_named(tag)] += count
        if counted:
            yield f"{what}: {', '.join(f'{tag} {count}' for tag, count in counted.items())}"
    if lower := summary["lower_precision"]:
        yield f"right in a lower precision than the problem's: {lower}"
    if missing := summary["problems_without_solution"]:
        yield f"problems without a solution, which count as wrong in fast_p: {len(missing)}"


def _counted(found):
    return f"{found['right']} of {found['ran']} right" if found["ran"] else f"{found['listed']} on a GPU only"


def case_rows(cases):
    """{head: cell} of each solution of a problem with several cases."""
    for each in cases:
        mean, over = each["geometric_mean_ms"], each["over_eager"]
        row = {"problem": each["problem"], "solution": each["solution"]}
        row |= {f"{kind}s": _counted(each[kind]) for kind in ("test", "benchmark")}
        row["own check"] = f"accepts {each['accepted']} of {each['checked']}"
        row["ranks by"] = RANKS.get(each["ranking"], each["ranking"])
        row["geometric mean ms"] = NOTHING if mean is None else significant(mean)
        row["over eager"] = NOTHING if over is None else with_unit(over, "x")
        yield {head: Text(one_line(cell)) for head, cell in row.items()}


def summary_rows(summary):
    """{head: cell} of each standard and baseline."""
    rows = []
    for standard, found in summary["standards"].items():
        right = f"{found['correct']} of {summary['pairs']}"
        for name, over in (found["over"] or {None: None}).items():
            mean = over and over["geometric_mean"]
            fast = over["fast_p"] if over else {"0": found["fast_0"]}
            row = {"standard": TITLES[standard], "right": right, "over": _baseline(name) if name else NOTHING}
            row |= {f"fast_{p:g}": _share(fast.get(f"{p:g}")) for p in suite.THRESHOLDS}
            row["mean"] = with_unit(mean["ratio"], "x") if mean else NOTHING
            row["interval"] = span(mean["low"], mean["high"], "x") if mean else NOTHING
            row["pairs"] = str(mean["pairs"]) if mean else NOTHING
            rows.append({head: Text(one_line(cell)) for head, cell in row.items()})
    return rows


def _share(value):
    return NOTHING if value is None else "0" if value == 0 else significant(value)


def _baseline(name):
    return "fastest" if name == suite.FASTEST else baseline_name(name)
