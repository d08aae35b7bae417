"""What the emulator raises."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


class EmulatorError(RuntimeError):
    """A text that cannot be built for the emulator, or a machine that cannot build it."""


def called_from(callers):
    return "".join(f", called from line {line}" for line in callers)


@dataclass
class Party:
    """A thread of a block, and the place where it did something."""

    block: tuple
    thread: tuple
    did: str = ""
    line: int | None = None
    callers: tuple = ()  # lines of the calls that the line was inlined into

    def __str__(self):
        where = f" (line {self.line}{called_from(self.callers)})" if self.line else ""
        return f"thread {self.thread} of block {self.block}{' ' + self.did if self.did else ''}{where}"


@dataclass
class FindingData:
    kind: str
    message: str
    kernel: str
    file: str | None = None
    line: int | None = None
    block: tuple | None = None
    thread: tuple | None = None
    other: Party | None = None
    callers: tuple = ()


class Finding(RuntimeError):
    """A mistake in a kernel. `other` is the second party of a race or of a divergence."""

    def __init__(self, data):
        self.kind, self.message, self.kernel = data.kind, data.message, data.kernel
        self.file, self.line = data.file, data.line
        self.block, self.thread, self.other, self.callers = data.block, data.thread, data.other, data.callers
        place = f"{self.file}:{self.line}: " if self.file and self.line else ""
        text = f"{place}{self.kind}: {self.message}"
        if self.kernel:  # else host code did it
            text += f"; kernel {self.kernel}"
        if self.block is not None:
            text += f", block {self.block}, thread {self.thread}"
        text += called_from(self.callers)
        if self.other is not None:
            text += f"; the other party is {self.other}"
        super().__init__(text)


def parse_finding(text, file_of_library):
    """The runtime's report, a key=value a line, as a Finding. `file_of_library` maps a library to its text's file."""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def triple(key):
        return tuple(int(v) for v in fields[key].split(",")) if key in fields else None

    def lines_of(prefix):
        if prefix + "line" in fields:
            return [int(fields[prefix + "line"])]
        if prefix + "library" in fields:
            return lines_of_instruction(fields[prefix + "library"], int(fields[prefix + "offset"]), file_of_library)
        return []

    line, *callers = lines_of("") or [int(fields.get("kernel_line", 0)) or None]
    other = None
    if "other_block" in fields:
        other_line, *other_callers = lines_of("other_") or [None]
        did = fields.get("other_did", "")
        other = Party(triple("other_block"), triple("other_thread"), did, other_line, tuple(other_callers))
    return Finding(
        FindingData(
            fields["kind"],
            fields["message"],
            fields["kernel"],
            file_of_library(None),
            line,
            triple("block"),
            triple("thread"),
            other,
            tuple(callers),
        )
    )


def lines_of_instruction(library, offset, file_of_library):
    """The lines of the kernel text that an instruction belongs to: its own, then those of the calls it was inlined into."""
    file = file_of_library(library)
    run = subprocess.run(["addr2line", "-e", library, "-i", hex(offset)], capture_output=True, text=True)
    lines = []
    for place in run.stdout.splitlines():
        name, _, line = place.split(" (")[0].rpartition(":")
        if file and Path(name).name == Path(file).name and line.isdigit() and int(line) not in lines:
            lines.append(int(line))
    return lines
