"""What the checks of a variant found: a few lines for every reader, and all of it for whoever asks for an explanation."""

import inspect

from playground.judge.probes import AT_OWN_SIZE, PROBES
from playground.report.figures import NOTHING, scientific, with_unit

NOT_RUN = "not run: "
DOUBLE = "double()"
EXCEPTIONS = ("refuses: ", "raises ")  # begin a note on what the variant raised
SHOWN = {"a late producer": "stream ordering", "a side stream": "another stream"}


def lines(check):
    """(label, text) of the probes, the behaviour and the work of a result's check, as short as they can be."""
    check = check or {}
    for label, key in (("probes", "probes"), ("behaviour", "behaviour")):
        if check.get(key):
            yield label, _tally(check[key])
            for name, entry in check[key].items():
                if entry["note"] and not entry["note"].startswith((NOT_RUN, *EXCEPTIONS)):
                    yield "note", f"{name}: {entry['note']}"
    if check.get("work"):
        yield "work", work(check["work"])


def work(found):
    """One line on the variant's own kernels."""
    if found["note"]:
        return found["note"]
    share = found.get("own_share")
    calls = "1 call" if found["own_calls"] == 1 else f"{found['own_calls']} calls"
    text = f"{calls} of its own code in a forward pass, and the result depends on it"
    return text if share is None else f"{text}; its kernels take {with_unit(100 * share, '%')} of the GPU's time"


def sanitizer(examination):
    """(label, text) of what compute-sanitizer saw; nothing where it was not asked."""
    if not examination:
        return
    tools, passes = ", ".join(examination["tools"]), " and ".join(examination["passes"]) or "nothing"
    if examination["problem"]:
        yield "sanitizer", examination["problem"]
    elif tools:
        kernels = ", ".join(examination["kernels"])
        found = f"{len(examination['findings']) or 'no'} mistake{'' if len(examination['findings']) == 1 else 's'}"
        size = "".join(f", {name}={value}" for name, value in examination.get("settings", {}).items())
        yield "sanitizer", f"{tools}: {found} in {kernels} ({passes}{size})"
        others = {tool: counts["of_other_kernels"] for tool, counts in examination["tools"].items()}
        if reports := ", ".join(f"{tool} {count}" for tool, count in others.items() if count):
            yield "note", f"reports on kernels that are not the variant's, which do not count: {reports}"
    for note in examination["notes"]:
        yield "note", f"sanitizer: {note}"


def sorted_out(entries):
    """{"right", "wrong", "not run", "noted": [names of probes, or of checks of the behaviour]}.

    "noted" are those with a remark instead of a result, such as an exception that the variant may raise there.
    """
    found = {"right": [], "wrong": [], "not run": [], "noted": []}
    for name, entry in entries.items():
        note = entry.get("note") or ""
        if entry.get("complaint"):
            found["wrong"].append(name)
        elif note.startswith(NOT_RUN):
            found["not run"].append(name)
        else:
            found["noted" if note and entry.get("max_error") is None else "right"].append(name)
    return found


def refusals(check):
    """'refuses autocast, torch.compile': where the variant raised an exception, as it may there. None where it did nowhere.

    Without double(), which nearly all refuse: `refuses_double` is for one remark on all of them.
    """
    names = [name for name in _refused(check) if name != DOUBLE]
    return f"refuses {', '.join(names)}" if names else None


def refuses_double(check):
    return DOUBLE in _refused(check)


def _refused(check):
    entries = {**((check or {}).get("probes") or {}), **((check or {}).get("behaviour") or {})}
    return [name for name in sorted_out(entries)["noted"] if entries[name]["note"].startswith(EXCEPTIONS)]


def _tally(entries):
    """'17 right; refused by an exception, as it may: torch.compile; not run: a CUDA graph'."""
    found = sorted_out(entries)
    refused = [name for name in found["noted"] if entries[name]["note"].startswith(EXCEPTIONS)]
    found["noted"] = [name for name in found["noted"] if name not in refused]
    found["refused by an exception, as it may"] = refused
    parts = [f"{word}: {', '.join(map(shown, names))}" for word, names in found.items() if names and word != "right"]
    return "; ".join([f"{len(found['right'])} right", *parts])


def shown(name):
    """Return the name of a check as people read it; that in the JSON stays."""
    return SHOWN.get(name, name)


def explained_probes(check):
    """Rows (probe, "ok", "fail" or "-", error, PyTorch's, allowed, what it is, and what is worth knowing)."""
    for name, entry in ((check or {}).get("probes") or {}).items():
        figures = [scientific(entry[key]) for key in ("max_error", "eager_error", "allowed")]
        yield name, _word(entry, entry["max_error"] is not None), *figures, _remark(entry) or _what(name)


def explained_behaviour(check):
    """Rows (check, "ok", "fail" or "-", what is worth knowing)."""
    for name, entry in ((check or {}).get("behaviour") or {}).items():
        yield name, _word(entry, not entry["note"]), _remark(entry)


def explained_kernels(check):
    """Rows (kernel, launches, microseconds) of one forward pass on the GPU, the longest first."""
    for kernel in ((check or {}).get("work") or {}).get("kernels") or []:
        yield kernel["name"], str(kernel["calls"]), f"{kernel['microseconds']:.1f}"


def _word(entry, is_right):
    if entry["complaint"]:
        return "fail"
    return "ok" if is_right else NOTHING


def _remark(entry):
    return entry["complaint"] or entry["note"] or ""


def _what(name):
    """The first sentence on a probe."""
    if name.removesuffix(AT_OWN_SIZE) not in PROBES:
        return ""
    function, size = PROBES[name.removesuffix(AT_OWN_SIZE)]
    sentence = inspect.getdoc(function).splitlines()[0]
    return f"{sentence} (reduced size)" if size == "reduced" and not name.endswith(AT_OWN_SIZE) else sentence
