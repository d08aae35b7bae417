"""What the reports say about a result: names for people, and the figures that follow from others."""

import ast
import contextlib
import re
import statistics
from pathlib import Path

from playground.catalog import DATA
from playground.clock.statistics import TIE, verdict
from playground.record import Unavailable, Unsupported
from playground.report.text import NOTHING, interval, one_line, scientific, significant, with_unit

SHORT_MS = 0.1
LOWER_PRECISION = "compile_fp16"  # shown, but no variant in float32 is measured by it
# Every baseline of playground.clock.baselines, in the order in which reports list them, with its name for people.
BASELINES = {"eager": "eager", "channels_last": "channels_last", "compile": "torch.compile"}
BASELINES |= {"compile_max": "torch.compile max-autotune"}
BASELINES |= {f"{name}_fp32": f"{shown} fp32" for name, shown in BASELINES.items()}
BASELINES |= {LOWER_PRECISION: "torch.compile fp16 (lower precision)"}

SETTINGS = {"benchmark": "cudnn.benchmark", "tf32": "TF32"}  # those of playground.clock.baselines

TRAINING = {"weights": "training, weights", "weights_and_input": "training, weights and input"}

# Verdict -> how many variants have it, in words.
TALLY = {"pass": "passed", "forward only": "forward only", "fail": "failed", "error": "ended in an error", "skipped": "skipped"}
OUTCOMES = {"win": "faster", "tie": "no difference", "loss": "slower"}  # as they are said, of those in the JSON
FORWARD = "forward"
OF_PYTORCH = "PyTorch's"
GRAPH = "CUDA graph"

OF_OUTPUTS = "outputs"  # in the place of gradients' names, where the output is detached
BEYOND_FLOOR = "faster than the floor, which counts more arithmetic than this variant does"


def meets(result):
    """Return whether a result meets the standard that it was asked to; records of earlier versions know drop-in alone."""
    return result.verdict == "pass" or (result.verdict == "forward only" and result.standard == "forward")


def label(result, preposition=""):
    """Return what stands beside a speed-up: `fp16` (behind the preposition), `forward only`, `not proved against deceit`."""
    own, accepted = result.variant_precision, result.accuracy and result.accuracy.accepted
    labels = [f"{preposition}{own}" if own else None, f"accurate to {accepted:g}" if accepted else None]
    labels += ["forward only" if result.verdict == "forward only" else None, result.speedup_proof]
    return ", ".join(filter(None, labels))


def labelled(text, result):
    """Return a speed-up in words, with its label behind it."""
    return f"{text} {label(result)}".rstrip()


def proof(timings, name):
    """Return ', proved 1.21x', the lower end of the outer clock's ratio over `name`, or that it bears less; "" without one."""
    if not (proved := timings.proved_over(name)):
        return ""
    inner = (timings.outer and timings.outer.warm) or timings.measured["eager"]
    counts = " by the outer clock" * (inner.ratio > timings.proved.high)
    is_short = timings.median_ms is not None and timings.median_ms < SHORT_MS  # several calls at once gain much
    return f"{counts}, proved {with_unit(proved.low, 'x')}{' as throughput' * is_short}"


def why_no_speedup(timings):
    """Return 'speed-up not measured: busy', or '1.3x over eager measured, not proved: ...'; None where it counts."""
    if not (why := timings.why_not_measured):
        return None
    inner = not timings.speedup and (timings.measured or {}).get("eager")
    told = f"{with_unit(inner.ratio, 'x')} over eager measured, not proved" if inner else "speed-up not measured"
    return f"{told}: {one_line(why)}"


def tally(results):
    """Return {verdict: '3 passed'} of the verdicts that there are."""
    counts = {word: sum(result.verdict == word for result in results) for word in TALLY}
    return {word: f"{count} {TALLY[word]}" for word, count in counts.items() if count}


def texts(result):
    """Return the figures of a table's row, each as it is written: "time" in ms, "over" the baseline, "of floor", ..."""
    check, (best, ratio), share = result.checked, headline(result), share_of_floor(result)
    outcome, own = result.outcome.verdict if result.outcome else NOTHING, result.variant_precision
    return {
        "max error": scientific(check.max_error),
        OF_PYTORCH: scientific(check.eager_error),
        "build s": significant(result.build_seconds),
        "median ms": significant(result.median_ms),
        "speed-up": labelled(with_unit(ratio.ratio, "x"), result) + proof(result, best) if ratio else NOTHING,
        "over": one_line(baseline_name(best)) if best else NOTHING,
        "of floor": with_unit(share and 100 * share, "%"),
        "outcome": OUTCOMES.get(outcome, outcome) + (f" in {own}" if own and outcome != NOTHING else ""),
    }


def why_not_pass(result):
    """Return the sentences on why a result is no pass: of one that is forward only, each caveat that stands in the way."""
    costly = [caveat_line(each, result) for each in result.caveats if each.costs]
    is_forward = result.verdict == "forward only"
    return [] if result.verdict == "pass" else costly if is_forward and costly else [result.reason]


def placed(result, reason):
    """Return 'FILE:LINE: reason', where the user's file raised it; the reason alone where that is not known, or said."""
    found = re.match(r"(\S.*:\d+): in ", result.details)
    return f"{one_line(found[1])}: {reason}" if found and not reason.startswith("/") and found[1] not in reason else reason


def caveat_line(caveat, result):
    """Return 'no-gradient: softmax.py:41: ...'."""
    where = f"{result.variant}.py:{caveat.line}: " if caveat.line else ""
    return one_line(f"{caveat.tag}: {where}{caveat.text}")


def ordered_baselines(names):
    """Return known baselines first, in their usual order, then any others."""
    names = list(names)
    return [name for name in BASELINES if name in names] + [name for name in names if name not in BASELINES]


def baseline_name(name):
    """Return a baseline's name for people; 'eager with cudnn.benchmark' of "eager+benchmark", as the variant had set it."""
    name, *settings = name.split("+")
    shown = BASELINES.get(name, name)
    return f"{shown} with {' and '.join(SETTINGS.get(each, each) for each in settings)}" if settings else shown


def fastest_baseline(medians):
    """Return the name of the fastest of {baseline: ms} that is in float32; None where there is none."""
    return min((name for name in medians if name != LOWER_PRECISION), key=medians.get, default=None)


def baseline_medians(timings):
    """Return {baseline: ms}: the median of the medians that were taken beside each variant."""
    pairs = [pair for each in timings for pair in each.baselines_ms.items()]
    return {name: statistics.median(each.median for of, each in pairs if of == name) for name, _ in pairs}


def headline(timings):
    """Return (baseline, Ratio) over the fastest one at least as precise, without an "outcome" the hardest to beat, or Nones."""
    outcome, speedup = timings.outcome, timings.ratios
    if outcome:
        return (outcome.against, outcome.measured) if outcome.measured else (None, None)
    best = min(speedup, key=lambda name: speedup[name].ratio, default=None)
    return best, speedup.get(best)


def timing_notes(result, brief=False):
    """Yield what is worth saying about how a variant was timed; `brief` for a table without intervals and graph columns."""
    for title, timings in timed_modes(result).items():
        title = "" if title == FORWARD else f"{title.removeprefix(f'{FORWARD}, ')}: "
        outcome, control, notes = timings.outcome, timings.control, list(timings.notes)
        if not brief and (slow := timings.not_graphed):
            notes.append(f"so slow that they were timed without a graph: {'; '.join(map(baseline_name, slow))}")
        if brief and (why := why_no_speedup(timings)):
            notes.append(why)
        if control and verdict(control) != "tie":
            came_out = f"PyTorch against itself came out at {interval(control)} instead of 1x"
            notes.append(f"noise: {came_out}, so each interval is that much wider")
        if brief and outcome and outcome.verdict == "tie" and abs(outcome.ratio - 1) > TIE:
            low, ratio, high = (with_unit(value, "x") for value in (outcome.low, outcome.ratio, outcome.high))
            notes.append(f"no difference, since {ratio} is anything from {low} to {high}")
        name = outcome and outcome.any_precision
        if ratio := timings.ratios.get(name):
            notes.append(f"{with_unit(ratio.ratio, 'x')} over {baseline_name(name)}, the fastest of any precision")
        yield from (title + note for note in notes + [BEYOND_FLOOR] * ((share_of_floor(timings) or 0) > 1))
        if isinstance(timings.graphed, Unavailable):
            yield f"{title}not timed in a {GRAPH}: {one_line(timings.graphed.unavailable)}"


def timed_modes(result):
    """Return {title: Timing} of forward and of training, each with that under a CUDA graph behind it, where there is one."""
    steps = {FORWARD: result, **{TRAINING.get(mode, mode): each for mode, each in (result.training or {}).items()}}
    pairs = [(title, timings) for title, timings in steps.items() if timings]
    modes = {of: each for title, timings in pairs for of, each in ((title, timings), (f"{title}, {GRAPH}", timings.in_a_graph))}
    return {title: timings for title, timings in modes.items() if timings}


def under_graphs(result):
    """Return 'CUDA graph: forward 0.140 ms, 2.00x over eager; training, weights 0.180 ms, ...'; None without any."""
    parts = []
    for title, timings in timed_modes(result).items():
        if title.endswith(GRAPH) and timings.time_ms:
            best, ratio = headline(timings)
            without = " without a graph" if best in (timings.not_graphed or []) else ""
            over = f", {with_unit(ratio.ratio, 'x')} over {baseline_name(best)}{without}" if ratio else ""
            took = f"{title.removesuffix(f', {GRAPH}')} {with_unit(timings.time_ms.median, ' ms')}{over}"
            parts.append(f"{took} {label(result, 'in ')}".rstrip())
    return f"{GRAPH}: {'; '.join(parts)}" if parts else None


def geometric_means(results):
    """Return {place: (geometric mean, number of models)} of each model's best variant in full precision."""
    best = {}
    for result in results:
        _, ratio = headline(result)
        if ratio and meets(result) and not result.variant_precision:
            of_place = best.setdefault(result.ran_on, {})
            of_place[result.model] = max(of_place.get(result.model, 0.0), ratio.ratio)
    return {place: (statistics.geometric_mean(of_place.values()), len(of_place)) for place, of_place in best.items()}


def share_of_floor(result):
    """Return the floor's share of the measured time, 1.0 at the hardware's limit; None where nothing was measured."""
    is_known = result.floor_ms and result.median_ms and not result.why_not_measured
    return result.floor_ms / result.median_ms if is_known else None


def gradient_verdict(check):
    """Return 'ok' or 'fail'; 'none' when it, or its output, has no gradients; '-' when they were not checked."""
    gradients = check.gradients
    if gradients is None:
        return NOTHING
    if not gradients or isinstance(gradients, Unsupported) or OF_OUTPUTS in gradients:
        return "none"
    return "ok" if all(each.is_within for each in gradients.values()) else "fail"


def mutants(result):
    """Return 'mutants 14/14 rejected', with the names of those that the check cannot tell apart; None where none ran."""
    check = result.checked
    if not check.mutants_rejected:
        return None
    survived = "; ".join(check.mutants_survived or [])
    remark = f"; cannot be told from the original: {survived}" if survived else ""
    return f"mutants {check.mutants_rejected} rejected{remark}"


def model_constants(path):
    """Return the literal module-level constants of a model's file, read without running it."""
    constants = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
            with contextlib.suppress(ValueError):
                if isinstance(node, ast.Assign):
                    value = ast.literal_eval(node.value)
                    for target in node.targets:
                        names = target.elts if isinstance(target, ast.Tuple) else [target]
                        constants |= zip((each.id for each in names), value if names != [target] else [value], strict=True)
    return constants


def listed(value):
    """Return `value` as it comes back from JSON, which has no tuples."""
    return [listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def size_note(result, root=DATA):
    """Return 'batch 4 instead of 128'; '' when the sizes are the original's."""
    originals, parts = model_constants(Path(root) / "models" / f"{result.model}.py"), []
    for name, value in result.shape.settings.items():
        if listed(value) != (original := listed(originals.get(name))):
            what = f"{'batch' if name == 'batch_size' else name} {listed(value)}"
            parts.append(what if original is None else f"{what} instead of {original}")
    return ", ".join(parts)


def inputs_text(result):
    """Return '128x8x384x384, 64x8' of the shapes of the inputs; "" where they are not known."""
    inputs = result.shape.inputs
    return ", ".join("x".join(map(str, each)) if isinstance(each, (list, tuple)) else str(each) for each in inputs)


def isolation(environment):
    """Return 'sandbox: on (bubblewrap 0.8.0)'; None where only the project's own files ran, and of runs before sandboxes."""
    found = environment.sandbox
    return one_line(f"sandbox: {found}") if found and "all files are the project's" not in found else None


def machine(environment):
    """Return one line on where a document was measured."""
    versions = {"torch": environment.torch, "CUDA": environment.cuda, "driver": environment.driver}
    told = [f"{name} {version}" for name, version in versions.items() if version]
    return one_line(", ".join([environment.gpu or environment.cpu or "no GPU", *told]))
