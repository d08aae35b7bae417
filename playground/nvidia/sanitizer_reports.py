"""What compute-sanitizer prints, as findings: NVIDIA's manual shows its text; nothing describes its XML.

A report is a headline and, further in, what belongs to it, as "at FUNCTION in FILE:LINE" and "by thread (32,0,0) in block
(0,0,0)"; each line begins with nine equals signs.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "========="
RACE = "shared memory race"
_PLACE = r"(?P<function>.+?)[+:](?P<offset>0x[0-9a-fA-F]+)(?: in (?P<file>.+?):(?P<line>\d+))?(?=$|\s)"
_AT = re.compile(rf"at {_PLACE}")
_FRAME = re.compile(rf"Device Frame: ?{_PLACE}")
_WHO = re.compile(r"by thread (?P<thread>\([^)]*\)) in block (?P<block>\([^)]*\))")
_SEVERITY = re.compile(r"(?:error|warning|warn|info): ?(?:\(warp level programming\) ?)?", re.I)
# racecheck reports a race as hazards, byte by byte and with threads, and as an analysis, without them.
_RACE = re.compile(r"Race reported between|Potential \w+ hazard detected at __shared__ \S+ in block (?P<block>\([^)]*\))")
_ACCESS = re.compile(rf"(?P<access>Read|Write) (?:access|Thread (?P<thread>\([^)]*\))) at {_PLACE}")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: ")
_ADDRESS = re.compile(r"(?:Address|Access to) 0x[0-9a-fA-F]+ is (.*)")
_TROUBLES = "Internal Sanitizer Error|Unable to find|not supported|No attachable|terminated before first|Detected overflow"
_TROUBLE = re.compile(_TROUBLES, re.I)


class Unreadable(Exception):
    """A report of a form that is not known; the text is its headline."""


@dataclass(frozen=True)
class Site:
    """An instruction: the function it is in (with template arguments), its offset there, file and line where known."""

    function: str
    offset: str
    file: str | None
    line: int | None

    @classmethod
    def of(cls, match):
        return cls(_without_arguments(match["function"]), match["offset"], match["file"], int(match["line"] or 0) or None)

    def is_in(self, file):
        return self.file is not None and (self.file == str(file) or (Path(self.file).name == self.file == Path(file).name))

    @property
    def where(self):
        """Return what tells it from other places in the source."""
        return (self.file, self.line) if self.line else (self.function, self.offset)


@dataclass(frozen=True)
class Finding:
    """One mistake of one kernel. `sites` are where it happened, callers behind what they call; `count` is of like reports."""

    tool: str
    what: str
    kernel: str
    sites: tuple
    block: str | None
    thread: str | None
    count: int = 1

    @property
    def alike(self):
        """Return what it shares with the reports that count as one with it: the kind of mistake, the kernel, the places."""
        kind = self.what.partition(": ")[0]
        return kind, self.kernel, frozenset(site.where for site in (self.sites if kind == RACE else self.sites[:1]))

    def concerns(self, kernels, file):
        """Return whether it is about one of these kernels, or about a line of the file."""
        words = {word for site in self.sites for word in re.findall(r"\w+", site.function)}
        return bool(words & set(kernels)) or any(site.is_in(file) for site in self.sites)

    def describe(self, file):
        """Return one line, beginning with the place: the innermost in the file, or else the innermost that has a line."""
        known = sorted((site for site in self.sites if site.line), key=lambda site: not site.is_in(file))
        place = f"{Path(known[0].file).name}:{known[0].line}: " if known else ""
        who = [f"{name} {value}" for name, value in (("block", self.block), ("thread", self.thread)) if value]
        more = f", {self.count - 1} more like it" if self.count > 1 else ""
        return place + ", ".join([f"{self.what}; kernel {self.kernel}", *who]) + f" ({self.tool}{more})"


@dataclass(frozen=True)
class Log:
    """What one tool printed: its findings, those alike counted as one; troubles of its own; whether it came to its end."""

    findings: list
    troubles: list
    is_complete: bool


def read(tool, text):
    """Return the Log in the text of a tool. Raises Unreadable for a report that looks like a finding and is not understood."""
    findings, troubles, complete = {}, [], False
    for headline, lines in _reports(text):
        if _SUMMARY.match(headline):
            complete = True
        elif _TROUBLE.search(headline):
            troubles.append(headline)
        else:
            for finding in _findings(tool, headline, lines):
                known = findings.get(finding.alike, dataclasses.replace(finding, count=0))
                spokesman = known if known.thread or not finding.thread else finding  # the first that names its thread
                findings[finding.alike] = dataclasses.replace(spokesman, count=known.count + 1)
    return Log(list(findings.values()), troubles, complete)


def _reports(text):
    reports = []
    for line in text.splitlines():
        if line.startswith(PREFIX):
            body = line.removeprefix(PREFIX)
            if body.strip() and not body.startswith("  "):
                reports.append((body.strip(), []))
            elif body.strip() and reports:
                reports[-1][1].append(body.strip())
    return reports


def _findings(tool, headline, lines):
    """The findings of a report: none where it is about no kernel, several where more than two accesses race."""
    headline = headline[match.end() :] if (match := _SEVERITY.match(headline)) else headline
    if race := _RACE.match(headline):
        accesses = [match for match in map(_ACCESS.search, (headline, *lines)) if match]
        if len(accesses) < 2:
            raise Unreadable(headline)
        return [_race(tool, race["block"], accesses[0], other) for other in accesses[1:]]
    who = next(filter(None, map(_WHO.match, lines)), None)
    at = next(filter(None, map(_AT.match, lines)), None)
    if who is None:
        return []
    if at is None:
        raise Unreadable(headline)
    sites = tuple(map(Site.of, [at, *filter(None, map(_FRAME.match, lines))]))
    addresses = [match[1] for match in map(_ADDRESS.match, lines) if match]
    addresses += [re.sub(r" at 0x[0-9a-fA-F]+", "", line[7:]) for line in lines if line.startswith("and is ")]
    what = ": ".join(filter(None, [headline.rstrip("."), ", ".join(addresses)]))
    return [Finding(tool, what, sites[-1].function, sites, who["block"], who["thread"])]


def _race(tool, block, first, second):
    site, other = Site.of(first), Site.of(second)
    by = f" by thread {second['thread']}" if second["thread"] else ""
    place = f"in line {other.line}" if other.line else f"at {other.function}+{other.offset}"
    accesses = f"{first['access'].lower()} here and {second['access'].lower()}{by} {place}"
    what = f"{RACE}: {accesses}, no barrier between the two"
    return Finding(tool, what, site.function, (site, other), block, first["thread"])


def _without_arguments(function):
    """'fused_tail<(int)1024>' of 'void fused_tail<(int)1024>(const float *)'."""
    depth = 0
    for at, character in enumerate(function):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0 and at and not function.startswith("[clone "):
            function = function[:at]
            break
    return function.removeprefix("void ").strip()
