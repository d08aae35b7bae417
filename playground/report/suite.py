"""What a run over many pairs comes to, under both standards, also as KernelBench's analysis reads it."""

import builtins
import collections
import json
import re
import statistics

from playground import record, run_record
from playground.judge.classes import deviations, two_digits
from playground.record import TIMED
from playground.report import document
from playground.report.figures import headline
from playground.report.text import grouped
from playground.run_record import Cases, MeanRatio, Over, Right, SuiteStandard
from playground.serial import dump

STANDARDS = tuple(record.STANDARDS.values())
THRESHOLDS = (0.0, 0.5, 1.0, 1.5, 2.0)
NOT_COMPILED = "does not compile"
CALLED = re.compile(r".+:\d+: (in (forward|__init__)\n|forward (returns|must return) )")  # begins what a call comes to
RAISED = re.compile(r"(?:.+:\d+: )?([\w.]*(?:Error|Exception)): ")
FASTEST = "fastest"  # of the baselines that are at least as precise as the solution
BASELINES = ("eager", "compile", FASTEST)  # KernelBench's two, and ours
MEETS = {"forward": TIMED, "drop_in": ("pass",)}  # the verdicts of those that do


def summarise(report, unsolved=()):
    """Return the run_record.Suite of a document of pairs.

    fast_p is KernelBench's (score.py, `fastp`): the share of all pairs, a problem in `unsolved` as a wrong one, that are
    correct and faster than p; every correct pair counts for p = 0. Means are geometric, also of the intervals' ends.
    """
    results = report.results
    tags = [dict.fromkeys(each.tag for each in result.caveats) for result in results]  # each once a result
    caveats = collections.Counter(tag for own in tags for tag in own)
    classes = collections.Counter(each for each in map(accuracy_class, results) if each)
    return run_record.Suite(
        pairs=len(results),
        problems_without_solution=list(unsolved),
        verdicts=dict(collections.Counter(result.verdict for result in results)),
        caveats=dict(caveats.most_common()),
        accuracy=dict(classes.most_common()),
        lower_precision=sum(bool(result.variant_precision) for result in results if is_correct(result, "forward")),
        standards={standard: _standard(results, standard, len(results) + len(unsolved)) for standard in STANDARDS},
        cases=list(_cases(results)) or None,
    )


def own_check(result):
    """Return what the problem's own check, if there is one, says of the outputs: the same as the judge, or how it differs."""
    found = result.checked.own_check
    if not found or result.verdict in ("error", "skipped"):
        return None if not found else f"the problem's own check: {found.complaint or 'accepts it'}"
    if is_correct(result, "forward") == (found.complaint is None):
        return None
    if found.complaint:
        error, allowed = result.checked.max_error, result.checked.allowed
        ours = "" if None in (error, allowed) else f", off by {deviations(error)} (allowed {two_digits(allowed)})"
        return f"the problem's own check rejects what is right here{ours}: {found.complaint}"
    return "the problem's own check accepts it"


def _cases(results):
    of_cases = [result for result in results if result.pair and result.pair.case]
    for (problem, solution), rows in grouped(of_cases, lambda result: (result.model, result.variant)).items():
        case = rows[0].pair.case
        kinds = {kind: [row for row in rows if row.pair.case.kind == kind] for kind in ("test", "benchmark")}
        listed = {"test": len(kinds["test"]), "benchmark": case.benchmarks}
        right = {kind: sum(is_correct(row, "forward") for row in of_kind) for kind, of_kind in kinds.items()}
        checks = [row.check.own_check for row in rows if row.checked.own_check]
        seen = [row for row in kinds["benchmark"] if row.outer or not row.why_not_measured]  # or it may be forged
        times = [row.time_ms.median for row in seen if row.time_ms]
        over = [found["eager"].ratio for found in map(speedups, kinds["benchmark"]) if "eager" in found]

        def mean(values, is_whole=right == listed, count=listed["benchmark"]):
            return statistics.geometric_mean(values) if values and is_whole and len(values) == count else None

        yield Cases(
            problem=problem,
            solution=solution,
            **{kind: Right(right[kind], len(kinds[kind]), listed[kind]) for kind in listed},
            checked=len(checks),
            accepted=sum(each.complaint is None for each in checks),
            ranking=case.ranking,
            geometric_mean_ms=mean(times),
            over_eager=mean(over),
        )


def is_correct(result, standard):
    """Return whether a result meets a standard, one of STANDARDS."""
    return result.verdict in MEETS[standard]


def accuracy_class(result):
    """Return 'as PyTorch', 'float32', ...; None where it is not known."""
    return result.accuracy and result.accuracy.kind


def speedups(result):
    """Return {baseline: Ratio} of a result, FASTEST among them; empty where its times are not claimed."""
    if not result.speedup or result.why_not_measured:
        return {}
    _, fastest = headline(result)
    return {**result.speedup, **({FASTEST: fastest} if fastest else {})}


def _standard(results, standard, count):
    correct = [result for result in results if is_correct(result, standard)]
    timed = [each for each in map(speedups, correct) if each]
    share = len(correct) / count if count else 0.0
    over = {}
    for name in BASELINES:
        if ratios := [each[name] for each in timed if name in each]:
            faster = {f"{p:g}": sum(ratio.ratio > p for ratio in ratios) / count for p in THRESHOLDS if p}
            columns = {key: [getattr(ratio, key) for ratio in ratios] for key in ("ratio", "low", "high")}
            # An interval may begin at zero.
            means = {key: statistics.geometric_mean(each) if all(each) else 0.0 for key, each in columns.items()}
            over[name] = Over(fast_p={"0": share, **faster}, geometric_mean=MeanRatio(**means, pairs=len(ratios)))
    return SuiteStandard(correct=len(correct), timed=len(timed), fast_0=share, over=over)


def left_out(report):
    """Return why results that are right are in no file of another project, such as '2 right: not timed'; None where all are."""
    rows = [result for result in report.results if is_correct(result, "forward") and not speedups(result)]
    return f"{len(rows)} right: {rows[0].why_not_measured or 'not timed'}" if rows else None


def eval_results(report):
    """Return {level: KernelBench's eval_results.json of its pairs} (eval_from_generations.py, add_to_eval_results_file).

    `correctness` is of the standard `forward`; `runtime` is the median in milliseconds, -1 of what is wrong. Skipped pairs, and
    right ones without a claimed time, are left out: KernelBench's script would divide by -1.
    """
    levels = {}
    for result in report.results:
        pair = result.pair
        has_claim = result.time_ms and result.why_not_measured is None
        is_left_out = result.verdict == "skipped" or (is_correct(result, "forward") and not has_claim)
        if is_left_out or not pair or None in (pair.level, pair.problem_id):
            continue
        entries = levels.setdefault(pair.level, {}).setdefault(str(pair.problem_id), [])
        sample = pair.sample_id
        hardware = report.environment.gpu if result.ran_on == "cuda" else report.environment.cpu
        entries.append({"sample_id": len(entries) if sample is None else sample} | eval_entry(result, hardware))
    return {level: dict(sorted(found.items(), key=lambda item: int(item[0]))) for level, found in levels.items()}


def eval_entry(result, hardware):
    """Return what KernelBench's KernelExecResult says of a result that ran on `hardware`; see `eval_results`."""
    has_run = any(map(CALLED.match, (result.details, result.reason or ""))) and NOT_COMPILED not in result.reason
    compiled = result.check is not None or result.build_seconds is not None or has_run  # a first call belongs to the build
    place = {"hardware": hardware, "device": result.ran_on}
    metadata = place | {"verdict": result.verdict}
    if result.verdict == "fail":
        metadata["correctness_issue"] = result.reason
    elif result.verdict not in TIMED:
        kind, raised = "runtime_error" if compiled else "compilation_error", RAISED.match(result.reason)
        name = raised[1] if raised else "RuntimeError"
        metadata |= {kind: result.reason, f"{kind}_name": f"builtins.{name}" if hasattr(builtins, name) else name}
        metadata |= {f"{kind}_traceback": result.details} if result.details else {}
    if result.caveats:
        metadata["caveats"] = [each.tag for each in result.caveats]
    own, eager = result.time_ms, result.baselines_ms.get("eager")
    return {
        "compiled": compiled,
        "correctness": is_correct(result, "forward"),
        "metadata": metadata,
        "runtime": own.median if own else -1.0,
        "runtime_stats": dump(own) | {"num_trials": result.calls} | place if own else {},
        "ref_runtime": eager.median if eager else -1.0,
        "ref_runtime_stats": dump(eager) | place if eager else {},
    }


def write_eval_results(report, file):
    """Write one file a level; where there are several, `{level}` in its name is the level."""
    for level, found in eval_results(report).items():
        document.write_whole(str(file).replace("{level}", str(level)), json.dumps(found, indent=4) + "\n")
