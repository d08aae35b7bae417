"""Judges variants again whenever their files are saved, with the reference, baselines and processes that are still right."""

import contextlib
import contextvars
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.catalog import CatalogError
from playground.driver.plan import failing_probe
from playground.driver.runner import Runner
from playground.driver.session import Session
from playground.driver.task import Options, Task
from playground.judge.verdict import UNJUDGED, failed
from playground.machine import build_locks
from playground.record import Result, compose
from playground.report.progress import Progress
from playground.worker import kill_all, owner

if TYPE_CHECKING:
    from playground.report.watch_screen import Screen

POLL = 0.3  # seconds between looks at the files
KILL_AGAIN = 0.1  # seconds: what is stopped may start a process more


@dataclass(frozen=True)
class Again:
    """A result, the one of the judgement before (None for the first), and the seconds from the save to it."""

    result: Result
    before: Result | None
    seconds: float


class Watch:
    """Tasks that are judged as often as their files are saved: those of `make_tasks()`, which may raise CatalogError."""

    def __init__(self, make_tasks: Callable[[], list[Task]], options: Options, progress: Progress, screen: "Screen") -> None:
        self._make_tasks, self._options, self._progress, self._screen = make_tasks, options, progress, screen
        self._runner = Runner(options, progress)
        self._thread = ThreadPoolExecutor(max_workers=1)  # one for all: with it ends what it has started
        self._sessions: dict[Any, tuple[str | None, Session]] = {}  # {group: (hash of the problem's file, Session)}
        self._results: dict[Any, Result] = {}  # {(model, variant, place, settings): result}

    def run(self) -> None:
        """Judge at each save, until what ends it is raised in this thread: KeyboardInterrupt, as a rule."""
        tasks = self._make_tasks()
        try:
            while True:
                files = {path: _stamp(path) for task in tasks for path in (task.model.path, task.variant.path)}
                try:
                    tasks = self._make_tasks()
                    self._round(tasks, files)
                except CatalogError as complaint:
                    self._show([], files, str(complaint))
                while not _saved(files):
                    time.sleep(POLL)
        finally:
            self._forget()
            self._thread.shutdown()

    def _round(self, tasks: Sequence[Task], files: dict[Path, Any]) -> None:
        began, over = time.monotonic(), threading.Event()
        context = contextvars.copy_context()
        context.run(owner.set, over)  # of the round's own workers; the referee's and the baselines' is the runner
        judging = self._thread.submit(context.run, self._judge_all, tasks, began, over)
        try:
            while not wait([judging], timeout=POLL).done and not (saved := _saved(files)):
                pass
        except BaseException:
            over.set()
            self._runner.is_over = True  # or it would wait for memory for ever
            self._stop(judging, over, self._runner)
            raise
        if not judging.done():
            over.set()
            of_problem = saved & {task.model.path for task in tasks}
            self._stop(judging, over, *[self._runner] if of_problem else [])
            if of_problem:
                self._forget()
                self._runner = Runner(self._options, self._progress)
            build_locks.clear_stale_locks()
            return
        if again := judging.result():
            self._show(again, files)
        context.run(owner.set, self._runner)
        for task in tasks:
            if not self._options.isolates(task):  # what is to run in a sandbox has one of its own, and new workers there
                context.run(self._runner.start_ahead, task)

    def _show(self, again: Sequence[Again], files: dict[Path, Any], complaint: str | None = None) -> None:
        with self._progress.aside():
            self._screen.show(again, files, complaint)

    def _stop(self, future: Future[Any], *owners: Any) -> None:
        while not wait([future], timeout=KILL_AGAIN).done:
            for each in owners:
                kill_all(each)

    def _judge_all(self, tasks: Sequence[Task], began: float, over: threading.Event) -> list[Again]:
        found = []
        for task in tasks:
            key = task.model.path, task.variant.path, task.place, repr(sorted(task.settings.items()))
            before = self._results.get(key)
            if before and all(getattr(before, name) == task.hashes[name] for name in ("source_sha256", "model_sha256")):
                continue
            result = self._judge(dataclasses.replace(task, first=failing_probe(before)) if before else task)
            self._progress.done(*task.names(), "stopped" if over.is_set() else result.verdict)
            if over.is_set():
                break
            found.append(Again(result, before, time.monotonic() - began))
            self._results[key] = result
        return found

    def _judge(self, task: Task) -> Result:
        def judge() -> Result:
            self._runner.begin([task])
            if failure := self._runner.begun():
                return compose(task.subject, failed(UNJUDGED, failure))
            session = self._session_of(task)
            subject = self._runner.build(task) if self._options.times(task) else task.subject
            if isinstance(subject, Result):
                return subject
            return session.check_and_time(task, subject, build=not self._options.times(task))

        try:
            return self._runner.answer(task.subject, judge)
        finally:
            self._runner.close_room(task)

    def _session_of(self, task: Task) -> Session:
        """The session of the task's problem as it is now. Its workers stay when those of the round are ended."""
        problem, session = self._sessions.get(task.group, (None, None))
        if session is None or problem != task.hashes["model_sha256"]:
            if session:
                del self._sessions[task.group]
                session.close()
            context = contextvars.copy_context()
            context.run(owner.set, self._runner)
            session = context.run(self._runner.session_for, task)
            self._sessions[task.group] = task.hashes["model_sha256"], session
        return session

    def _forget(self) -> None:
        def close() -> None:
            for _, session in self._sessions.values():
                session.close()
            self._sessions = {}
            self._runner.close()

        self._stop(self._thread.submit(close), self._runner)


def _saved(files: dict[Path, Any]) -> set[Path]:
    """The paths whose files are others than in `files`. One that is gone is being replaced."""
    return {path for path, stamp in files.items() if (now := _stamp(path)) and now != stamp}


def _stamp(path: Path) -> Any:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None
