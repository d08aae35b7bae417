"""What the page shows of a variant: its row, and below its name why it is fast, what was found, compiler's figures, source."""

import re
from pathlib import Path

from playground import catalog
from playground.report import facts, figures, terminal
from playground.report.explanation import docstring, sections
from playground.report.page import sources
from playground.report.text import NOTHING, with_unit

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
SIGNS = {GOOD: "✓", BAD: "✗", UNKNOWN: "–"}
STATES = dict.fromkeys(("pass", "ok", "faster", "within"), GOOD)
STATES |= dict.fromkeys(("fail", "error", "slower", "wrong", "wrong:", "beyond"), BAD)
MOSTLY = 0.5  # of the GPU's time, for a variant's own kernels to be called its work
OTHER_PARTY = re.compile(r"; the other party is (.+?) \(line (\d+)(?:, called from line \d+)*\)\s*$")


def mark(word, state=None):
    """Return a sign, a word and a colour for a verdict, an outcome such as 'faster in fp16', or any word with a `state`."""
    state = state or STATES.get(word.split(" ")[0], UNKNOWN)
    return {"state": state, "sign": SIGNS[state], "text": "not run" if word == NOTHING else word}


def shown(identity, result, path, stale, first=None, with_source=True):
    """Return the values of a row and of variant.html for a result whose file is at `path`, None where that is not known.

    `stale` is document.is_stale, `first` the id of the place where the same file was shown already: at another size, for
    example. Without `with_source` only the lines around findings are shown.
    """
    found = findings_at_lines(result, path) if path else []
    lines = [(line, without_folders(note, path), f"{identity}-line-{n}") for n, (line, note) in enumerate(found, 1)]
    title, explained = sections(documentation(path) or "\n")
    source, texts = None, figures.texts(result)
    if path and path.is_file() and (lines or (with_source and not first)):
        text = path.read_text(encoding="utf-8", errors="replace")
        source = sources.highlighted(text, lines, None if with_source else sources.AROUND)
    return {
        "id": identity,
        "name": result["variant"],
        # Without the names in front and the full stop behind, which stand beside it anyway.
        "title": re.sub(r"^\w+(?:, \w+| on the CPU)?: ", "", title).rstrip("."),
        "verdict": mark(result["verdict"]),
        "meets": figures.meets(result),
        "checks": _checks(result["check"] or {}),
        "build": with_unit(result["build_seconds"], " s"),
        "cached": result["build_seconds"] is not None and not result["built"],
        "time": with_unit((result["time_ms"] or {}).get("median"), " ms"),
        **{"speedup": texts["speed-up"], "over": texts["over"], "share": texts["of floor"], "outcome": mark(texts["outcome"])},
        "reason": without_folders(result["reason"] or "", path),
        "details": without_folders(result.get("details") or result.get("printed") or "", path),
        "findings": lines,
        "unplaced": [without_folders(text, path) for text in result.get("findings") or [] if text != result["reason"]],
        "first": first,
        "explanation": explained,
        "ptxas": result["backend"] == "cuda" and result.get("ptxas"),
        "notes": list(figures.timing_notes(result)),
        "facts": list(_facts(result)),
        "time_heads": ["timed, or over", *(head.replace("\n", " ") for head in terminal.TIMES[1:])],
        "times": [list(map(str, row.values())) for row in terminal.time_rows(result) if row[""]],
        "errors": _errors(result["check"] or {}),
        "checked": list(facts.tables(result["check"])),
        "source": source,
        "is_open": result["verdict"] in ("fail", "error") or bool(lines),
        # Of a file elsewhere the name alone, since the page may be shown around.
        "source_name": str(path.relative_to(catalog.DATA) if path.is_relative_to(catalog.DATA) else path.name) if path else "",
        "stale": stale,
    }


def documentation(path):
    """Return the docstring of the file at `path`, which may be None; "" where there is none or no such file."""
    try:
        return docstring(path) if path else ""
    except (catalog.CatalogError, OSError, RecursionError, MemoryError):
        return ""


def findings_at_lines(result, path):
    """Return (line, text) of every finding and of a reason or traceback that names a line of the file, in order of lines."""
    found = {}
    reason, name = result.get("reason") or "", re.escape(path.name)
    for text in filter(None, [*(result.get("findings") or []), reason]):
        place = re.search(rf"(?:^|[\s/\"']){name}:(\d+)", text)
        if not place or any(text in known or known in text for _, known in found):
            continue
        found[int(place[1]), text] = None
        if other := OTHER_PARTY.search(text):
            found[int(other[2]), f"the other party of line {place[1]}: {other[1]}"] = None
    if reason and not found:
        lines = re.findall(rf'File "(?:[^"\n]*/)?{name}", line (\d+)', result.get("details") or "")
        return [(int(line), reason) for line in lines[-1:]]
    return sorted(found)


def _facts(result):
    """Yield what else is known; reason, findings and notes stand elsewhere on the page."""
    yield from ((name, text) for name, text in facts.of(result) if name not in ("reason", "finding", "note"))
    if unknown := (result.get("ptxas") or {}).get("unknown"):
        yield "registers, spills", f"not known: {unknown}"
    if result["source_sha256"]:
        yield "source's SHA-256", result["source_sha256"]


def _errors(check):
    """Return [(of what, its errors, is it within)] of the outputs and each gradient."""
    gradients = check.get("gradients") or {}
    compared = {"outputs": check} if check.get("allowed") is not None else {}
    if figures.gradients_unsupported(gradients) is None:
        compared |= {f"gradient of {name}": each for name, each in gradients.items()}
    return [(name, each, mark("within" if figures.is_within(each) else "beyond")) for name, each in compared.items()]


def _checks(check):
    work, gradients = check.get("work") or {"note": "not looked at"}, check.get("gradients")
    told, share, word = check.get("mutants_rejected"), work.get("own_share"), figures.gradient_verdict(check)
    own = work["note"] or ("called" if share is None else with_unit(100 * share, "%"))
    if word in (NOTHING, "none"):
        of_gradients = mark("not checked" if word == NOTHING else "forward only")
    else:
        wrong = ", ".join(name for name, found in gradients.items() if not figures.is_within(found))
        of_gradients = mark(f"wrong: {wrong}") if wrong else mark(f"{len(gradients)} right", GOOD)
    return {
        "outputs": _entries(check.get("probes") or {}),
        "gradients": of_gradients,
        "behaviour": _entries(check.get("behaviour") or {}),
        "own kernels": mark(own, UNKNOWN if work["note"] or (share is not None and share < MOSTLY) else GOOD),
        "mutants rejected": mark(told or "not counted", GOOD if told and not check.get("mutants_survived") else UNKNOWN),
    }


def _entries(entries):
    found = facts.sorted_out(entries)
    if found["wrong"]:
        return mark(f"wrong: {', '.join(found['wrong'])}")
    if noted := [name for name in entries if name in (*found["noted"], *found[facts.REFUSED])]:
        return mark(f"{len(found['right'])} right, noted: {', '.join(noted)}")
    return mark(f"{len(found['right'])} right", GOOD) if found["right"] else mark("not run")


def without_folders(text, path=None):
    """Return a reason or a traceback without the folders of this machine."""
    for folder in (path and path.parent, catalog.DATA, Path.home()):
        text = text.replace(f"{folder}/", "") if folder else text
    return re.sub(r"(?<![\w/.:])/(?:[\w.@+-]+/)+(?=[\w.@+-]+:\d)", "", text)
