"""Everything about a result that is not a table, as (label, text): what compare.py prints of a variant, and the page shows."""

from playground.judge.accuracy import named as accuracy_named
from playground.report import checks
from playground.report.figures import (
    FORWARD,
    NOTHING,
    TIMED,
    baseline_name,
    gradient_verdict,
    gradients_unsupported,
    label,
    mutants,
    one_line,
    precisions,
    scientific,
    share_of_floor,
    size_note,
    span,
    standards,
    timed_modes,
    timing_notes,
    why_not_measured,
    with_unit,
)


def lacks(result):
    """Return what 'forward only' means for a result: 'right; no backward yet'."""
    tags = [caveat["tag"] for caveat in result.get("caveats") or [] if caveat["costs"]]
    others = [tag for tag in dict.fromkeys(tags) if tag != "no-gradient"]
    no_backward = ["no backward yet"] if "no-gradient" in tags else []
    return "; ".join(["right", *no_backward, *([f"cannot replace the original yet ({', '.join(others)})"] if others else [])])


def of(result):
    """(label, text) of everything about a result that is not a table."""
    check = result["check"] or {}
    share = share_of_floor(result)
    gradients = check.get("gradients")
    if result["reason"] and (result["verdict"] not in TIMED or not result.get("caveats")):
        yield "reason", result["reason"]
    yield from standards(result)
    for finding in result.get("findings") or []:
        if finding != result["reason"]:
            yield "finding", finding
    if races := result.get("accepted_races"):
        lines = ", ".join(f"line {line} ({count} times)" for line, count in races.items())
        yield "races", f"accepted, since the text calls them benign: {lines}"
    yield "ran on", ran_on(result)
    inputs = (result.get("shape") or {}).get("inputs")
    if inputs:
        sizes = ", ".join(str(tuple(each)) if isinstance(each, (list, tuple)) else str(each) for each in inputs)
        note = size_note(result)
        yield "inputs", f"{sizes}: {note}" if note else sizes
    if check.get("max_error") is not None:
        errors = [scientific(check.get(key)) for key in ("max_error", "eager_error", "allowed")]
        yield "error", "{}; PyTorch's {}; {}allowed {}".format(*errors[:2], _permitted(result), errors[2])
        if found := result.get("accuracy"):
            error, limit = scientific(found["error"]), scientific(found["limit"])
            yield "accuracy", f"{accuracy_named(found['class'])}: off by {error} of the spread; as PyTorch is up to {limit}"
        unsupported = gradients_unsupported(gradients)
        if unsupported is not None:
            yield "gradients", f"none: {unsupported}"
        else:
            yield "gradients", "not checked" if gradients is None else gradient_verdict(check)
        for way in check.get("reference") or []:
            yield "reference", way
        if check.get("domain"):
            yield "domain", f"kept by every probe: {'; '.join(check['domain'])}"
        if check.get("mutants_rejected"):
            yield "mutants", mutants(result).removeprefix("mutants ")
    yield from checks.lines(result["check"])
    yield from checks.sanitizer(result.get("sanitizer"))
    if result["build_seconds"] is not None:
        yield "build", with_unit(result["build_seconds"], " s") + ("" if result["built"] else ", from the cache")
    if result["floor_ms"] is not None:
        reached = f"; {with_unit(100 * share, '%')} of it reached" if share else ""
        yield "floor", f"{with_unit(result['floor_ms'], ' ms')}, bound by {result['floor_bound']}{reached}"
    for title, timings in timed(result).items():
        if timings.get("outcome"):
            labelled = f", {label(result, 'in ')}" if label(result) else ""
            yield "timing", f"{title}{labelled}: {_outcome(timings)}"
    if result.get("clocks"):
        before, after = result["clocks"]["before"], result["clocks"]["after"]
        yield "SM clock", f"{before['sm_mhz']} MHz before, {after['sm_mhz']} after, of {after['max_sm_mhz']}"
    for note in timing_notes(result):
        yield "note", note
    for title, timings in timed_modes(result).items():
        for name, reason in (timings.get("baselines_unavailable") or {}).items():
            yield "note", ("" if title == FORWARD else f"{title}: ") + not_measured(name, reason)


def _permitted(result):
    """'tf32 permits 1.16e-3; ', the error that the stated precision allows to any algorithm."""
    permitted = result["check"].get("permitted_error")
    precision = result.get("variant_precision") or result.get("precision")
    return f"{one_line(precision)} permits {scientific(permitted)}; " if permitted is not None and precision else ""


def ran_on(result):
    if result["ran_on"] is None:
        return NOTHING
    return one_line(", ".join(filter(None, (result["ran_on"], precisions(result)))))


def not_measured(name, reason):
    return f"baseline {baseline_name(name)} not measured: {reason}"


def timed(result):
    """{title: timings} of all that was timed."""
    return {title: timings for title, timings in timed_modes(result).items() if timings.get("time_ms")}


def _outcome(timings):
    """'win over torch.compile, 2.30x (2.29x-2.31x), 9 rounds, 41 calls, 12.3% of the floor'."""
    if why := why_not_measured(timings):
        return f"speed-up not measured: {one_line(why)}"
    outcome, share = timings["outcome"], share_of_floor(timings)
    parts = [f"{outcome['verdict']} over" if outcome["verdict"] == "win" else f"{outcome['verdict']} against"]
    parts[0] += f" {baseline_name(outcome['against'])}"
    parts.append(f"{with_unit(outcome['ratio'], 'x')} ({span(outcome['low'], outcome['high'], 'x')})")
    parts.append(f"{timings['rounds']} rounds, {timings['calls']} calls")
    parts += [f"{with_unit(100 * share, '%')} of the floor"] if share else []
    return ", ".join(parts)
