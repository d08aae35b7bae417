"""How fast a model could be at one size, from the driver's side: the baselines' process counts and measures for it."""

from typing import Any

from playground.clock import step_of
from playground.clock.race import Measured
from playground.driver.originals import Originals
from playground.driver.task import Task
from playground.floor import bound
from playground.record import Bound, Works
from playground.worker import WorkerFailure


class Floor:
    """The work of a model's steps, and the time that it takes at the machine's ceilings, which all timings of a run share."""

    def __init__(self, task: Task, originals: Originals, measured: Measured) -> None:
        self._task, self._originals, self._ceilings = task, originals, measured.ceilings
        self._work: dict[str, Works | None] = {}

    def count(self, step: str) -> Works | None:
        """Return what `baselines.work` says of a step; None where it cannot be counted, with the reason in `unavailable`."""
        if step not in self._work:
            self._work[step] = self._ask(step, "work", name=self._task.model.catalogued_as, counted=step)
        return self._work[step]

    def forget(self, step: str) -> None:
        """Have `count` ask again."""
        del self._work[step]

    def of(self, mode: str, precision: str | float | None) -> tuple[float | None, Bound | None, Works | None]:
        """Return (milliseconds, what binds, Works) of a mode's step; each None where it cannot be counted."""
        step, place = step_of(mode), self._task.place
        work = self.count(step)
        if work and place not in self._ceilings:
            with self._originals.alone():
                ceilings = self._ask(step, "ceilings")
            if ceilings:
                self._ceilings[place] = ceilings
            else:
                work = self._work[step] = None
        if not work or not work.least:
            return None, None, None
        return *bound.floor(work.least, self._ceilings[place], precision), work

    def impossible(self, milliseconds: float, work: Works | None) -> str | None:
        """Return what is wrong with a time in which these bytes cannot have moved; None where nothing is."""
        if not work or not work.certain:
            return None
        rates, on_cpu = self._ceilings[self._task.place], self._task.place == "cpu"
        fastest = max(rates.read_bytes_per_second, rates.copy_bytes_per_second)
        return bound.impossible(milliseconds, work.certain.bytes, fastest, on_cpu)

    def _ask(self, step: str, request: str, **arguments: Any) -> Any:
        try:
            return self._originals.baselines.ask(request, **arguments)
        except WorkerFailure as failure:
            self._originals.unavailable.setdefault(step, {})["floor"] = str(failure)
            return None
