"""What --watch shows: one screen for each judgement, with the difference from the one before."""

from datetime import datetime

from rich.text import Text

from playground.report.figures import why_not_pass
from playground.report.layout import INDENT, print_folded, verdict
from playground.report.text import NOTHING, scientific, with_unit

LABEL = 9  # columns
FIGURES = {
    "error": lambda result: scientific(result.checked.max_error),
    "time": lambda result: with_unit(result.median_ms, " ms"),
    "eager": lambda result: with_unit(result.ratios["eager"].ratio if "eager" in result.ratios else None, " times as fast"),
}


class Screen:
    """Clears a terminal before it prints; in a pipe one judgement follows the other."""

    def __init__(self, console):
        self._console = console

    def show(self, again, files, complaint=None):
        """Print playground.driver.watch.Again of what was judged, or why nothing can be, and the paths that are watched."""
        if self._console.is_terminal:
            self._console.clear()
        print_folded(self._console, f"{datetime.now():%H:%M:%S}", style="dim")
        for each in again:
            self._print(each.result, each.before, each.seconds)
        if complaint:
            print_folded(self._console, complaint)
        names = ", ".join(sorted({path.name for path in files}))
        print_folded(self._console, f"watching {names}; Ctrl-C ends", style="dim")
        self._console.file.flush()

    def _print(self, now, before, seconds):
        title = Text.assemble((f"{now.model}/{now.variant}", "bold"), "  ")
        if before and before.verdict != now.verdict:
            title.append_text(verdict(before.verdict)).append(" -> ")
        title.append_text(verdict(now.verdict)).append(f"  in {with_unit(seconds, ' s')}", style="dim")
        print_folded(self._console, title)
        lines = dict(zip(["reason"], why_not_pass(now), strict=False))
        for label, figure in FIGURES.items():
            then, value = figure(before) if before else NOTHING, figure(now)
            if value != NOTHING:
                lines[label] = value if then in (value, NOTHING) else f"{then} -> {value}"
        for label, text in lines.items():
            print_folded(self._console, f"{label:<{LABEL}}{text}", indent=INDENT, hanging=LABEL)
