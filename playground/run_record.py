"""The JSON document of a run, as dataclasses: its environment, the results, what a suite of them comes to.

`python -m playground.run_record` prints the form of all records.
"""

import dataclasses
import datetime
import sys
from dataclasses import dataclass, field
from typing import Any

from playground import record, subject
from playground.record import Ratio, Result
from playground.serial import LONGEST, OMITTED, DocumentError, Rule, Text, described, load, require, shown

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class CpuDetails:
    """The processor's cores, its widest instructions, and the threads that PyTorch takes there."""

    cores: int | None
    logical_cores: int | None
    usable_logical_cores: int | None
    capability: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a document was measured on, with which options, and how: `seconds` of the whole run and of all `requests` to
    workers by name, the `timeline` of what was done, the two seeds, how many workers of a cluster were lost.

    `complete` says whether there is a result of each task, `joined` of which runs a recorded document consists.
    """

    date: str
    git: dict[str, Any] | None = None
    os: str | None = None
    python: Text | None = None
    torch: Text | None = None
    cuda: Text | None = None
    cudnn: str | None = None
    nvcc: str | None = None
    driver: Text | None = None
    gpu: Text | None = None
    gpus: list[dict[str, Any]] | None = None
    cpu: Text | None = None
    cpu_details: CpuDetails | None = None
    memory_mib: int | None = None
    options: dict[str, Any] | None = None
    sandbox: str | None = None
    seed: int | None = field(default=None, metadata=OMITTED)
    probe_seed: int | None = field(default=None, metadata=OMITTED)
    timeline: list[dict[str, Any]] | None = field(default=None, metadata=OMITTED)
    requests: dict[str, float] | None = field(default=None, metadata=OMITTED)
    seconds: float | None = field(default=None, metadata=OMITTED)
    lost_workers: int | None = field(default=None, metadata=OMITTED)
    joined: str | None = field(default=None, metadata=OMITTED)
    complete: bool | None = None

    def verify(self, where: str) -> None:
        try:
            _ = self.moment
        except ValueError:
            require(False, f"{where}.date", "an ISO 8601 date", self.date)

    @property
    def moment(self) -> datetime.datetime:
        """Return the moment at which a document was recorded; without a time zone it is taken as UTC."""
        moment = datetime.datetime.fromisoformat(self.date.replace("Z", "+00:00"))
        return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


@dataclass(frozen=True, kw_only=True)
class MeanRatio(Ratio):
    """Geometric means of ratios and of the ends of their intervals, over so many pairs."""

    pairs: int


@dataclass(frozen=True, kw_only=True)
class Over:
    """KernelBench's fast_p for each p, over one baseline, and the geometric mean."""

    fast_p: dict[str, float]
    geometric_mean: MeanRatio


@dataclass(frozen=True, kw_only=True)
class SuiteStandard:
    """How many pairs are correct by a standard, how many of them were timed, and by how much they are faster."""

    correct: int
    timed: int
    fast_0: float
    over: dict[str, Over]


@dataclass(frozen=True)
class Right:
    """Of the sizes that a problem lists, so many ran and were right."""

    right: int
    ran: int
    listed: int


@dataclass(frozen=True, kw_only=True)
class Cases:
    """A solution at all sizes that its problem lists, and what the problem's own check accepts."""

    problem: str
    solution: str
    test: Right
    benchmark: Right
    checked: int
    accepted: int
    ranking: str
    geometric_mean_ms: float | None
    over_eager: float | None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What a run over many pairs comes to."""

    pairs: int
    problems_without_solution: list[str]
    verdicts: dict[str, int]
    caveats: dict[str, int]
    accuracy: dict[str, int]
    lower_precision: int
    standards: dict[str, SuiteStandard]
    cases: list[Cases] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Against:
    """An earlier document that this one was compared with, and what is slower or less right than then (`regressions`)."""

    file: str
    date: str
    margin: float
    counts: dict[str, int]
    not_in_this_run: list[str]
    regressions: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Document:
    """What --json writes."""

    schema: int
    environment: Environment
    results: list[Result]
    suite: Suite | None = field(default=None, metadata=OMITTED)
    against: Against | None = field(default=None, metadata=OMITTED)


def load_document(value: Any) -> Document:
    """Return the Document that a value of JSON is. Raises DocumentError, which names the path, and the variant."""
    require(isinstance(value, dict), "document", "an object", value)
    schema = value.get("schema", SCHEMA)  # if it is missing, this is said below
    if isinstance(schema, bool) or schema != SCHEMA:
        raise DocumentError(f"schema {schema!r:.{LONGEST}}: this program reads schema {SCHEMA}")
    results = value.get("results")
    read = [load_result(each, f"results[{index}]") for index, each in enumerate(results if isinstance(results, list) else ())]
    document = load(Document, value | ({"results": []} if read else {}))
    return dataclasses.replace(document, results=read)


def load_result(value: Any, where: str = "result") -> Result:
    """Return the Result that a value of JSON is. Raises DocumentError, which names the path, and the variant."""
    if isinstance(value, dict) and all(isinstance(value.get(key), str) and value[key] for key in ("model", "variant")):
        where = f"{where} ({shown(value['model'])}/{shown(value['variant'])})"
    return load(Result, value, where)


if __name__ == "__main__":
    known = [each for module in (subject, record, sys.modules[__name__]) for each in vars(module).values()]
    kinds = dict.fromkeys(each for each in known if isinstance(each, type) and each is not Rule)
    print("\n".join(described(kinds)).strip())
