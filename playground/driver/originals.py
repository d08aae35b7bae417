"""The processes in which the original runs beside a variant: its baselines, and the control."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from playground.clock import GRAPHED, step_of
from playground.clock.baselines import distinct, names_for, under
from playground.clock.outer import CONTROL
from playground.clock.race import Side
from playground.driver.task import Options, Task
from playground.judge.evaluation import judge
from playground.report.figures import baseline_name
from playground.report.progress import Progress
from playground.worker import WorkerFailure, WorkerProcess, pause_others, sandbox
from playground.worker.referee_client import RefereeClient
from playground.worker.replies import Started

OUT_OF_MEMORY = re.compile("OutOfMemoryError|out of memory", re.IGNORECASE)
# Of GPU memory, or what eager PyTorch takes if that is less: where cuDNN finds less, it chooses other algorithms.
ROOM_MIB = 4096


class Original:
    """A process of `make()` in which the original is loaded, by `load(worker)`, when first needed and after a failure."""

    def __init__(self, make: Callable[[], WorkerProcess], load: Callable[[WorkerProcess], Any]) -> None:
        self.worker: WorkerProcess | None = None
        self._is_loaded = False
        self._make, self._load = make, load
        self._started: dict[tuple[str, str], Started] = {}

    def start(self) -> WorkerProcess:
        """Return the process, which is started if there is none: before there is anything that it could load, say."""
        if self.worker and self.worker.has_ended:  # under the outer clock, say
            self.close()
        self.worker = self.worker or self._make()
        return self.worker

    def ask(self, request: str, **arguments: Any) -> Any:
        try:
            worker = self.start()
            if not self._is_loaded:
                self._load(worker)
                self._is_loaded = True
            return worker.ask(request, **arguments)
        except WorkerFailure:
            self.close()
            raise

    def resumes(self, side: Side) -> bool:
        """Return whether the process has run the side before, which is ready then."""
        self.start()
        if started := self._started.get((side.name, side.mode)):
            side.resume(started)
        return bool(started)

    def warm_up(self, side: Side) -> None:
        if not self.resumes(side):
            started = side.start()
            if not side.mode.startswith(GRAPHED):  # a worker keeps graphs of one mode only: each time one is captured
                self._started[side.name, side.mode] = started

    def close(self) -> None:
        if self.worker:
            self.worker.close()
        self.worker, self._is_loaded, self._started = None, False, {}


class Originals:
    """Baselines and control of one model and size, started when first needed; `unavailable` says, by mode, why one is not."""

    def __init__(
        self,
        task: Task,
        arguments: dict[str, Any],
        referee: RefereeClient,
        options: Options,
        progress: Progress,
        room: sandbox.Room | None = None,
    ) -> None:
        self._task, self._arguments, self._referee, self._options = task, arguments, referee, options
        self._progress, limit, on_cpu = progress, options.time_limit, task.place == "cpu"
        # What torch.compile makes for the CPU goes on beside a GPU's timings.
        self.baselines = Original(lambda: WorkerProcess("baselines", limit, bears_a_gpu=on_cpu), self._load)
        self.control = Original(lambda: WorkerProcess("candidate", limit, room=room), self._load_and_judge)
        self.control_fails: str | None = None
        self.unavailable: dict[str, dict[str, str]] = {}
        self.are_given_up = False

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return the processes that are timed beside the variant's."""
        return [each.worker for each in (self.baselines, self.control) if each.worker]

    def start_baselines(self, mode: str, not_graphed: Sequence[str] = (), settings: Sequence[str] = ()) -> list[Side]:
        """Return a Side for each baseline that runs, under the settings, too; those in `not_graphed` without a graph."""
        given, place, step = self._options, self._task.place, step_of(mode)
        unavailable = self.unavailable.setdefault(mode, dict(self.unavailable.get(step, {})))
        names = names_for(place, step, given.quick, given.max_autotune, given.precision != "default")
        names = under(settings, distinct(names, self._referee.has_layouts, self._referee.uses_tf32))
        while not self.are_given_up:  # one that fails takes the process of all with it
            modes = {name: step if name in not_graphed else mode for name in names if name not in unavailable}
            sides = [Side(name, own, place, self.baselines.ask) for name, own in modes.items()]
            if all(self._start_baseline(side, unavailable) for side in sides):
                return sides
        return []

    def _start_baseline(self, side: Side, unavailable: dict[str, str]) -> bool:
        names = self._task.names(baseline_name(side.name))
        if self.are_given_up or self.baselines.resumes(side):
            return True
        self._progress.started("baseline", *names)
        try:
            self.baselines.warm_up(side)
        except WorkerFailure as failure:
            unavailable[side.name] = str(failure)
        outcome = "not needed" if self.are_given_up else unavailable.get(side.name, "ready")
        self._progress.finished("baseline", *names, outcome)
        return side.name not in unavailable or self.are_given_up

    def start_control(self, mode: str, not_graphed: Sequence[str] = ()) -> Side | None:
        """Return the Side of the original, judged as a variant's is and graphed as eager is; None where it fails."""
        side = Side(CONTROL, step_of(mode) if "eager" in not_graphed else mode, self._task.place, self.control.ask)
        try:
            if not self.control_fails:
                self.control.warm_up(side)
        except WorkerFailure as failure:
            self.do_without_control(str(failure))
        return None if self.control_fails else side

    def do_without_control(self, reason: str) -> None:
        """End the control: where one process could not run the original, the next one will not."""
        self.control_fails = reason
        self.control.close()

    def _load(self, worker: WorkerProcess) -> None:
        worker.ask("load", **self._arguments)

    def _load_and_judge(self, worker: WorkerProcess) -> None:
        loaded = replace(worker.ask("load", variant=None, **self._arguments), precision=None, weights="by name")
        judged = judge(worker, self._referee, self._task.place, loaded, with_mutants=False)
        if judged.failure:
            raise judged.failure

    def forget_what_found_no_memory(self, step: str) -> list[str]:
        """Forget what found no memory in a step. Returns the baselines' names, "floor" for what counts work."""
        found = [name for name, why in self.unavailable[step].items() if OUT_OF_MEMORY.search(why)]
        for name in found:
            del self.unavailable[step][name]
        if OUT_OF_MEMORY.search(self.control_fails or ""):
            self.control_fails = None
        return found

    def short_of_memory(self, baselines: Sequence[Side]) -> str | None:
        """Return why PyTorch may be slower than it is, beside a variant's process that stands still, or None."""
        eager = next((side for side in baselines if side.name == "eager"), None)
        if not eager or self._task.place != "cuda":
            return None
        free, needed = self.baselines.ask("free_memory")["mib"], min(ROOM_MIB, eager.peak_mib or 0.0)
        said = f"only {free:.3g} MiB of GPU memory are free beside it, PyTorch may need {needed:.3g}"
        return said if free < needed else None

    @contextlib.contextmanager
    def alone(self, workers: Sequence[WorkerProcess] = (), beside_compilers: bool = False) -> Iterator[None]:
        """While it lasts, nothing else of this run runs but, beside a GPU, torch.compile, or `beside_compilers`."""
        timed = {*workers, self._referee.worker, *self.workers}
        with pause_others(timed, self._task.place == "cuda", beside_compilers), self._referee.reserved():
            yield

    def give_up(self) -> None:
        """End what is being started: nobody needs it any more."""
        self.are_given_up = True
        for worker in self.workers:
            worker.kill()

    def close(self) -> None:
        self.baselines.close()
        self.control.close()
