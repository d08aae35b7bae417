"""The verdict that follows from what was seen of a variant, under both standards."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from playground.judge.checks import DROP_IN, FORWARD
from playground.judge.classes import FLOAT32
from playground.judge.failure import WorkerFailure
from playground.record import ERROR, FAIL, FORWARD_ONLY, PASS, UNCHECKED, Caveat, Judgment, Result, Standard, Standards
from playground.serial import values

if TYPE_CHECKING:
    from playground.worker.referee_client import RefereeClient

UNJUDGED = Judgment(verdict=ERROR, reason=None, check=None)  # before anything is known
# A finding of the emulator's.
SHAPED = r"output never written: element \[[\d, ]*\] of a result of shape (?P<shape>\(.*?\)).*"
UNWRITTEN = re.compile(rf"(?P<place>.*?:\d+: )?(?P<rest>{SHAPED})")
WITH_SET = "make it smaller with --set"
FIRST = "wrong-gradient"  # of the tags of caveats

J = TypeVar("J", bound=Judgment)


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a variant, in one sentence, and the least standard that it costs: FORWARD, DROP_IN, or None."""

    tag: str
    text: str
    costs: str | None
    line: int | None = None


def conclude(known: J, complaints: Sequence[Complaint]) -> J:
    """Return the judgment of all complaints: the first of those that cost most, with the number of the others."""
    kinds: dict[tuple[str, str | None], list[Complaint]] = {}
    for each in complaints:
        kinds.setdefault((each.tag, each.costs), []).append(each)
    found = ((one, f" (and in {len(more)} more check{'s' * (len(more) > 1)})" * bool(more)) for one, *more in kinds.values())
    told = [replace(one, text=one.text + others) for one, others in found]
    ordered = sorted(told, key=lambda each: ((FORWARD, DROP_IN, None).index(each.costs), each.tag != FIRST))
    fatal = [each for each in ordered if each.costs == FORWARD]
    against = {"forward": [each.text for each in fatal], "drop_in": [each.text for each in ordered if each.costs]}
    fails: Literal["fail", "error"] = ERROR if fatal and all(each.tag == "not-judged" for each in fatal) else FAIL
    standards = Standards(**{name: Standard(verdict=fails if why else PASS, reasons=why) for name, why in against.items()})
    caveats = [Caveat(**values(each)) for each in ordered if each.costs != FORWARD]
    verdict, reason = fails if fatal else FORWARD_ONLY if against["drop_in"] else PASS, next(iter(against["drop_in"]), None)
    return replace(known, verdict=verdict, reason=reason, details="", standards=standards, caveats=caveats)


def permitted_to(result: Result) -> str | float | None:
    """Return what is permitted to a variant beyond the strict limit, as `declared` of worker.referee's requests; or None."""
    kind, accepted = (result.accuracy.kind, result.accuracy.accepted) if result.accuracy else (None, None)
    return accepted or (FLOAT32 if kind == FLOAT32 else result.variant_precision)


def ended(known: J, verdict: Literal["fail", "error", "skipped"], reason: str, details: str = "") -> J:
    """Return what is known, with a verdict under both standards."""
    standard = Standard(verdict=verdict, reasons=[reason])
    both = Standards(forward=standard, drop_in=standard)
    return replace(known, verdict=verdict, reason=reason, details=details, standards=both)


def failed(known: J, failure: WorkerFailure) -> J:
    """Return an error of a variant that ended a request without a result, "fail" where the emulator found a mistake."""
    if failure.is_finding:
        return found(known, [str(failure)])
    return ended(known, ERROR, str(failure), failure.details)


def found(known: J, findings: list[str]) -> J:
    """Return the verdict on mistakes that were seen in the variant's kernels, one line each."""
    seen = replace(known, findings=[*known.findings, *findings], check=known.check or UNCHECKED)
    return ended(seen, FAIL, findings[0])


def doubted(result: Result) -> Result:
    """Return the result; an error if the requested compute-sanitizer did not run."""
    problem = result.sanitizer and result.sanitizer.problem
    return ended(result, ERROR, f"compute-sanitizer: {problem}") if problem else result


def with_shapes(failure: WorkerFailure, referee: "RefereeClient") -> WorkerFailure:
    """Return the failure with what the referee knows of it: a shape unlike the original's, and constants for `--set`."""
    if WITH_SET in str(failure) and referee.smaller:
        settings = " ".join(f"{name}={value}" for name, value in referee.smaller.items())
        reason = str(failure).replace(WITH_SET, f"{WITH_SET} {settings}")
        return WorkerFailure(reason, failure.details, failure.is_finding, failure.role)
    match = UNWRITTEN.match(str(failure)) if failure.is_finding else None
    shapes = [tuple(shape) for shape in referee.prepared("own").get("shapes", [])] if match else []
    if not match or match["shape"] in map(str, shapes):
        return failure
    differ = f"a result has the shape {match['shape']}, and the original's {', '.join(map(str, shapes))}"
    return WorkerFailure(f"{match['place'] or ''}{differ}; {match['rest']}", failure.details, is_finding=True)
