"""What opens below a variant's name: why it is fast, what was found, figures of compiler and emulator, its source."""

import re
from pathlib import Path

from playground import catalog
from playground.report import checks, facts, terminal
from playground.report.explanation import docstring, sections
from playground.report.figures import baseline_name, gradients_unsupported, headline, labelled, timing_notes
from playground.report.page import sources, verdicts
from playground.report.text import NOTHING, with_unit

PTXAS = ("registers", "spill_stores", "spill_loads", "stack", "shared")
OTHER_PARTY = re.compile(r"; the other party is (.+?) \(line (\d+)(?:, called from line \d+)*\)\s*$")


def shown(identity, result, path, stale, first=None, with_source=True):
    """Return the values of variant.html for a result whose file is at `path`, which may be None; `stale`: document.is_stale.

    `first` is the id of the place where the same file was shown already: at another size, for example. Without `with_source`
    only the lines around findings are shown.
    """
    found = findings_at_lines(result, path) if path else []
    lines = [(line, without_folders(note, path), f"{identity}-line-{n}") for n, (line, note) in enumerate(found, 1)]
    title, explained = sections(documentation(path) or "\n")
    best, ratio = headline(result)
    check = result["check"] or {}
    source = None
    if path and path.is_file() and (lines or (with_source and not first)):
        text = path.read_text(encoding="utf-8", errors="replace")
        source = sources.highlighted(text, lines, None if with_source else sources.AROUND)
    return {
        "id": identity,
        "name": result["variant"],
        # Without the names in front and the full stop behind, which stand beside it anyway.
        "title": re.sub(r"^\w+(?:, \w+| on the CPU)?: ", "", title).rstrip("."),
        "verdict": verdicts.mark(result["verdict"]),
        "time": with_unit(result["time_ms"]["median"], " ms") if result["time_ms"] else "",
        "speedup": f"{labelled(with_unit(ratio['ratio'], 'x'), result)} over {baseline_name(best)}" if ratio else "",
        "reason": without_folders(result["reason"] or "", path),
        "details": without_folders(result.get("details") or result.get("printed") or "", path),
        "findings": lines,
        "unplaced": [without_folders(text, path) for text in result.get("findings") or [] if text != result["reason"]],
        "first": first,
        "explanation": explained,
        "ptxas": _ptxas(result),
        "notes": list(timing_notes(result)),
        "facts": list(_facts(result)),
        "time_heads": ["timed, or over", *(head.replace("\n", " ") for head in terminal.TIMES[1:])],
        "times": [[cell.plain for cell in row.values()] for row in terminal.time_rows(result) if row[""].plain],
        "errors": _errors(check),
        "checked": [(heads, [list(map(_cell, row)) for row in rows]) for heads, rows in checks.tables(check)],
        "source": source,
        "is_open": result["verdict"] in ("fail", "error") or bool(lines),
        # Of a file elsewhere the name alone, since the page may be shown around.
        "source_name": str(path.relative_to(catalog.ROOT) if path.is_relative_to(catalog.ROOT) else path.name) if path else "",
        "stale": stale,
    }


def _cell(text):
    return verdicts.mark(text) if text in ("ok", "fail", NOTHING) else text


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
    """Return (of what, its errors, what is wrong) of the outputs, then of each gradient."""
    gradients = check.get("gradients") or {}
    compared = {"outputs": check} if check.get("allowed") is not None else {}
    if gradients_unsupported(gradients) is None:
        compared |= {f"gradient of {name}": each for name, each in gradients.items()}
    return [(name, verdicts.errors(each), each.get("complaint") or "") for name, each in compared.items()]


def _ptxas(result):
    """Return rows of what nvcc said of each kernel; none where it was not asked or said nothing."""
    found = result.get("ptxas") or {}
    if result["backend"] != "cuda" or "unknown" in found:
        return []
    return [
        (architecture, kernel["name"], *(f"{kernel[key]:,}" for key in PTXAS))
        for architecture, kernels in found.items()
        for kernel in kernels
    ]


def without_folders(text, path=None):
    """Return a reason or a traceback without the folders of this machine."""
    for folder in (path and path.parent, catalog.ROOT, Path.home()):
        text = text.replace(f"{folder}/", "") if folder else text
    return re.sub(r"(?<![\w/.:])/(?:[\w.@+-]+/)+(?=[\w.@+-]+:\d)", "", text)
