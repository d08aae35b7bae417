"""One run: variants are built and checked side by side, and timed one after the other, while all else stands still."""

import collections
import contextlib
import functools
import hashlib
import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import cuda_emulator
from playground.clock.race import Measured, Patience
from playground.driver.originals import OUT_OF_MEMORY
from playground.driver.preparations import told
from playground.driver.session import Session, SharedSession, load_candidate
from playground.driver.task import Options, Task
from playground.judge.footprint import Footprint
from playground.judge.sample import IN_A_RUN
from playground.judge.verdict import UNJUDGED, ended, failed
from playground.machine import build_locks, ptxas
from playground.machine.memory import MEMORY, MOST_JUDGED_AT_ONCE, Processors, builds_at_once, judged_at_once
from playground.record import ERROR, Result, compose
from playground.report.progress import Progress
from playground.room import NoRoom, is_full, no_room_in
from playground.subject import Kernel, Subject, Unknown
from playground.untrusted import new_seed
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess, kill_all, owner, prepare, sandbox, submit
from playground.worker.failures import internal_error
from playground.worker.referee_client import GIVEN, sized_up

S = TypeVar("S", bound=Subject)
Finish = Callable[[Task, Result], None]
LOOK_AGAIN = 0.5  # seconds
SHARED_MEMORY = "/dev/shm"
# Of builds: what judges the first ones comes before, and their model before the next. Beside a thread that waits actively,
# niceness 3 leaves a build a third of a processor, 5 a quarter; 10 and 13 left it a tenth and a twentieth.
NICE, LATER, NICEST = 3, 1, 5
COMPILERS = 2  # of a pair's build: most have a C++ and a CUDA text


class Runner:
    """Runs tasks and gives their Results; `judge_slot`, which runners of a GPU share, is held while a variant is judged."""

    def __init__(self, options: Options, progress: Progress, judge_slot: AbstractContextManager[Any] | None = None) -> None:
        self._options, self._progress = options, progress
        self.seed = new_seed()  # of the models' weights and of what is timed; every worker is told it
        self.probe_seed = new_seed(53)  # of what is judged, which no variant foresees before it draws inputs
        self.measured = Measured(Patience(options.patience([])))
        self._is_alone = judge_slot is None
        self.judge_slot = judge_slot or contextlib.nullcontext()  # is held while a variant is judged, and not while it is timed
        self._ready: dict[tuple[bool, sandbox.Room | None], WorkerProcess] = {}  # {(untimed, sandbox): an idle worker}
        self._taking = threading.RLock()
        self._coming: list[Task] = []  # tasks that are still to be judged in a process of their own, in their order
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._hold = contextlib.ExitStack()  # of all that processes exchange; it is not swept meanwhile
        self._rooms: dict[int, tuple[Task, sandbox.Room]] = {}  # {id(task): (task, its Room)}
        self._making_room = threading.RLock()
        self._shared: dict[Any, SharedSession] = {}  # {group: SharedSession}
        self._footprints: dict[Any, Footprint] = {}
        self._sizing: dict[Any, threading.Lock] = {}  # by group, held by the thread that asks for its Footprint
        self.in_turn = threading.Lock()  # a session holds it while it waits for memory: first come, first served
        self.are_beside = False  # whether several models are judged at once
        self.is_over = False  # nobody needs to wait for anything any more
        self._ahead = ThreadPoolExecutor(1)  # what its thread has started ends with that
        self._compiled: Future[WorkerFailure | None] | None = None  # what came of `begin`
        self._niceness: dict[Path, int] = {}  # of builds, by the path of their model
        self.processors = Processors(builds_at_once())
        self._begun, self._judged, self._most_ahead = threading.Condition(), 0, 0  # how many builds are judged; may run ahead

    def begin(self, tasks: Sequence[Task]) -> None:
        """Begin to compile an only task's texts for the emulator, in a process that starts before a thread waits for a fork."""
        if not (len(tasks) == 1 and tasks[0].place == "emulator" and not self._options.debug):
            return
        (task,), ours = tasks, owner.set(owner.get() or self)
        with contextlib.suppress(WorkerFailure, NoRoom, OSError):  # which is told by the process that loads the file
            content, room = task.variant.path.read_bytes(), self.room(task)
            if room and room.has_builds:
                self.start_ahead(task)
            elif b"load_inline" in content:
                self._progress.started("compile", *task.names())
                worker = WorkerProcess("compiler", self._options.time_limit, UNTIMED, room=room)
                self._compiled = submit(self._ahead, self._compile, task, content, worker)
        owner.reset(ours)

    def _compile(self, task: Task, content: bytes, compiler: WorkerProcess) -> WorkerFailure | None:
        names, path = task.names(), str(task.variant.path)
        failure = None
        with contextlib.suppress(WorkerFailure, NoRoom, OSError):
            with told(functools.partial(self._progress.said, "compile", *names)), compiler:
                _make_emulator(path, self._options.time_limit)
                found = compiler.ask("compile", file=path, content=content.decode("latin-1"))
            failure = WorkerFailure(found.reason, found.details, role="candidate") if found.reason else None
            if not failure:
                self.start_ahead(task)
        self._progress.finished("compile", *names, ERROR if failure else "done")
        return failure

    def begun(self) -> WorkerFailure | None:
        """Return why what `begin` compiles fails, when that is known; None where nothing failed."""
        compiled, self._compiled = self._compiled, None
        return compiled.result() if compiled else None

    def run(self, tasks: Sequence[Task], keep: Callable[[list[Result]], None] = lambda results: None) -> list[Result]:
        """Return one Result a task, in order; a failure is a verdict. `keep` is called with all at each new one."""
        results: dict[int, Result] = {}
        finishing = threading.Lock()  # of those that are finished, by id(task)

        def in_order() -> list[Result]:
            return [results[id(task)] for task in tasks if id(task) in results]

        def finish(task: Task, result: Result) -> None:
            with finishing:
                if self.is_over:  # interrupted: that its worker was ended is no result
                    return
                self._progress.done(*task.names(), result.verdict)
                results[id(task)] = replace(result, phases=self._progress.phases(*task.names()))
                self.close_room(task, keep=result.verdict != ERROR)
                keep(in_order())

        self.measured.patience = Patience(self._options.patience(tasks))
        self._progress.expect(len(tasks))
        self.is_over = False
        if any(self._options.times(task) for task in tasks):
            prepare()
        if len(tasks) > 1:  # the processes of one alone are there before that is imported
            for environment in (None, UNTIMED):
                prepare(environment, ahead=True)
        uses = collections.Counter(task.group for task in tasks)
        for task in tasks:
            if task.group not in self._shared:
                self._shared[task.group] = SharedSession(functools.partial(self.session_for, task), uses[task.group])
        # Tasks of one original are neighbours: apart, each would wait for memory that the others hold.
        models: dict[Path, int] = {}
        groups = {group: turn for turn, group in enumerate(self._shared)}
        for task in tasks:
            models.setdefault(task.model.path, len(models))

        def turn(task: Task) -> tuple[int, bool, int]:
            return models[task.model.path], task.place == "cpu", groups[task.group]

        ours = owner.set(self)
        try:
            self._run(sorted(tasks, key=turn), finish)
        except BaseException:
            kill_all(self)
            raise
        finally:
            self.close()
            owner.reset(ours)
        return in_order()

    def _run(self, tasks: Sequence[Task], finish: Finish) -> None:
        on_gpu = any(task.place == "cuda" for task in tasks)
        # Where a model runs at several settings, its baselines compile the same kernels, and wait for locks.
        has_points = len({task.group for task in tasks}) > len({(task.model.path, task.place) for task in tasks})
        # The processes of compute-sanitizer do not stand still for a timing.
        at_once = judged_at_once() if on_gpu and not self._options.sanitize and not has_points else 1
        models = dict.fromkeys(task.model.path for task in tasks)
        self._niceness = {path: min(NICEST, NICE + LATER * turn) if on_gpu else 0 for turn, path in enumerate(models)}
        self.are_beside = at_once > 1
        if self.are_beside and self._is_alone:
            self.judge_slot = threading.BoundedSemaphore(at_once)
        in_turn = [task for task in tasks if task.place != "emulator"]
        self._coming = list(in_turn)
        # Builds do not run ahead by more variants than there are processors: who judges needs those, too.
        self._judged, self._most_ahead = 0, builds_at_once() + MOST_JUDGED_AT_ONCE
        places = {id(task): place for place, task in enumerate(in_turn)}
        judging = _Pool(2 * at_once if self.are_beside else 1, self)  # as many more may wait to be timed
        # Who waits for another pool's calls is left after it: what these have not begun is cancelled then.
        compilers = COMPILERS if on_gpu and all(task.pair for task in tasks) else 1
        with judging, _Pool(max(1, builds_at_once() // compilers), self) as building:
            try:
                built = {}
                for task in tasks:
                    if task.place == "emulator":
                        made = submit(building, self._check_and_time, task, task.subject, finish, True)
                    else:
                        made = submit(building, self._build_in_turn, task, places[id(task)])
                    built[id(task)] = made
                self._judge_all(built, judging, in_turn, finish)
            except BaseException:
                self._progress.hush()
                raise
            finally:
                self.is_over = True

    def _build_in_turn(self, task: Task, place: int) -> Subject:
        with self._begun:
            while not (place < self._judged + self._most_ahead or self.is_over):
                self._begun.wait(LOOK_AGAIN)
        return self.build(task)

    def _judge_all(
        self, built: dict[int, Future[Any]], judging: ThreadPoolExecutor, in_turn: list[Task], finish: Finish
    ) -> None:
        """Judge and time what is built. What ran out of memory beside others is judged once more, alone."""
        postponed = []

        def finish_or_postpone(task: Task, result: Result) -> None:
            if self.are_beside and OUT_OF_MEMORY.search(f"{result.reason} {result.details} {result.caveats}"):
                postponed.append(task)
            else:
                finish(task, result)

        judged = [submit(judging, self._judge, built[id(task)], task, finish_or_postpone) for task in in_turn]
        for call in [*judged, *built.values()]:
            call.result()
        for task in postponed:
            self._shared[task.group] = SharedSession(functools.partial(self.session_for, task), 1)
            built_alone = built[id(task)].result()
            subject = Subject(**{each.name: getattr(built_alone, each.name) for each in fields(Subject)})  # without a verdict
            self._check_and_time(task, subject, finish)

    def _judge(self, build: Future[Any], task: Task, finish: Finish) -> None:
        """Judge a variant when it is built; reference and baselines, which take longest on the CPU, are made meanwhile."""
        if self.are_beside and not (self.is_over or (build.done() and isinstance(build.result(), Result))):
            with contextlib.suppress(Exception):  # it is raised again where the session is used
                self._shared[task.group].session()
        subject = build.result()
        with self._begun:
            self._judged += 1
            self._begun.notify_all()
        if not self.is_over:
            self._check_and_time(task, subject, finish)

    def _check_and_time(self, task: Task, subject: Subject, finish: Finish, build: bool = False) -> None:
        with self._shared[task.group] as shared:
            if failure := self.begun():
                result = compose(subject, failed(UNJUDGED, failure))
            elif isinstance(subject, Result) and not self._options.sanitizes(task):
                result = subject
            else:
                result = self.answer(subject, lambda: shared.session().check_and_time(task, subject, build))
        self._leave(task)
        finish(task, result)

    def close(self) -> None:
        """End what the variants of the last model shared, and what waits for the next."""
        for shared in self._shared.values():
            shared.close()
        self._shared = {}
        for worker in self._ready.values():
            worker.close()
        self._ready = {}
        self._ahead.shutdown(cancel_futures=True)
        for task, _ in list(self._rooms.values()):
            self.close_room(task)
        if self._folder:
            self._folder.cleanup()
            self._hold.close()
            self._folder = None

    def folder(self, group: Any = None) -> Path:
        """Return where processes exchange tensors: of the whole run, or of those that share an original."""
        with self._making_room:
            if not self._folder:
                self._folder = tempfile.TemporaryDirectory(prefix=sandbox.RUN, dir=roomy_folder())
                self._hold.enter_context(cuda_emulator.held(self._folder.name))
            folder = Path(self._folder.name)
            if group is not None:
                folder /= hashlib.sha256(repr(group).encode()).hexdigest()[:16]
                (folder / GIVEN).mkdir(parents=True, exist_ok=True)
            return folder

    def room(self, task: Task) -> sandbox.Room | None:
        """Return the sandbox of a task; None for one that has the rights of this user."""
        if not self._options.isolates(task):
            return None
        with self._making_room:
            if id(task) not in self._rooms:
                self._rooms[id(task)] = task, self.new_room(task, [task.variant.path], _key_of(task))
            _, room = self._rooms[id(task)]
            return room

    def new_room(self, task: Task, shown: Sequence[Path], key: str | None = None) -> sandbox.Room:
        """Return a sandbox that sees the task's problem and what its referee gives, and the files `shown`; `key`: see Room."""
        builds = Path(self._options.builds or build_locks.extensions_root() / build_locks.JUDGED)
        builds.mkdir(parents=True, exist_ok=True)
        shown = [task.model.path, self.folder(task.group) / GIVEN, *shown]
        return sandbox.Room([path.absolute() for path in shown], self.folder(), builds, key)

    def close_room(self, task: Task, keep: bool = False) -> None:
        """Close the sandbox of a task, after the last process in it has ended; `keep`: see Room.close."""
        with self._making_room:
            _, room = self._rooms.pop(id(task), (task, None))
        if room:
            if worker := self._ready.pop((task.place == "emulator", room), None):
                worker.close()
            room.close(keep)

    def build(self, task: Task) -> Subject:
        """Build the variant once, so that what is timed later finds it built. Return its Subject, a Result where that fails."""
        with self.processors.build(COMPILERS if task.pair else 1, lambda: self.is_over):
            self._progress.started("build", *task.names())
            subject = self.answer(task.subject, lambda: self._build(task))
        self._progress.finished("build", *task.names(), subject.verdict if isinstance(subject, Result) else "built")
        return subject

    def _build(self, task: Task) -> Subject:
        subject = task.subject
        try:
            with WorkerProcess("candidate", self._options.time_limit, UNTIMED, room=self.room(task)) as worker:
                worker.make_nice(self._niceness.get(task.model.path, 0))
                if task.place == "cuda" and task.variant.is_catalogued:  # a stranger's compiler may be anything
                    worker.keep_compilers_off()
                with contextlib.suppress(WorkerFailure):  # which is said of the original when its reference is computed
                    self.footprint(task, lambda: sized_up(worker, self.original(task)))
                load_candidate(worker, self.original(task), task, self._options, None)
                with self._room_for_call(task):
                    subject, failure = self.build_in(worker, task, subject)
        except WorkerFailure as raised:
            failure = raised
        if not failure or OUT_OF_MEMORY.search(f"{failure} {failure.details}"):  # then it is called again when it is judged
            return subject
        return compose(subject, failed(UNJUDGED, failure))

    def footprint(self, task: Task, size_up: Callable[[], Footprint]) -> Footprint:
        """Return the Footprint of the task's problem, which the first who needs it asks for; the others wait."""
        with self._sizing.setdefault(task.group, threading.Lock()):
            if task.group not in self._footprints:
                self._footprints[task.group] = size_up()
        return self._footprints[task.group]

    def _room_for_call(self, task: Task) -> AbstractContextManager[Any]:
        footprint = self._footprints.get(task.group)
        if footprint is None:
            return contextlib.nullcontext()
        MEMORY.capacity(self.folder(), task.place == "cuda")
        return MEMORY.taken("call", footprint.of_call(task.place), lambda: self.is_over)

    def room_for_judgement(
        self, task: Task, size_up: Callable[[], Footprint]
    ) -> tuple[AbstractContextManager[Any], float, bool]:
        """Return (a context with memory for a judgement, the share of results with room, whether baselines have it meanwhile).

        What is emulated waits for nobody: it is begun in another order than its originals, and made small.
        """
        footprint = self.footprint(task, size_up)
        capacity = MEMORY.capacity(self.folder(), task.place == "cuda")
        share = footprint.share_for(task.place, capacity["host"], IN_A_RUN if task.pair else math.inf)
        if task.place == "emulator":
            return contextlib.nullcontext(), share, True
        needed, beside = footprint.of_judgement(task.place, share), footprint.of_baselines(task.place)
        both = {what: count + beside[what] for what, count in needed.items()}
        is_ample = all(count <= capacity[what] for what, count in both.items())
        return MEMORY.taken("judgement", both if is_ample else needed, lambda: self.is_over), share, is_ample

    def build_in(self, worker: WorkerProcess, task: Task, subject: Subject) -> tuple[Subject, WorkerFailure | None]:
        """Build the variant that `worker` has loaded. Return the subject with what that told, and its failure or None."""
        failure = None
        try:
            built = worker.ask("build", seed=self.seed)
            subject = replace(subject, build_seconds=built.seconds, built=built.built)
        except WorkerFailure as raised:
            failure = raised
        if self._options.ptxas and task.variant.backend == "cuda":
            subject = replace(subject, ptxas=self._ptxas(worker))
        return subject, failure

    def _ptxas(self, worker: WorkerProcess) -> dict[str, list[Kernel]] | Unknown:
        if worker.room:  # nvcc would read, for this process, whatever file the text includes
            return Unknown("the text is not compiled outside of the sandbox")
        try:
            code = worker.ask("device_code")
        except WorkerFailure:
            return Unknown("its process ended before it could be asked for its text")
        return ptxas.describe([ptxas.DeviceCode(each.text, tuple(each.flags)) for each in code.texts], code.capability)

    def answer(self, subject: Subject, make: Callable[[], S]) -> S | Result:
        """Return what `make()` does. What goes wrong there, and not in a worker, costs one result, not a run of hours."""
        try:
            return make()
        except NoRoom as full:
            why = str(full), ""
        except Exception as exception:
            why = (no_room_in(tempfile.gettempdir()), "") if is_full(exception) else internal_error(exception)
        return compose(subject, ended(UNJUDGED, ERROR, *why))

    def worker_for(self, task: Task) -> WorkerProcess:
        """Return the process in which a variant is judged and timed. While it is, the next one starts."""
        with self._taking:
            worker = self._ready.pop(self.start_ahead(task))
            self._leave(task)
            for following in self._coming[:1]:
                self.start_ahead(following)
        worker.owner = owner.get()
        return worker

    def start_ahead(self, task: Task) -> tuple[bool, sandbox.Room | None]:
        """Have a process wait for a task, until PyTorch is imported there, for seconds. Returns its key in `_ready`."""
        kind = task.place == "emulator", self.room(task)
        with self._taking:
            if kind not in self._ready:
                environment, limit = UNTIMED if kind[0] else None, self._options.time_limit
                self._ready[kind] = WorkerProcess("candidate", limit, environment, room=kind[1])
        if kind[0] and kind[1]:  # while that process imports PyTorch
            _make_emulator(str(task.variant.path), self._options.time_limit)
        return kind

    def _leave(self, task: Task) -> None:
        self._coming = [each for each in self._coming if each is not task]

    def session_for(self, task: Task) -> Session:
        return Session(task, self.original(task), self._options, self._progress, self)

    def original(self, task: Task) -> dict[str, Any]:
        """Return how a worker makes the original of a task."""
        of_task = {"problem": str(task.model.path), "settings": task.settings, "place": task.place}
        return of_task | {"seed": self.seed, "strict": self._options.strict, "precision": self._options.half}


class _Pool(ThreadPoolExecutor):
    """Makes calls side by side, at most so many at once. What one raises ends all, and the workers of the Runner `run`."""

    def __init__(self, most: int, run: "Runner") -> None:
        super().__init__(most)
        self._run = run

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind:
            kill_all(self._run)
        self.shutdown(cancel_futures=True)


def _key_of(task: Task) -> str | None:
    files = [task.hashes["source_sha256"], task.hashes["model_sha256"]]
    versions = sys.version, cuda_emulator.torch_version().__version__
    return hashlib.sha256(repr([*files, *versions]).encode()).hexdigest()[:16] if all(files) else None


@functools.cache
def _make_emulator(file: str, limit: float) -> None:
    """Make what emulated files share, as far as `file` takes it: in a sandbox it can be read and not written."""
    if not cuda_emulator.is_made(file):
        with WorkerProcess("compiler", limit, UNTIMED) as worker:
            worker.ask("make_shared", file=file)


def roomy_folder() -> str:
    """Return where tensors are exchanged: the folder that TMPDIR names, else memory where there is plenty, else the disk."""
    enough = 8 << 30
    if "TMPDIR" not in os.environ and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > enough:
        return SHARED_MEMORY
    return tempfile.gettempdir()


def sweep() -> Any:
    """Remove what runs and builds have left that were killed. Returns the locks of builds, as build_locks does."""
    cuda_emulator.sweep()
    sandbox.sweep({SHARED_MEMORY, tempfile.gettempdir()})
    return build_locks.clear_stale_locks()
