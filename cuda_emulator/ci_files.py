"""What continuous integration and editors read: JUnit's XML, a case for each thing judged, and SARIF 2.1.0."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

PASSED, FAILURE, ERROR, SKIPPED = "passed", "failure", "error", "skipped"  # outcomes of a Case: JUnit's elements
LEVELS = ("error", "warning", "note")  # of a Notice: SARIF's
NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
AT_LINE = re.compile(r"(?P<file>[^\n:]+):(?P<line>[1-9]\d*): (?P<text>.*)", re.DOTALL)
ROOT = "SRCROOT"


@dataclass(frozen=True)
class Notice:
    """Something to mend or to know, at a line of a file; None where no line or no file is known."""

    rule: str
    text: str
    level: str
    file: Path | None = None
    line: int | None = None


@dataclass(frozen=True)
class Case:
    """What was judged, in a group such as its model, and how that ended, one of the outcomes."""

    name: str
    group: str
    outcome: str
    message: str = ""
    details: str = ""
    seconds: float = 0.0
    notices: tuple[Notice, ...] = field(default=())


def at_line(complaint):
    """Return (file, line, text) of a text such as 'FILE:LINE: text'; (None, None, the text) of another."""
    found = AT_LINE.match(complaint)
    return (Path(found["file"]), int(found["line"]), found["text"]) if found else (None, None, complaint)


def junit(tool, cases):
    """Return JUnit's XML of the cases, as text."""
    counts = {"tests": len(cases)}
    counts |= {f"{word}s": sum(each.outcome == word for each in cases) for word in (FAILURE, ERROR)}
    counts |= {SKIPPED: sum(each.outcome == SKIPPED for each in cases), "time": f"{sum(each.seconds for each in cases):.3f}"}
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", {"name": tool} | {key: str(value) for key, value in counts.items()})
    for case in cases:
        names = {"classname": _xml(case.group), "name": _xml(case.name), "time": f"{case.seconds:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", names)
        if case.outcome != PASSED:
            ElementTree.SubElement(element, case.outcome, message=_xml(case.message)).text = _xml(case.details) or None
        if told := "\n".join(f"{each.rule}: {each.text}" for each in case.notices if each.text != case.message):
            ElementTree.SubElement(element, "system-out").text = _xml(told)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text):
    """A text without the characters that no XML may have."""
    return NOT_IN_XML.sub("\ufffd", text)


def sarif(tool, cases, root):
    """Return SARIF 2.1.0 of the cases' notices, as text. Paths below the folder `root` are relative to it, as GitHub wants."""
    notices = [notice for case in cases for notice in case.notices]
    rules = list(dict.fromkeys(notice.rule for notice in notices))
    results = [_sarif_result(notice, rules, Path(root).resolve()) for notice in notices]
    driver = {"name": tool, "rules": [{"id": rule} for rule in rules]}
    bases = {ROOT: {"uri": f"{Path(root).resolve().as_uri().rstrip('/')}/"}}
    run = {"tool": {"driver": driver}, "originalUriBaseIds": bases, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _sarif_result(notice, rules, root):
    result = {"ruleId": notice.rule, "ruleIndex": rules.index(notice.rule), "level": notice.level}
    result["message"] = {"text": notice.text}
    if notice.file:
        uri, place = Path(notice.file).resolve().as_uri(), {}
        base = f"{root.as_uri().rstrip('/')}/"
        place["artifactLocation"] = {"uri": uri.removeprefix(base), "uriBaseId": ROOT} if uri.startswith(base) else {"uri": uri}
        if notice.line:
            place["region"] = {"startLine": notice.line}
        result["locations"] = [{"physicalLocation": place}]
    return result
