"""What the page shows of a variant: its row, and below its name why it is fast, what was found, compiler's figures, source."""

import re
from pathlib import Path

from playground import catalog
from playground.report import facts, figures, terminal
from playground.report.explanation import docstring, sections
from playground.report.page import sources
from playground.report.text import NOTHING, with_unit
from playground.subject import Unknown

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
SIGNS = {GOOD: "✓", BAD: "✗", UNKNOWN: "–"}
STATES = dict.fromkeys(("pass", "ok", "faster", "within"), GOOD)
STATES |= dict.fromkeys(("fail", "error", "slower", "wrong", "wrong:", "beyond"), BAD)
MOSTLY = 0.5  # of the GPU's time, for a variant's own kernels to be called its work
OTHER_PARTY = re.compile(r" here, (thread \S+(?: of block \S+)? .+?) at line (\d+)(?! of)")


def mark(word, state=None):
    """Return a sign, a word and a colour for a verdict, an outcome such as 'faster in fp16', or any word with a `state`."""
    state = state or STATES.get(word.split(" ")[0], UNKNOWN)
    return {"state": state, "sign": SIGNS[state], "text": "not run" if word == NOTHING else word}


def shown(identity, result, path, stale, first=None, with_source=True):
    """Return the values of a row and of variant.html for a result whose file is at `path`, None where that is not known.

    `stale` is document.is_stale, `first` the id where the same file was shown already. Without `with_source` only lines around
    findings are shown.
    """
    from playground.report import error_map  # matplotlib is wanted for a page alone

    found = findings_at_lines(result, path) if path else []
    lines = [(line, without_folders(note, path), f"{identity}-line-{n}") for n, (line, note) in enumerate(found, 1)]
    title, explained = sections(documentation(path) or "\n")
    source, texts = None, figures.texts(result)
    details, drawn = error_map.split(without_folders(result.details or result.printed, path), identity)
    if path and path.is_file() and (lines or (with_source and not first)):
        text = path.read_text(encoding="utf-8", errors="replace")
        source = sources.highlighted(text, lines, None if with_source else sources.AROUND)
    return {
        "id": identity,
        "name": result.variant,
        # Without the names in front and the full stop behind, which stand beside it anyway.
        "title": re.sub(r"^\w+(?:, \w+| on the CPU)?: ", "", title).rstrip("."),
        "verdict": mark(result.verdict),
        "meets": figures.meets(result),
        "checks": _checks(result.checked),
        "build": with_unit(result.build_seconds, " s"),
        "cached": result.build_seconds is not None and not result.built,
        "time": with_unit(result.median_ms, " ms"),
        **{"speedup": texts["speed-up"], "over": texts["over"], "share": texts["of floor"], "outcome": mark(texts["outcome"])},
        "reason": without_folders(result.reason or "", path),
        "details": details,
        "error_map": drawn,
        "findings": lines,
        "unplaced": [without_folders(text, path) for text in result.findings if text != result.reason],
        "first": first,
        "explanation": explained,
        "ptxas": result.ptxas if result.backend == "cuda" and isinstance(result.ptxas, dict) else None,
        "notes": list(figures.timing_notes(result)),
        "facts": list(_facts(result)),
        "time_heads": ["timed, or over", *(head.replace("\n", " ") for head in terminal.TIMES[1:])],
        "times": [list(map(str, row.values())) for row in terminal.time_rows(result) if row[""]],
        "errors": _errors(result.checked),
        "checked": list(facts.tables(result.checked)),
        "source": source,
        "is_open": result.verdict in ("fail", "error") or bool(lines),
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
    reason, name = result.reason or "", re.escape(path.name)
    for text in filter(None, [*(result.findings), reason]):
        place = re.search(rf"(?:^|[\s/\"']){name}:(\d+)", text)
        if not place or any(text in known or known in text for _, known in found):
            continue
        found[int(place[1]), text] = None
        if other := OTHER_PARTY.search(text):
            found[int(other[2]), f"the other party of line {place[1]}: {other[1]} here"] = None
    if reason and not found:
        lines = re.findall(rf'File "(?:[^"\n]*/)?{name}", line (\d+)', result.details or "")
        return [(int(line), reason) for line in lines[-1:]]
    return sorted(found)


def _facts(result):
    yield from ((name, text) for name, text in facts.of(result) if name not in ("reason", "finding", "note"))
    if isinstance(result.ptxas, Unknown):
        yield "registers, spills", f"not known: {result.ptxas.unknown}"
    if result.source_sha256:
        yield "source's SHA-256", result.source_sha256


def _errors(check):
    gradients = check.gradients if isinstance(check.gradients, dict) else {}
    compared = {"outputs": check} if check.allowed is not None else {}
    compared |= {f"gradient of {name}": each for name, each in gradients.items()}
    states = {name: mark("within" if each.is_within else "beyond") for name, each in compared.items()}
    return [(name, each, getattr(each, "complaint", None), states[name]) for name, each in compared.items()]


def _checks(check):
    note, share = (check.work.note, check.work.own_share) if check.work else ("not looked at", None)
    told, gradients, word = check.mutants_rejected, check.gradients, figures.gradient_verdict(check)
    own = note or ("called" if share is None else with_unit(100 * share, "%"))
    if word in (NOTHING, "none"):
        of_gradients = mark("not checked" if word == NOTHING else "forward only")
    else:
        wrong = ", ".join(name for name, found in gradients.items() if not found.is_within)
        of_gradients = mark(f"wrong: {wrong}") if wrong else mark(f"{len(gradients)} right", GOOD)
    return {
        "outputs": _entries(check.probes),
        "gradients": of_gradients,
        "behaviour": _entries(check.behaviour),
        "own kernels": mark(own, UNKNOWN if note or (share is not None and share < MOSTLY) else GOOD),
        "mutants rejected": mark(told or "not counted", GOOD if told and not check.mutants_survived else UNKNOWN),
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
