"""What ends a request to a judged or judging process without a result. Without PyTorch, since the driver begins without it."""

from pathlib import Path

from playground import untrusted
from playground.room import NO_ROOM

SANDBOX_ALLOWS = "the sandbox allows "  # stands before a limit
GOES_ON = "processes ran on while they had to be stopped"
MOST_REASON = 2000  # characters of what a judged file can say
JUDGE_BROKE = "internal error (report it): "


class WorkerFailure(Exception):
    """A request without a result: one line, `details`, whether the emulator found a mistake, whose process it was (`role`)."""

    def __init__(self, reason: str, details: str = "", is_finding: bool = False, role: str | None = None) -> None:
        super().__init__(reason)
        self.details, self.is_finding, self.role = details, is_finding, role
        self.is_of_machine = is_of_machine(reason)
        self.is_of_judge = reason.startswith(JUDGE_BROKE)


def is_of_machine(reason: str | None) -> bool:
    """Return whether a failure's reason is the machine's. A file that has filled its sandbox is at fault itself."""
    return (reason or "").startswith(NO_ROOM) and SANDBOX_ALLOWS not in (reason or "")


def remove(file: Path) -> None:
    """Remove a file that a variant writes. Raises WorkerFailure where something else is in its place, such as a folder."""
    try:
        untrusted.remove(file)
    except untrusted.Refused:
        raise WorkerFailure(f"left something that cannot be removed where its results go: {file.name}") from None
