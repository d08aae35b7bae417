"""All about a result in words, as (label, text), and what its checks found, also as tables: on the terminal and the page."""

from playground.judge.checks import AT_OWN_SIZE, BY_NAME, REDUCED, SHOWN
from playground.judge.classes import named as accuracy_named
from playground.judge.classes import two_digits
from playground.record import TIMED, Unsupported
from playground.report import figures
from playground.report.text import NOTHING, interval, one_line, scientific, with_unit

NOT_RUN = "not run: "
DOUBLE = "double()"  # which nearly all refuse
EXCEPTIONS = ("refuses: ", "raises ")  # begin a note on what the variant raised
REFUSED = "raises (allowed)"
HEADS = (
    ("probe", "right", "max error", figures.OF_PYTORCH, "allowed", "what it is, or why not"),
    *(("behaviour", "right", "remark"), ("launches", "us", "kernel on the GPU")),
)


def lacks(result):
    """Return what 'forward only' means for a result: 'right; no backward yet'."""
    tags = dict.fromkeys(caveat.tag for caveat in result.caveats if caveat.costs)
    others = ", ".join(tag for tag in tags if tag != "no-gradient")
    parts = ["right", "no backward yet" * ("no-gradient" in tags), f"not a drop-in replacement yet ({others})" * bool(others)]
    return "; ".join(filter(None, parts))


def of(result):
    """Yield (label, text) of everything about a result that is not a table."""
    share, modes = figures.share_of_floor(result), figures.timed_modes(result)
    if result.reason and (result.verdict not in TIMED or not result.caveats):
        yield "reason", figures.placed(result, result.reason)
    reasons = result.standards.forward.reasons if result.standards else []
    yield from (("forward", one_line(reason)) for reason in reasons[1:])
    yield from (("caveat", figures.caveat_line(caveat, result)) for caveat in result.caveats)
    yield from (("finding", finding) for finding in result.findings if finding != result.reason)
    if races := result.accepted_races:
        lines = ", ".join(f"line {line} ({count} times)" for line, count in races.items())
        yield "races", f"accepted, since the text calls them benign: {lines}"
    yield "ran on", ran_on(result)
    if sizes := figures.inputs_text(result):
        yield "inputs", ": ".join(filter(None, (sizes, figures.size_note(result))))
    if result.checked.max_error is not None:
        yield from _accuracy(result, result.checked)
    yield from of_check(result.checked)
    yield from sanitizer(result.sanitizer)
    if result.build_seconds is not None:
        yield "build", with_unit(result.build_seconds, " s") + ", from the cache" * (not result.built)
    if result.floor_ms is not None:
        reached = f"; {with_unit(100 * share, '%')} of it reached" if share else ""
        yield "floor", f"{with_unit(result.floor_ms, ' ms')}, bound by {result.floor_bound}{reached}"
    for title, timings in modes.items():
        if timings.outcome:
            yield "timing", f"{', '.join(filter(None, (title, figures.label(result, 'in '))))}: {_outcome(timings)}"
    if result.clocks:
        before, after = result.clocks.before, result.clocks.after
        yield "SM clock", f"{before.sm_mhz} MHz before, {after.sm_mhz} after, of {after.max_sm_mhz}"
    yield from (("note", note) for note in figures.timing_notes(result))
    for title, timings in modes.items():
        for name, reason in timings.baselines_unavailable.items():
            yield "note", ("" if title == figures.FORWARD else f"{title}: ") + not_measured(name, reason)


def _accuracy(result, check):
    figures_of = (check.max_error, check.eager_error, check.allowed)
    own, eager, allowed = (NOTHING if each is None else two_digits(each) for each in figures_of)
    yield "max error", f"{own} standard deviations; PyTorch's {eager}; allowed {allowed}"
    if result.accuracy:
        yield "accuracy", accuracy_named(result.accuracy.kind)
    gradients, word = check.gradients, figures.gradient_verdict(check)
    why = gradients.unsupported if isinstance(gradients, Unsupported) else None
    yield "gradients", f"none: {why}" if why is not None else "not checked" if word == NOTHING else word
    yield from (("reference", way) for way in check.reference)
    if check.domain:
        yield "domain", f"kept by every probe: {'; '.join(check.domain)}"
    if mutants := figures.mutants(result):
        yield "mutants", mutants.removeprefix("mutants ")


def ran_on(result):
    """Return 'cuda, tf32' of the original's precision, 'cuda, fp16 against tf32' where the variant says it has a lower one."""
    precisions = " against ".join(filter(None, (result.variant_precision, result.precision)))
    return one_line(", ".join(filter(None, (result.ran_on, precisions)))) if result.ran_on else NOTHING


def not_measured(name, reason):
    return f"baseline {figures.baseline_name(name)} not measured: {reason}"


def _outcome(timings):
    """Return 'faster than torch.compile, 2.30x (2.29x-2.31x), 9 rounds, 41 calls, 12.3% of the floor'."""
    if why := figures.why_no_speedup(timings):
        return why
    outcome, share = timings.outcome, figures.share_of_floor(timings)
    than = f"{'from' if outcome.verdict == 'tie' else 'than'} {figures.baseline_name(outcome.against)}"
    proof = figures.proof(timings, outcome.against)
    parts = [f"{figures.OUTCOMES[outcome.verdict]} {than}", f"{interval(outcome)}{proof}"]
    parts += [f"{count} {what}" for what in ("rounds", "calls") if (count := getattr(timings, what)) is not None]
    return ", ".join(parts + ([f"{with_unit(100 * share, '%')} of the floor"] if share else []))


def of_check(check):
    """Yield (label, text) of the probes, the behaviour and the work of a result's check, as short as they can be."""
    for key, entries in (("probes", check.probes), ("behaviour", check.behaviour)):
        if entries:
            sorted_ = sorted_out(entries).items()
            found = {word: ", ".join(SHOWN.get(name, name) for name in names) for word, names in sorted_ if names}
            told = [f"{word}: {names}" for word, names in found.items() if word != "right"]
            yield key, "; ".join([f"{len(sorted_out(entries)['right'])} right", *told])
            for name, entry in entries.items():
                if entry.note and not entry.note.startswith((NOT_RUN, *EXCEPTIONS)):
                    yield "note", f"{name}: {entry.note}"
    if check.work:
        yield "work", work(check.work)


def work(found):
    """Return one line on the variant's own kernels."""
    if found.note:
        return found.note
    share, calls = found.own_share, found.own_calls
    text = f"{calls} call{'s' * (calls != 1)} of its own code in a forward pass, and the result depends on it"
    return text if share is None else f"{text}; its kernels take {with_unit(100 * share, '%')} of the GPU's time"


def sanitizer(examination):
    """Yield (label, text) of what compute-sanitizer saw; nothing where it was not asked."""
    if not examination:
        return
    tools, passes = examination.tools, " and ".join(examination.passes) or "nothing"
    if examination.problem:
        yield "sanitizer", examination.problem
    elif tools:
        count = len(examination.findings)
        size = "".join(f", {name}={value}" for name, value in examination.settings.items())
        where = f"{', '.join(examination.kernels)} ({passes}{size})"
        yield "sanitizer", f"{', '.join(tools)}: {count or 'no'} mistake{'s' * (count != 1)} in {where}"
        others = {tool: counts["of_other_kernels"] for tool, counts in tools.items()}
        if reports := ", ".join(f"{tool} {count}" for tool, count in others.items() if count):
            yield "note", f"reports on kernels that are not the variant's, which do not count: {reports}"
    yield from (("note", f"sanitizer: {note}") for note in examination.notes)


def sorted_out(entries):
    """Return {"right", "wrong", "not run", "noted" (a remark, no result), REFUSED (by an exception, as it may): [names]}."""
    found = {"right": [], "wrong": [], "not run": [], "noted": [], REFUSED: []}
    for name, entry in entries.items():
        note = entry.note or ""
        is_right = not note or getattr(entry, "max_error", None) is not None
        remark = "not run" if note.startswith(NOT_RUN) else REFUSED if note.startswith(EXCEPTIONS) else "noted"
        found["wrong" if entry.complaint else "right" if is_right else remark].append(name)
    return found


def refused(check):
    """Return the names of the checks where the variant raised an exception, as it may there."""
    return sorted_out({**check.probes, **check.behaviour})[REFUSED]


def tables(check):
    """Yield (heads, rows) of probes, checks of the behaviour (each "ok", "fail" or "-") and kernels, the longest first."""
    probes, behaviour = list(_probes(check.probes)), check.behaviour
    told = [(_word(each, not each.note), each.complaint or each.note or "") for each in behaviour.values()]
    named = [(SHOWN.get(name, name), *each) for name, each in zip(behaviour, told, strict=True)]
    kernels = check.work.kernels if check.work else []
    launched = [(str(each.calls), f"{each.microseconds:.1f}", each.name) for each in kernels]
    yield from ((heads, rows) for heads, rows in zip(HEADS, (probes, named, launched), strict=True) if rows)


def _probes(entries):
    for name, entry in entries.items():
        errors = map(scientific, (entry.max_error, entry.eager_error, entry.allowed))
        known = BY_NAME.get(name.removesuffix(AT_OWN_SIZE))
        is_reduced = known and known.size == REDUCED and not name.endswith(AT_OWN_SIZE)
        about = f"{known.about}{' (reduced size)' * is_reduced}" if known else ""
        yield name, _word(entry, entry.max_error is not None), *errors, entry.complaint or entry.note or about


def _word(entry, is_right):
    return "fail" if entry.complaint else "ok" if is_right else NOTHING
