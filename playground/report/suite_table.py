"""A suite on the terminal: a line a pair as soon as it is judged, then what all of them come to."""

import collections

from rich.text import Text

from playground.judge.classes import named as accuracy_named
from playground.record import STANDARDS, TIMED, VERDICTS
from playground.report import suite
from playground.report.figures import baseline_name, label, placed, proof, why_no_speedup
from playground.report.layout import INDENT, print_folded, print_rows, verdict
from playground.report.terminal import View
from playground.report.text import NOTHING, one_line, significant, span, with_unit

RANKS = {"geom": "geometric mean", "mean": "mean", "last": "the last"}  # of the benchmarks, as the problem's file says
TITLES = {key: title for title, key in STANDARDS.items()}


class Pairs(View):
    """The view of a run over pairs."""

    def show(self, report):
        if report.results:
            self.print_machine(report)
        count = sum(self._expected.values())
        for result in self.unprinted(report.results):
            number = f"{len(self._printed):{len(str(count))}}/{count} "
            print_folded(self._console, Text(number).append_text(_line(result)), hanging=len(number))

    def conclude(self, report):
        console, summary = self._console, report.suite
        pairs = summary.pairs
        counts = [f"{summary.verdicts[word]} {word}" for word in VERDICTS if summary.verdicts.get(word)]
        console.print()
        print_folded(console, f"{pairs} pair{'s' * (pairs != 1)}: {', '.join(counts)}", style="bold")
        for line in remarks(summary):
            print_folded(console, line, INDENT, hanging=INDENT)
        print_rows(console, summary_rows(summary), {"standard", "right", "over"})
        words = {"problem", "solution", "tests", "benchmarks", "own check", "ranks by"}
        print_rows(console, list(_case_rows(summary.cases or ())), words)


def _line(result):
    """'fail gelu/problem, gelu/wrong: what was wrong', or times, accuracy and caveats of what is right."""
    caveats = {each.tag: each.text for each in result.caveats}
    is_right, time, over = result.verdict in TIMED, result.time_ms, suite.speedups(result)
    parts = [] if is_right else [placed(result, result.reason or "")]
    if time:
        parts.append(with_unit(time.median, " ms"))
        texts = {name: with_unit(ratio.ratio, "x") for name, ratio in over.items()}
        if "eager" in texts:
            texts["eager"] += proof(result, "eager")
        ratios = [f"{texts[name]} over {_baseline(name)}" for name in suite.BASELINES if name in over]
        parts.append(", ".join(ratios) + (f" ({label(result, 'in ')})" if ratios and label(result) else ""))
    kind = suite.accuracy_class(result)
    parts += [f"accuracy: {accuracy_named(kind)}" if is_right and kind else None, suite.own_check(result)]
    parts.append(f"caveats: {', '.join(caveats)}" if caveats else None)
    parts.append(why_no_speedup(result))
    line = Text.assemble(verdict(result.verdict), " ", (one_line(named(result)), "bold"))
    return line.append(": " * any(parts)).append("; ".join(map(one_line, filter(None, parts))))


def named(result):
    """Return the problem and, where its name does not say it, which solution."""
    pair = result.pair
    if pair and pair.sample_id is not None and pair.problem_id is not None:
        return f"{result.model}, sample {pair.sample_id}"
    case = f", {pair.case.name}" if pair and pair.case else ""
    return f"{result.model}, {result.variant}{case}"


def remarks(summary):
    """Yield how often which caveat and which accuracy was seen, and what else is to be known of the figures."""
    for what, counts in (("caveats", summary.caveats), ("accuracy", summary.accuracy)):
        counted = collections.Counter()
        for tag, count in counts.items():
            counted[accuracy_named(tag)] += count
        if counted:
            yield f"{what}: {', '.join(f'{tag} {count}' for tag, count in counted.items())}"
    if lower := summary.lower_precision:
        yield f"right in a lower precision than the problem's: {lower}"
    if missing := summary.problems_without_solution:
        yield f"problems without a solution, which count as wrong in fast_p: {len(missing)}"


def _case_rows(cases):
    for each in cases:
        row = {"problem": each.problem, "solution": each.solution}
        for kind, right in (("tests", each.test), ("benchmarks", each.benchmark)):
            row[kind] = f"{right.right} of {right.ran} right" if right.ran else f"{right.listed} on a GPU only"
        row["own check"] = f"accepts {each.accepted} of {each.checked}"
        row["ranks by"] = RANKS.get(each.ranking, each.ranking)
        row["geometric mean ms"], row["over eager"] = significant(each.geometric_mean_ms), with_unit(each.over_eager, "x")
        yield row


def summary_rows(summary):
    """Return {head: cell} of each standard and baseline."""
    rows = []
    for standard, found in summary.standards.items():
        for name, over in (found.over or {None: None}).items():
            fast, mean = (over.fast_p, over.geometric_mean) if over else ({"0": found.fast_0}, None)
            row = {"standard": TITLES[standard], "right": f"{found.correct} of {summary.pairs}"}
            row["over"] = _baseline(name) if name else NOTHING
            for p in suite.THRESHOLDS:
                row[f"fast_{p:g}"] = significant(share) if (share := fast.get(f"{p:g}")) != 0 else "0"
            row["mean"] = with_unit(mean and mean.ratio, "x")
            row["interval"] = span(mean.low, mean.high, "x") if mean else NOTHING
            row["pairs"] = str(mean.pairs if mean else NOTHING)
            rows.append(row)
    return rows


def _baseline(name):
    return "fastest" if name == suite.FASTEST else baseline_name(name)
