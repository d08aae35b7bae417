"""What the checks of a variant found: a few lines for every reader, and all of it for whoever asks for an explanation."""

from playground.judge.checks import BY_NAME, REDUCED, SHOWN
from playground.judge.probes import AT_OWN_SIZE
from playground.report.text import NOTHING, scientific, with_unit

NOT_RUN = "not run: "
DOUBLE = "double()"  # which nearly all refuse
EXCEPTIONS = ("refuses: ", "raises ")  # begin a note on what the variant raised
REFUSED = "refused by an exception, as it may"


def lines(check):
    """Yield (label, text) of the probes, the behaviour and the work of a result's check, as short as they can be."""
    for key in ("probes", "behaviour"):
        if entries := (check or {}).get(key):
            sorted_ = sorted_out(entries).items()
            found = {word: ", ".join(SHOWN.get(name, name) for name in names) for word, names in sorted_ if names}
            told = [f"{word}: {names}" for word, names in found.items() if word != "right"]
            yield key, "; ".join([f"{len(sorted_out(entries)['right'])} right", *told])
            for name, entry in entries.items():
                if entry["note"] and not entry["note"].startswith((NOT_RUN, *EXCEPTIONS)):
                    yield "note", f"{name}: {entry['note']}"
    if (check or {}).get("work"):
        yield "work", work(check["work"])


def work(found):
    """Return one line on the variant's own kernels."""
    if found["note"]:
        return found["note"]
    share, calls = found.get("own_share"), found["own_calls"]
    text = f"{calls} call{'s' * (calls != 1)} of its own code in a forward pass, and the result depends on it"
    return text if share is None else f"{text}; its kernels take {with_unit(100 * share, '%')} of the GPU's time"


def sanitizer(examination):
    """Yield (label, text) of what compute-sanitizer saw; nothing where it was not asked."""
    if not examination:
        return
    tools, passes = examination["tools"], " and ".join(examination["passes"]) or "nothing"
    if examination["problem"]:
        yield "sanitizer", examination["problem"]
    elif tools:
        count = len(examination["findings"])
        size = "".join(f", {name}={value}" for name, value in examination.get("settings", {}).items())
        where = f"{', '.join(examination['kernels'])} ({passes}{size})"
        yield "sanitizer", f"{', '.join(tools)}: {count or 'no'} mistake{'s' * (count != 1)} in {where}"
        others = {tool: counts["of_other_kernels"] for tool, counts in tools.items()}
        if reports := ", ".join(f"{tool} {count}" for tool, count in others.items() if count):
            yield "note", f"reports on kernels that are not the variant's, which do not count: {reports}"
    yield from (("note", f"sanitizer: {note}") for note in examination["notes"])


def sorted_out(entries):
    """Return {"right", "wrong", "not run", "noted", REFUSED: names}; REFUSED by an exception, the others noted by a remark."""
    found = {"right": [], "wrong": [], "not run": [], "noted": [], REFUSED: []}
    for name, entry in entries.items():
        note = entry.get("note") or ""
        is_right = not note or entry.get("max_error") is not None
        kind = (
            "wrong" if entry.get("complaint") else "not run" if note.startswith(NOT_RUN) else "right" if is_right else "noted"
        )
        found[REFUSED if kind == "noted" and note.startswith(EXCEPTIONS) else kind].append(name)
    return found


def refused(check):
    """Return the names of the checks where the variant raised an exception, as it may there."""
    return sorted_out({**((check or {}).get("probes") or {}), **((check or {}).get("behaviour") or {})})[REFUSED]


def tables(check):
    """Yield (heads, rows) of texts on each probe, check of the behaviour and kernel. The second cell is "ok", "fail" or "-".

    But for kernels: of one forward pass on the GPU, the longest first. No table is without rows.
    """
    check = check or {}
    kernels = [
        (str(each["calls"]), f"{each['microseconds']:.1f}", each["name"])
        for each in (check.get("work") or {}).get("kernels") or []
    ]
    behaviour = [
        (SHOWN.get(name, name), _word(entry, not entry["note"]), entry["complaint"] or entry["note"] or "")
        for name, entry in (check.get("behaviour") or {}).items()
    ]
    found = {
        ("probe", "right", "max error", "PyTorch's", "allowed", "what it is, or why not"): list(
            _probes(check.get("probes") or {})
        ),
        ("behaviour", "right", "remark"): behaviour,
        ("launches", "us", "kernel on the GPU"): kernels,
    }
    yield from ((heads, rows) for heads, rows in found.items() if rows)


def _probes(entries):
    """Yield the rows; the last cell says what a probe is, or what is worth knowing."""
    for name, entry in entries.items():
        figures = [scientific(entry[key]) for key in ("max_error", "eager_error", "allowed")]
        known = BY_NAME.get(name.removesuffix(AT_OWN_SIZE))
        is_reduced = known and known.size == REDUCED and not name.endswith(AT_OWN_SIZE)
        about = f"{known.about}{' (reduced size)' * is_reduced}" if known else ""
        yield name, _word(entry, entry["max_error"] is not None), *figures, entry["complaint"] or entry["note"] or about


def _word(entry, is_right):
    return "fail" if entry["complaint"] else "ok" if is_right else NOTHING
