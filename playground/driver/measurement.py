"""From tasks to a document: on this machine or on a cluster, from scratch or from where an earlier run ended."""

import dataclasses
import functools
import json
import operator
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from playground.catalog import Impossible
from playground.driver import plan
from playground.driver.runner import Runner
from playground.driver.task import Options, Task
from playground.record import Result
from playground.report import document
from playground.report.output import Output
from playground.report.progress import Progress
from playground.run_record import SCHEMA, Document, Environment, load_result
from playground.serial import DocumentError, dump
from playground.subject import Subject
from playground.worker import kill_all, spent
from playground.worker.failures import internal_error
from playground.worker.referee_client import describe_machine

FINAL = ("pass", "forward only", "fail", "skipped")  # an error may have been the machine's
WRITING_PAUSE = 20  # times what writing a document took, which so takes at most 5% of a run


def measure(
    tasks: Sequence[Task],
    options: Options,
    file: Output | None = None,
    resume: Path | None = None,
    add: Callable[[Document], Document] = lambda finished: finished,
    show: Callable[[Document], Any] | None = None,
    cluster: Any = None,
    check: Callable[[], None] = lambda: None,
) -> Document:
    """Return the document of a run, here or on a cluster.Cluster. Raises Impossible where that in `resume` cannot be continued.

    Results are written to `file`, an Output, as they come; `add` completes the last document. `check` is called once workers
    have begun to start; `show`, with the document so far, at each new result, and gives what can be drawn of the rest.
    """
    began = time.monotonic()
    record = Record(tasks, options, file, show or (lambda document: None), cluster.ask if cluster else operator.call)
    if resume:
        record.take_over(resume)
    try:
        left = record.settle()
        if cluster:
            check()
            _run_on(cluster, left, options, record)
        else:
            _run_here(left, options, record, check)
    except BaseException:
        record.write()
        raise
    if not resume:
        record.environment |= {"seconds": time.monotonic() - began}  # of the whole run
    return record.finished(add)


def _run_on(cluster: Any, tasks: Sequence[Task], options: Options, record: "Record") -> None:
    with Progress() as progress:
        progress.expect(len(tasks))
        for task, row in cluster.results(tasks, options):
            progress.done(*task.names(), row.verdict)
            with progress.aside():
                progress.draw(record.keep([row]))
    record.environment |= {"lost_workers": cluster.lost}


def _run_here(tasks: Sequence[Task], options: Options, record: "Record", check: Callable[[], None]) -> None:
    with Progress() as progress:
        runner = Runner(options, progress)
        record.environment |= {"seed": runner.seed}
        runner.begin(tasks)
        try:
            check()
        except BaseException:
            progress.hush()
            kill_all(runner)
            runner.close()
            raise

        def keep(results: list[Result]) -> Any:
            with progress.aside():
                progress.draw(record.keep(results))

        keep(runner.run(tasks, keep))
        # Not before: a judged process could read the file.
        record.environment |= {"probe_seed": runner.probe_seed, "timeline": progress.timeline, "requests": dict(spent)}


class Record:
    """The results so far, in the order of the tasks. `ask(function, ...)` calls it on the machine where they are measured."""

    def __init__(
        self,
        tasks: Sequence[Task],
        options: Options,
        file: Output | None,
        show: Callable[[Document], Any],
        ask: Callable[..., Any],
    ) -> None:
        self.tasks, self._show, self._file, self._ask = tasks, show, file, ask
        self._identities = [_identity(task.subject) for task in tasks]
        self._rows: dict[Any, Result] = {}
        self._write_again = 0.0  # the moment
        isolation = ask(options.isolation, [task for task in tasks if not task.settled])
        self.environment = {"options": options.recorded, "sandbox": isolation}

    def take_over(self, file: Path) -> None:
        """Keep the rows of the document in `file` that are results of these tasks, and say on stderr how many."""
        try:
            earlier = document.read(file)
        except DocumentError as complaint:
            raise Impossible(f"--resume {complaint}") from None
        rows, had, has = earlier.results, earlier.environment, self._environment()
        names = [(row.model, row.variant) for row in rows]
        if rows and not {*names} & {(task.model.name, task.variant.name) for task in self.tasks}:
            of = ", ".join(dict.fromkeys(map("/".join, names[:3]))) + (", ..." if len(rows) > 3 else "")
            raise Impossible(f"--resume {file}: has results of {of}, and none of what is to be run here")
        for key in ("options", "gpu", "cpu", "torch", "driver"):
            if (then := getattr(had, key)) != (now := getattr(has, key)):
                raise Impossible(f"--resume {file}: that run had {key} {then!r}, this one has {now!r}")
        standards = {identity: task.standard for identity, task in zip(self._identities, self.tasks, strict=True)}
        final = {_identity(row): row for row in rows if row.verdict in FINAL}
        self._rows = {key: dataclasses.replace(row, standard=standards[key]) for key, row in final.items() if key in standards}
        changed = len(final) - len(self._rows)
        errors = {_identity(row) for row in rows} & standards.keys() - self._rows.keys()
        new = len(self.tasks) - len(self._rows) - len(errors)
        counts = {"kept": len(self._rows), "judged again after an error": len(errors), "new": new}
        told = f"--resume {file}: " + ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        more = f"; {changed} in it {'is' if changed == 1 else 'are'} of another file or at other settings" if changed else ""
        print(told + more, file=sys.stderr)

    def settle(self) -> list[Task]:
        """Keep the results of the tasks that cannot run. Returns those that are left."""
        settled = [plan.settled(task) for task in self.tasks if task.settled]
        if settled or self._rows:
            self.keep(settled)
        pairs = zip(self.tasks, self._identities, strict=True)
        return [task for task, identity in pairs if identity not in self._rows and not task.settled]

    def keep(self, results: list[Result]) -> Any:
        """Write and show what is new. Returns what `show` gives."""
        new = {_identity(row): row for row in results}
        if not new.keys() <= self._rows.keys():
            self._rows |= {identity: self._sound(identity, row) for identity, row in new.items()}
            if time.monotonic() >= self._write_again:
                self.write()
        return self._show(self.document())

    def _sound(self, identity: Any, row: Result) -> Result:
        """The row; an error in its place where it breaks the contract: the judge's mistake costs one result, not the run."""
        try:
            load_result(dump(row))
        except DocumentError as complaint:
            return plan.settled(self.tasks[self._identities.index(identity)], "error", *internal_error(complaint))
        return row

    def write(self) -> None:
        """Write what was kept, if there is anything, unless the file is a pipe, which gets all at once."""
        if self._rows and self._file and not self._file.is_special:
            began = time.monotonic()
            self._write(self.document())
            self._write_again = time.monotonic() + WRITING_PAUSE * (time.monotonic() - began)

    def finished(self, add: Callable[[Document], Document]) -> Document:
        """The document, which is in the file by now."""
        finished = add(self.document())
        self._write(finished)
        return finished

    def _write(self, content: Document) -> None:
        if self._file:
            self._file.write(lambda path: document.write(content, path))

    def document(self) -> Document:
        rows = [self._rows[key] for key in self._identities if key in self._rows]
        environment = dataclasses.replace(self._environment(), complete=len(rows) == len(self.tasks))
        return Document(schema=SCHEMA, environment=environment, results=rows)

    def _environment(self) -> Environment:
        return dataclasses.replace(self._described, **self.environment)

    @functools.cached_property
    def _described(self) -> Environment:
        return self._ask(describe_machine)


def _identity(row: Subject) -> tuple[Any, ...]:
    settings = json.dumps(row.shape.settings, sort_keys=True)
    return row.model, row.variant, row.ran_on, settings, row.model_sha256, row.source_sha256
