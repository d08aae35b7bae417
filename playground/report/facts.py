"""Everything about a result that is not a table, as (label, text): what compare.py prints of a variant, and the page shows."""

from playground.judge.accuracy import named as accuracy_named
from playground.report import checks, figures
from playground.report.text import NOTHING, interval, one_line, scientific, with_unit


def lacks(result):
    """Return what 'forward only' means for a result: 'right; no backward yet'."""
    tags = dict.fromkeys(caveat["tag"] for caveat in result.get("caveats") or [] if caveat["costs"])
    others = ", ".join(tag for tag in tags if tag != "no-gradient")
    parts = ["right", "no backward yet" * ("no-gradient" in tags), f"cannot replace the original yet ({others})" * bool(others)]
    return "; ".join(filter(None, parts))


def of(result):
    """Yield (label, text) of everything about a result that is not a table."""
    share, modes = figures.share_of_floor(result), figures.timed_modes(result)
    if result["reason"] and (result["verdict"] not in figures.TIMED or not result.get("caveats")):
        yield "reason", result["reason"]
    reasons = ((result.get("standards") or {}).get("forward") or {}).get("reasons") or []
    yield from (("forward", one_line(reason)) for reason in reasons[1:])
    yield from (("caveat", figures.caveat_line(caveat, result)) for caveat in result.get("caveats") or [])
    yield from (("finding", finding) for finding in result.get("findings") or [] if finding != result["reason"])
    if races := result.get("accepted_races"):
        lines = ", ".join(f"line {line} ({count} times)" for line, count in races.items())
        yield "races", f"accepted, since the text calls them benign: {lines}"
    yield "ran on", ran_on(result)
    if sizes := figures.inputs_text(result):
        yield "inputs", ": ".join(filter(None, (sizes, figures.size_note(result))))
    if (result["check"] or {}).get("max_error") is not None:
        yield from _accuracy(result, result["check"])
    yield from checks.lines(result["check"])
    yield from checks.sanitizer(result.get("sanitizer"))
    if result["build_seconds"] is not None:
        yield "build", with_unit(result["build_seconds"], " s") + ", from the cache" * (not result["built"])
    if result["floor_ms"] is not None:
        reached = f"; {with_unit(100 * share, '%')} of it reached" if share else ""
        yield "floor", f"{with_unit(result['floor_ms'], ' ms')}, bound by {result['floor_bound']}{reached}"
    for title, timings in modes.items():
        if timings.get("time_ms") and timings.get("outcome"):
            yield "timing", f"{', '.join(filter(None, (title, figures.label(result, 'in '))))}: {_outcome(timings)}"
    if result.get("clocks"):
        before, after = result["clocks"]["before"], result["clocks"]["after"]
        yield "SM clock", f"{before['sm_mhz']} MHz before, {after['sm_mhz']} after, of {after['max_sm_mhz']}"
    yield from (("note", note) for note in figures.timing_notes(result))
    for title, timings in modes.items():
        for name, reason in (timings.get("baselines_unavailable") or {}).items():
            yield "note", ("" if title == figures.FORWARD else f"{title}: ") + not_measured(name, reason)


def _accuracy(result, check):
    own, eager, allowed = (scientific(check.get(key)) for key in ("max_error", "eager_error", "allowed"))
    permitted, precision = check.get("permitted_error"), result.get("variant_precision") or result.get("precision")
    # What the stated precision allows to any algorithm.
    permits = f"{one_line(precision)} permits {scientific(permitted)}; " if permitted is not None and precision else ""
    yield "max error", f"{own}; PyTorch's {eager}; {permits}allowed {allowed}"
    if found := result.get("accuracy"):
        error, limit = scientific(found["error"]), scientific(found["limit"])
        yield "accuracy", f"{accuracy_named(found['class'])}: off by {error} of the spread at most; up to {limit} is as PyTorch"
    unsupported, word = figures.gradients_unsupported(check.get("gradients")), figures.gradient_verdict(check)
    yield "gradients", f"none: {unsupported}" if unsupported is not None else "not checked" if word == NOTHING else word
    yield from (("reference", way) for way in check.get("reference") or [])
    if check.get("domain"):
        yield "domain", f"kept by every probe: {'; '.join(check['domain'])}"
    if mutants := figures.mutants(result):
        yield "mutants", mutants.removeprefix("mutants ")


def ran_on(result):
    """Return 'cuda, tf32' of the original's precision, 'cuda, fp16 against tf32' where the variant says it has a lower one."""
    precisions = " against ".join(filter(None, (result.get("variant_precision"), result.get("precision"))))
    return one_line(", ".join(filter(None, (result["ran_on"], precisions)))) if result["ran_on"] else NOTHING


def not_measured(name, reason):
    return f"baseline {figures.baseline_name(name)} not measured: {reason}"


def _outcome(timings):
    """Return 'faster than torch.compile, 2.30x (2.29x-2.31x), 9 rounds, 41 calls, 12.3% of the floor'."""
    if why := figures.why_not_measured(timings):
        return f"speed-up not measured: {one_line(why)}"
    outcome, share = timings["outcome"], figures.share_of_floor(timings)
    than = f"{'from' if outcome['verdict'] == 'tie' else 'than'} {figures.baseline_name(outcome['against'])}"
    parts = [f"{figures.OUTCOMES[outcome['verdict']]} {than}", interval(outcome)]
    parts += [f"{timings['rounds']} rounds, {timings['calls']} calls", share and f"{with_unit(100 * share, '%')} of the floor"]
    return ", ".join(filter(None, parts))
