"""What the emulator raises."""

import functools
import itertools
import linecache
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .sourcemap import lines_of_file
from .text import UnsupportedError, matching, split_at_commas, split_at_template_commas, text_of, tokens_of

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

    def seen_from(self, block):
        """Return what it did and where, for a sentence about a thread of `block`."""
        at = f"{self.line} of {Path(self.file).name}" if self.file else self.line
        where = f" at line {at}{called_from(self.callers)}" if self.line else ""
        if self.thread is None:
            return self.did + where
        of_block = f" of block {index_text(self.block)}" if self.block != block else ""
        return f"thread {index_text(self.thread)}{of_block} {self.did}{where}"


def index_text(index):
    return f"({','.join(map(str, index))})"


def preposition(kind):
    """Return the word between a kind of finding and the memory that it is about."""
    return "on" if "race" in kind else "of" if kind.endswith("read") else "at"


@dataclass
class FindingData:
    """`object` is the memory that it is about, in the place of a message, `did` what the thread does, `why` the reason."""

    kind: str
    message: str
    kernel: str
    file: str | None = None
    line: int | None = None
    block: tuple | None = None
    thread: tuple | None = None
    other: Party | None = None
    callers: tuple = ()
    object: str = ""
    did: str = ""
    why: str = ""
    somebody: str = ""  # what another thread did that is not known by name


class Finding(RuntimeError):
    """A mistake in a kernel. `other` is the second party of a race or of a divergence."""

    def __init__(self, data):
        self.kind, self.kernel = data.kind, data.kernel
        self.file, self.line = data.file, data.line
        self.block, self.thread, self.other, self.callers = data.block, data.thread, data.other, data.callers
        place = f"{self.file}:{self.line}: " if self.file and self.line else ""
        told, self.message = self._told(data)
        text = place + told
        if self.kernel:  # else host code did it
            text += f"; kernel {self.kernel}"
        if self.block is not None:
            text += f", block {index_text(self.block)}"
            text += "" if data.did else f", thread {index_text(self.thread)}"
        super().__init__(text + called_from(self.callers))

    def _told(self, data):
        """Return what happened, where, who else took part and why it is a mistake, with the kind in front and without."""
        parts = [f"thread {index_text(self.thread)} {data.did} here"] if data.did and self.thread else []
        parts += [self.other.seen_from(self.block)] if self.other else [data.somebody] if data.somebody else []
        parts += [data.why] if data.why else []
        told = ", ".join(parts)
        if data.object:
            return f"{self.kind} {preposition(self.kind)} {data.object}: {told}", told
        message = f"{data.message}: {told}" if told else data.message
        return f"{self.kind}: {message}", message


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
    elif "somebody" in fields and (other_places := places_of("other_")):  # a thread of another launch
        other_file, other_line = other_places[0]
        other = Party(None, None, fields["somebody"], other_line, named(other_places[1:]))
        other.file = None if other_file == file else other_file
    about, kernel_file, kernel_line = fields.get("object", ""), *place(int(fields.get("kernel_line", 0)))
    if "parameter" in fields:
        number = int(fields["parameter"])
        name = parameter_of_kernel(str(kernel_file or file or file_of_library(None)), kernel_line, fields["kernel"], number)
        about = about.replace("`parameter", f"`{name}" if name else f"`argument {number}")
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
            about,
            fields.get("did", ""),
            fields.get("why", ""),
            fields.get("somebody", ""),
        )
    )


def is_implicit_copy(symbol, line, place, library_file):
    """Whether a function at a line is the copy constructor or assignment that the compiler wrote for the struct there."""
    file, line = place(line)
    text = linecache.getline(str(file or library_file), line)
    return bool(COPY.search(symbol) and (STRUCT.search(text) or not text))


def parameter_of_kernel(file, line, kernel, number):
    """The name of a kernel's parameter of a number, from 1, where the kernel is declared at a line; None if it is not found."""
    tokens = [token for token in tokens_of("\n".join(lines_of_file(file)[line - 1 : line + 60])) if not token.blank]
    name = re.sub(r"<.*", "", kernel).rpartition("::")[2]
    try:
        open_at = next(at for at in range(1, len(tokens)) if tokens[at].text == "(" and tokens[at - 1].text == name)
        parameters = split_at_template_commas(tokens[open_at + 1 : matching(tokens, open_at)])
        declared = list(itertools.takewhile(lambda token: token.text not in ("=", "["), parameters[number - 1]))
    except (StopIteration, UnsupportedError, IndexError):
        return None
    return declared[-1].text if len(declared) > 1 and declared[-1].kind == "word" else None


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


def addr2line(library, offsets):
    """{offset: the (symbol, file, line) of the function that the instruction belongs to, then of the calls it was inlined into}

    One run for all of them. A line that is not known is 0.
    """
    command = ["addr2line", *HOW_IT_TELLS, library, *map(hex, offsets)]
    return places_told(subprocess.run(command, capture_output=True, text=True).stdout.splitlines())


HOW_IT_TELLS = ("-a", "-f", "-i", "-e")


def places_told(lines):
    """What addr2line says, as `addr2line` returns it."""
    found, lines = {}, iter(lines)
    for line in lines:
        if line.startswith("0x"):
            places = found[int(line, 16)] = []
        else:
            file, _, number = next(lines).split(" (discriminator")[0].rpartition(":")
            places.append((line, file, int(number) if number.isdigit() else 0))
    return found


def lines_of_instruction(library, offset, names):
    """The (symbol, line) of the function that an instruction belongs to, then those of the calls it was inlined into.

    `names` are those of the text's files, without their folders; lines of other files are left out.
    """
    calls = {}
    for symbol, file, line in places_of_instruction(library, offset):
        if line and Path(file).name in names:
            calls.setdefault(line, symbol)
    return [(symbol, line) for line, symbol in calls.items()]


@functools.lru_cache(maxsize=1 << 12)  # a library keeps its content as long as it is loaded
def places_of_instruction(library, offset):
    return addr2line(library, [offset]).get(offset, [])
