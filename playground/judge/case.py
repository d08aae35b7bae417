"""What is known of one variant so far, and how its process and the referee are asked for more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground import record, untrusted
from playground.judge.checks import BY_NAME, CAVEATS, DROP_IN, FORWARD, OF_SEEDS, SIDE_EFFECTS, WATCHED, check_of
from playground.judge.failure import MOST_REASON, WorkerFailure, remove
from playground.judge.text import Text
from playground.judge.verdict import UNJUDGED, Complaint
from playground.record import UNCHECKED, Accuracy, Check, Entry, Errors, GradientErrors, Judgment, OwnCheck, OwnWork, Probe

if TYPE_CHECKING:
    from playground.worker import WorkerProcess
    from playground.worker.referee_client import RefereeClient
    from playground.worker.replies import Loaded

FIGURES = ("max_error", "allowed", "eager_error", "permitted_error")  # of a comparison


class Case:
    """A variant in its process, and what was seen of it. `complaints` are all that there are so far."""

    def __init__(
        self,
        worker: WorkerProcess,
        referee: RefereeClient,
        place: str,
        loaded: Loaded,
        file: Path | None,
        renew: Callable[[], WorkerProcess] | None,
        accept: float | None,
    ) -> None:
        self.worker = worker
        self.complaints: list[Complaint] = []
        self.peak_mib: float | None = None
        self.probes: dict[str, Probe] = {}
        self._behaviour: dict[str, Entry] = {}
        self._gradients: dict[str, GradientErrors] | record.Unsupported | None = None
        self._worst: Errors = UNCHECKED  # of the problem's own inputs
        self._accuracy: Accuracy | None = None
        self._findings: list[str] = []
        self._work: OwnWork | None = None
        self._own_check: OwnCheck | None = None
        self._mutants: dict[str, Any] = {}
        self._referee = referee
        self._text = Text(file) if file else None
        self._renew, self._accept = renew, accept
        self._weights_differ, self._is_by_seed = loaded.difference, loaded.weights == "by seed"
        self._declared: str | float | None = loaded.precision
        self.outputs = referee.answers(worker).file(f"outputs-{worker.pid}")
        self._uniform: set[str] = set()  # probes on which the outputs are the same everywhere
        self._suspects = sorted(self._text.may_compute_in) if self._text else None  # precisions that it may compute in
        self.diagnosis: list[str] | None = None  # the lines of a picture of the first wrong output
        self._works = False  # whether code of the file's own is seen to be given tensors on the problem's own inputs
        self._left: set[str] = set()  # probes on which it is not
        self._asked_for_backward = False
        watched = WATCHED if place == "cuda" else WATCHED[:1]
        for check in (*SIDE_EFFECTS, *watched):
            self._behaviour[check.name] = Entry()

    def known(self) -> Judgment:
        """Return what was checked so far, without a verdict."""
        check = Check(
            **{name: getattr(self._worst, name) for name in FIGURES},
            gradients=self._gradients,
            probes=self.probes,
            behaviour=self._behaviour,
            work=self._work,
            domain=self._referee.domain,
            reference=self._referee.ways,
            own_check=self._own_check,
            **self._mutants,
        )
        return replace(UNJUDGED, check=check, accuracy=self._accuracy, findings=self._findings)

    def takes(self, probe: str) -> bool:
        """Whether it is a probe for a variant that came by its weights as this one did."""
        return not check_of(probe).parameters if self._is_by_seed else probe != OF_SEEDS

    def crashed(self, failure: WorkerFailure) -> None:
        """Say what ended it after a failure, such as a second call of a variant whose kernel did not build."""
        self.complain("crash", str(failure), FORWARD)
        self.worker = self._renew() if self._renew else self.worker

    def _is_wrong(self, probe: str) -> bool:
        return probe in self.probes and bool(self.probes[probe].complaint)

    def complain(self, tag: str, text: str, costs: str | None) -> None:
        caveat = CAVEATS[tag]
        remedy, text = caveat.remedy if costs == DROP_IN else None, text[:MOST_REASON]
        line = self._text.line_of(caveat.line) if self._text and caveat.line else None
        self.complaints.append(Complaint(tag, f"{text}; {remedy}" if remedy else text, costs, line))

    def _ask(self, what: str, **arguments: Any) -> Any:
        erase(self.outputs.held)  # what an earlier call wrote is no answer
        return self.worker.ask(what, outputs=str(self.outputs.path), **arguments)

    def _ask_on(self, what: str, probe: str, **arguments: Any) -> Any:
        return self._ask(what, inputs=self._referee.inputs(probe), **arguments)

    def _ask_referee(self, what: str, probe: str) -> Any:
        return self._referee.ask(what, probe=probe, file=str(self.outputs.held))

    def _compare(self, what: str, probe: str, **more: Any) -> Any:
        more |= {"suspects": self._suspects} if what == "outputs" else {}
        return self._referee.compare(what, probe, str(self.outputs.held), self._declared, **more)

    def _survive(self, tag: str, circumstance: str | None, check: Callable[[], Any]) -> bool:
        """Do a check that can only cost drop-in, where a crash is a caveat. Returns whether the check came to its end."""
        try:
            check()
            return True
        except WorkerFailure as failure:
            if not is_its_own(failure):
                raise
            self.complain(tag, f"{circumstance}: {failure}" if circumstance else str(failure), DROP_IN)
            if self._renew is None:
                raise
            if failure.is_finding:
                self._findings.append(str(failure))
            self.worker = self._renew()
            return False

    def _note_probe(self, probe: str, note: str | None, complaint: str | None = None) -> None:
        self.probes[probe] = Probe(complaint=complaint, note=note)

    def _note(self, probe: str, note: str | None) -> None:
        self.probes[probe] = replace(self.probes[probe], note=note)

    def _behaved(self, check: str, complaint: str | None, note: str | None) -> None:
        if check in self._behaviour and self._behaviour[check].complaint:
            return
        self._behaviour[check] = Entry(complaint=complaint, note=note)
        if complaint:
            self.complain(BY_NAME[check].caveat.tag, complaint, BY_NAME[check].costs)

    def _has(self, *tags: str) -> bool:
        return any(each.tag in tags for each in self.complaints)

    @property
    def _passed(self) -> list[str]:
        return [name for name, entry in self.probes.items() if entry.max_error is not None and not entry.complaint]


def is_its_own(failure: WorkerFailure) -> bool:
    """Whether a WorkerFailure is the variant's, not the machine's or the judge's."""
    return not (failure.is_of_machine or failure.is_of_judge or failure.role == "referee")


def erase(file: Path) -> None:
    """Erase a file of results, whose memory others of the same size take next; what is no file is removed."""
    if not untrusted.erase(file):
        remove(file)
