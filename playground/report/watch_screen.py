"""What --watch shows: one screen for each judgement, with the difference from the one before."""

from datetime import datetime

from rich.text import Text

from playground.report.figures import why_not_pass
from playground.report.layout import INDENT, print_folded, verdict
from playground.report.text import NOTHING, scientific, with_unit

LABEL = 9  # columns


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
            self._print(each)
        if complaint:
            print_folded(self._console, complaint)
        names = ", ".join(sorted({path.name for path in files}))
        print_folded(self._console, f"watching {names}; Ctrl-C ends", style="dim")
        self._console.file.flush()

    def _print(self, again):
        now, before = again.result, again.before
        title = Text.assemble((f"{now['model']}/{now['variant']}", "bold"), "  ")
        if before and before["verdict"] != now["verdict"]:
            title.append_text(verdict(before["verdict"])).append(" -> ")
        title.append_text(verdict(now["verdict"])).append(f"  in {with_unit(again.seconds, ' s')}", style="dim")
        print_folded(self._console, title)
        for reason in why_not_pass(now)[:1]:
            self._line("reason", reason)
        for label, figure in (("error", _error), ("time", _time), ("eager", _speedup)):
            values = [figure(each) for each in (before, now) if each]
            if values[-1] != NOTHING:
                changed = values[0] != values[-1] and values[0] != NOTHING
                self._line(label, " -> ".join(values) if changed else values[-1])

    def _line(self, label, text):
        print_folded(self._console, f"{label:<{LABEL}}{text}", indent=INDENT, hanging=LABEL)


def _error(result):
    return scientific((result["check"] or {}).get("max_error"))


def _time(result):
    return with_unit((result["time_ms"] or {}).get("median"), " ms")


def _speedup(result):
    """Over eager PyTorch; nothing where nothing is claimed."""
    return with_unit(((result["speedup"] or {}).get("eager") or {}).get("ratio"), " times as fast")
