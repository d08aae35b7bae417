"""What count mode has counted, kernel by kernel and line by line. The same text and sizes give the same counts on every run."""

from collections import defaultdict
from dataclasses import dataclass, field

from . import runtime
from .errors import addr2line


@dataclass
class Traffic:
    """Requests of warps, and what they cost: 32-byte sectors in device memory, wavefronts in shared memory.

    `ideal` is what the same bytes would cost at least: sectors filled, banks used evenly.
    """

    requests: int = 0
    transactions: int = 0
    ideal: int = 0
    bytes: int = 0

    def add(self, other):
        self.requests += other.requests
        self.transactions += other.transactions
        self.ideal += other.ideal
        self.bytes += other.bytes


@dataclass
class Counts:
    """One kernel's counts over all its launches since the last reset."""

    kernel: str
    launches: int = 0
    barriers: int = 0
    atomics: int = 0
    matrix_instructions: int = 0
    global_read: Traffic = field(default_factory=Traffic)
    global_write: Traffic = field(default_factory=Traffic)
    shared_read: Traffic = field(default_factory=Traffic)
    shared_write: Traffic = field(default_factory=Traffic)
    lines: dict = field(default_factory=dict)  # (line, "global_read" and so on) -> Traffic


def lines_of(library, offsets):
    """The outermost line, that of the kernel text, which each instruction was inlined into last; one run for all of them."""
    own = str(runtime.toolchain.INCLUDE)
    told = addr2line(library, offsets).items()
    return {offset: next((line for _, file, line in places if not file.startswith(own)), 0) for offset, places in told}


def counts(by_line=False):
    """Counts by kernel name. `by_line` also says which lines they come from."""
    result, accesses = {}, defaultdict(list)
    for row in runtime.library().emulator_counts().decode().splitlines():
        what, *fields = row.split("\t")
        if what == "kernel":
            result[fields[0]] = Counts(fields[0], *map(int, fields[1:]))
        else:
            kernel, library, offset, space, direction, *numbers = fields
            traffic = Traffic(*map(int, numbers))
            getattr(result[kernel], f"{space}_{direction}").add(traffic)
            accesses[library].append((kernel, int(offset), f"{space}_{direction}", traffic))
    if by_line:
        for library, entries in accesses.items():
            lines = lines_of(library, sorted({offset for _, offset, _, _ in entries}))
            for kernel, offset, kind, traffic in entries:
                result[kernel].lines.setdefault((lines.get(offset, 0), kind), Traffic()).add(traffic)
    return result


def reset_counts():
    runtime.library().emulator_forget_counts()
