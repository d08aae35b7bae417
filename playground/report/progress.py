"""What is being built, checked and timed right now, on stderr; stdout is left alone."""

import threading
import time

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from playground.report.figures import one_line, with_unit
from playground.report.terminal import STYLES


class Progress:
    """Live on a terminal, a line for each event in a pipe. Its methods may be called from several threads.

    with Progress() as progress:
        progress.started("build", model, variant)
        progress.finished("build", model, variant, "pass")
    """

    def __init__(self, console=None):
        self._console = console or _Console(stderr=True)
        self._live = self._console.file.isatty() and self._console.is_interactive
        # Standard output is not redirected: rich would send what is printed there to this console.
        self._display = Display(
            SpinnerColumn(),
            # The text is a stranger's: no markup; one line a task, so that the display can be redrawn in place.
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
        )
        self._running = {}
        self._lock = threading.Lock()

    def __enter__(self):
        if self._live:
            self._display.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._display.stop()

    def started(self, stage, model, variant=None):
        """`stage`, such as 'build', 'check' or 'time', begins for a variant (or for something that has none)."""
        what = _label(stage, model, variant)
        task = self._display.add_task(what, total=None) if self._live else None
        with self._lock:
            self._running[what] = (time.monotonic(), task)
        if not self._live:
            self._line(Text(f"{what} ..."))

    def finished(self, stage, model, variant=None, outcome=""):
        """The stage ended; `outcome` is a verdict or another short text."""
        what = _label(stage, model, variant)
        with self._lock:
            begin, task = self._running.pop(what, (None, None))
        if task is not None:
            self._display.remove_task(task)
        outcome = one_line(outcome)
        line = Text(f"{what}: ").append(outcome or "done", style=STYLES.get(outcome.partition(":")[0], ""))
        if begin is not None:
            line.append(f", {with_unit(time.monotonic() - begin, ' s')}", style="dim")
        self._line(line)

    def _line(self, text):
        self._console.print(text, soft_wrap=not self._live, highlight=False)


class _Console(Console):
    def on_broken_pipe(self):
        """Nobody reads stderr any more: be silent. (rich would redirect stdout to nowhere and exit.)"""
        self.quiet = True


def _label(stage, model, variant):
    return one_line(f"{stage} {model}/{variant}" if variant else f"{stage} {model}")
