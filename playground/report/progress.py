"""What is being built, checked and timed right now, on stderr; stdout is left alone."""

import threading
import time

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from playground.report.figures import one_line, with_unit
from playground.report.layout import STYLES


class Progress:
    """Live on a terminal, a line for each event in a pipe. Its methods may be called from several threads.

    with Progress() as progress:
        progress.expect(1)
        progress.started("build", model, variant)
        progress.finished("build", model, variant, "built")
        progress.done(model, variant, "pass")
    """

    def __init__(self, console=None, prefix=""):
        """`prefix` stands before each line: several processes share the terminal, and nothing is live then."""
        self._console = console or _Console(stderr=True)
        self._live = self._console.file.isatty() and self._console.is_interactive and not prefix
        self._prefix = prefix
        # Standard output is not redirected: rich would send what is printed there to this console.
        self._display = Display(
            SpinnerColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            # The text is a stranger's: no markup; one line a task, so that the display can be redrawn in place. It alone gives
            # way where the terminal is narrow.
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            expand=True,
            console=self._console,
            transient=True,
            redirect_stdout=False,
        )
        self._running = {}
        self._lock = threading.Lock()
        self._expected = self._counted = 0
        self._total = None  # the live line that counts

    def __enter__(self):
        if self._live:
            self._display.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._display.stop()

    def expect(self, variants):
        """So many variants are going to be `done`: the display counts them."""
        self._expected, self._counted = variants, 0
        if self._live:
            self._total = self._display.add_task(self._count(), total=None)

    def done(self, model, variant, outcome):
        """Nothing more happens to the variant. What it had begun and did not finish, because it failed there, ends here."""
        ending = f" {one_line(f'{model}/{variant}')}"
        with self._lock:
            self._counted += 1
            unfinished = [what for what, begun in self._running.items() if what.endswith(ending) for _ in begun]
        for what in unfinished:
            self._ended(what, outcome)
        if self._total is not None:
            self._display.update(self._total, description=self._count())
        elif self._expected > 1:
            self._line(Text(self._count(), style="dim"))

    def _count(self):
        return f"{self._counted} of {self._expected} variants done"

    def started(self, stage, model, variant=None):
        """`stage`, such as 'build', 'check' or 'time', begins for a variant (or for something that has none)."""
        what = _label(stage, model, variant)
        task = self._display.add_task(what, total=None) if self._live else None
        with self._lock:
            self._running.setdefault(what, []).append((time.monotonic(), task))
        if not self._live:
            self._line(Text(f"{what} ..."))

    def finished(self, stage, model, variant=None, outcome=""):
        """The stage ended; `outcome` is a verdict or another short text."""
        self._ended(_label(stage, model, variant), outcome)

    def _ended(self, what, outcome):
        with self._lock:
            begun = self._running.get(what)
            begin, task = begun.pop(0) if begun else (None, None)
        if task is not None:
            self._display.remove_task(task)
        outcome = one_line(outcome)
        line = Text(f"{what}: ").append(outcome or "done", style=STYLES.get(outcome.partition(":")[0], ""))
        if begin is not None:
            line.append(f", {with_unit(time.monotonic() - begin, ' s')}", style="dim")
        self._line(line)

    def _line(self, text):
        line = Text(self._prefix, style="dim").append_text(text) if self._prefix else text
        self._console.print(line, soft_wrap=not self._live, highlight=False)


class _Console(Console):
    def on_broken_pipe(self):
        """Nobody reads stderr any more: be silent. (rich would redirect stdout to nowhere and exit.)"""
        self.quiet = True


def _label(stage, model, variant):
    return one_line(f"{stage} {model}/{variant}" if variant else f"{stage} {model}")
