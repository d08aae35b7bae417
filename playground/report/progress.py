"""What is being built, checked and timed right now, on stderr; stdout is left alone."""

import contextlib
import threading
import time

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from playground.report.layout import STYLES, unstyled
from playground.report.text import one_line, with_unit

SHOWN = {"truth": "reference"}  # stages by another name than in the JSON

KNOWN = 0.25  # of the variants: with fewer, those that fail at once would make an estimate


class Progress:
    """Live on a terminal, a line for each event in a pipe. Its methods may be called from several threads."""

    def __init__(self, console=None):
        self._console = console or _Console(stderr=True, **unstyled())
        self._live = self._console.file.isatty() and self._console.is_interactive
        # Standard output is not redirected: rich would send what is printed there to this console.
        self._display = _Display(
            SpinnerColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            # The text is an untrusted file's: no markup; one line a task, so that it can be redrawn in place. It alone gives
            # way where the terminal is narrow.
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            expand=True,
            console=self._console,
            transient=True,
            redirect_stdout=False,
        )
        self._lock = threading.Lock()
        self._is_hushed = False
        self._expected = self._counted = 0
        self._first = 0.0  # the moment when the first variant was done
        self._total = None  # the live line that counts, a task like those that run, of which each has its `key`
        self._began = time.monotonic()
        self.timeline = []  # [{"stage", "model", "what", "began", "seconds"}] of all that ended, `began` since this was made

    def __enter__(self):
        if self._live:
            self._display.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._display.stop()

    def expect(self, variants):
        """Expect so many more variants to be `done`: the display counts them."""
        self._expected, self._counted = variants, 0
        if self._live:
            self._total = self._display.add_task(self._count(), total=None)

    def hush(self):
        """Stop telling: how the rest of an interrupted run ends is of no concern."""
        self._is_hushed = True

    def draw(self, above):
        """Draw a renderable (None: nothing) over the live lines; where nothing is live, nothing is drawn."""
        self._display.above = above

    @contextlib.contextmanager
    def aside(self):
        """Leave the terminal to whoever prints there meanwhile."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def phases(self, model=None, variant=None):
        """Return {stage: seconds} of all that ended, or of one variant; those that ran side by side add up."""
        found = {}
        for entry in self.timeline:
            if model is None or (entry["model"], entry["what"]) == (model, variant):
                found[entry["stage"]] = found.get(entry["stage"], 0.0) + entry["seconds"]
        return found

    def done(self, model, variant, outcome):
        """Count a variant as done. What it had begun and did not finish, because it failed there, ends here."""
        with self._lock:
            self._counted += 1
            self._first = self._first if self._counted > 1 else time.monotonic()
        for task in self._display.tasks:
            if task.fields.get("key", ())[1:] == (model, variant):
                self.finished(*task.fields["key"], outcome)
        if self._total is not None:
            self._display.update(self._total, description=self._count())
        elif self._expected > 1:
            self._line(Text(self._count(), style="dim"))

    def _count(self):
        text = f"{self._counted} of {self._expected} variants done"
        is_known = self._counted >= max(2, KNOWN * self._expected)  # the first one's time is mostly what all share
        if not is_known or self._counted == self._expected:
            return text
        left = (time.monotonic() - self._first) / (self._counted - 1) * (self._expected - self._counted)
        return f"{text}, about {f'{max(10, round(left, -1)):.0f} s' if left < 100 else f'{left / 60:.0f} min'} left"

    def started(self, stage, model, variant=None):
        """Tell that a `stage`, such as 'build', 'check' or 'time', begins for a variant (or something that has none)."""
        what = _label(stage, model, variant)
        self._display.add_task(what, total=None, key=(stage, model, variant))
        if not self._live:
            self._line(Text(f"{what} ..."))

    def finished(self, stage, model, variant=None, outcome=""):
        """Tell that a stage ended; `outcome` is a verdict or another short text."""
        outcome, key = one_line(outcome), (stage, model, variant)
        line = Text(f"{_label(stage, model, variant)}: ")
        line.append(outcome or "done", style=STYLES.get(outcome.partition(":")[0], ""))
        with self._lock:
            if task := next((task for task in self._display.tasks if task.fields.get("key") == key), None):
                seconds, began = task.elapsed, task.start_time - self._began
                self._display.remove_task(task.id)
                entry = {"stage": stage, "model": model, "what": variant}
                self.timeline.append(entry | {"began": began, "seconds": seconds})
                line.append(f", {with_unit(seconds, ' s')}", style="dim")
        self._line(line)

    def said(self, stage, model, variant, what):
        """Tell what is known of a stage before its end."""
        self._line(Text(f"{_label(stage, model, variant)}: {one_line(what)}"))

    def _line(self, text):
        if not self._is_hushed:
            self._console.print(text, soft_wrap=not self._live, highlight=False)


class _Display(Display):
    above = None

    def get_renderables(self):
        if self.above is not None:
            yield self.above
        yield from super().get_renderables()


class _Console(Console):
    def on_broken_pipe(self):
        """Nobody reads stderr any more: be silent. (rich would redirect stdout to nowhere and exit.)"""
        self.quiet = True


def _label(stage, model, variant):
    stage = SHOWN.get(stage, stage)
    return one_line(f"{stage} {model}/{variant}" if variant else f"{stage} {model}")
