"""What the emulator raises."""

import linecache
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .sourcemap import lines_of_file
from .text import split_at_commas, text_of, tokens_of

COPY = re.compile(r"(C[124]|aS)E(RK|O)S[0-9A-Z]*_$")  # a symbol's end: of a copy or move constructor or assignment
STRUCT = re.compile(r"\b(struct|class|union)\b")


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
    file: str | None = None  # where it is another one than the finding's

    def __str__(self):
        at = f"{self.line} of {Path(self.file).name}" if self.file else self.line
        where = f" (line {at}{called_from(self.callers)})" if self.line else ""
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


def parse_finding(text, file_of_library, program=None):
    """The runtime's report, a key=value a line, as a Finding.

    `file_of_library` maps a library to its text's file. `program` is the program.Program, or the extension.NumberedFiles, whose
    text has several files: lines of calls in another file than the finding's are then strings that name it.
    """
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def triple(key):
        return tuple(int(v) for v in fields[key].split(",")) if key in fields else None

    def places_of(prefix):
        """(file, line) of what the report says under a prefix, then of the calls around it."""
        if prefix + "line" in fields:
            lines = [int(fields[prefix + "line"])]
        elif prefix + "library" in fields:
            library = fields[prefix + "library"]
            names = {Path(file).name for file in [file_of_library(library)] if file} | (program.names if program else set())
            calls = lines_of_instruction(library, int(fields[prefix + "offset"]), names)
            own = [call for call in calls if not is_implicit_copy(*call, place, file_of_library(library))]
            lines = [line for _, line in own or calls]
        else:
            lines = []
        return [place(line) for line in lines]

    def place(line):
        return program.place(line) if program else (None, line)

    places = places_of("")
    if not places and (kernel_line := int(fields.get("kernel_line", 0))):
        places = [place(kernel_line)]
    file, line = places[0] if places else (None, None)

    def named(places):
        return tuple(line if at == file else f"{line} of {Path(at).name}" for at, line in places)

    other = None
    if "other_block" in fields:
        other_places = places_of("other_")
        other_file, other_line = other_places[0] if other_places else (None, None)
        did = fields.get("other_did", "")
        other = Party(triple("other_block"), triple("other_thread"), did, other_line, named(other_places[1:]))
        other.file = None if other_file == file else other_file
    message, in_file = fields["message"], file or file_of_library(None)
    if "argument" in fields and in_file and line:
        named_argument = argument_of_launch(in_file, line, int(fields["argument"]))
        message = message.replace(f"argument {fields['argument']}", named_argument, 1) if named_argument else message
    return Finding(
        FindingData(
            fields["kind"],
            message,
            fields["kernel"],
            in_file,
            line,
            triple("block"),
            triple("thread"),
            other,
            named(places[1:]),
        )
    )


def is_implicit_copy(symbol, line, place, library_file):
    """Whether a function at a line is the copy constructor or assignment that the compiler wrote for the struct there."""
    file, line = place(line)
    text = linecache.getline(str(file or library_file), line)
    return bool(COPY.search(symbol) and (STRUCT.search(text) or not text))


def argument_of_launch(file, line, number):
    """The variable that is the argument of a number, from 1, of the launch at or behind a line; None where it is none."""
    behind = "\n".join(lines_of_file(file)[line - 1 : line + 20])
    match = re.search(r"<<<.*?>>>\s*\((.*?)\)\s*;", behind, re.DOTALL)
    arguments = split_at_commas(tokens_of(match[1])) if match and number else []
    if not 0 < number <= len(arguments):
        return None
    text = re.sub(r"^\s*(\([^()]*\)|(reinterpret|static|const)_cast\s*<[^()]*>)\s*", "", text_of(arguments[number - 1]))
    named = re.match(r"\s*\(?\s*([A-Za-z_]\w*)", text)
    return named and named[1]


def lines_of_instruction(library, offset, names):
    """The (symbol, line) of the function that an instruction belongs to, then those of the calls it was inlined into.

    `names` are those of the text's files, without their folders; lines of other files are left out.
    """
    run = subprocess.run(["addr2line", "-e", library, "-f", "-i", hex(offset)], capture_output=True, text=True)
    told = run.stdout.splitlines()
    calls = {}
    for symbol, place in zip(told[::2], told[1::2], strict=True):
        name, _, line = re.sub(r" \(discriminator \d+\)$", "", place).rpartition(":")
        if Path(name).name in names and line.isdigit():
            calls.setdefault(int(line), symbol)
    return [(symbol, line) for line, symbol in calls.items()]
