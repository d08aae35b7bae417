"""How to step through a variant's kernels in gdb: the file's first kernel, and a command line that stops there."""

import re
import shlex
import sys
from dataclasses import dataclass

from .declarations import KEYWORD, declared_kernel
from .text import UnsupportedError, tokens_of

KERNEL_BEGINS = re.compile(rf"\b(?:void\s+)?{KEYWORD}\b")


@dataclass(frozen=True)
class Kernel:
    """`line` is that of the name in its definition, counted in the Python file."""

    name: str
    line: int


def first_kernel(text):
    """The first kernel of a variant file's text, or None. What stands in front of it is Python, which is not read."""
    for match in KERNEL_BEGINS.finditer(text):
        tokens = tokens_of(text[match.start() :])
        at = next(index for index, token in enumerate(tokens) if token.text == KEYWORD)
        try:
            found = declared_kernel(tokens, at)
        except UnsupportedError:  # it is prose
            continue
        if found:
            return Kernel(found.name.text, text.count("\n", 0, match.start()) + found.name.line)
    return None


def recipe(file, kernel, root, script_arguments):
    """What a user types to stop in thread 5 of block 0 of the kernel.

    `script_arguments` are those of Python for a program, started in the folder `root`, that runs it under the emulator.
    """
    condition = "emulator::current->thread_index.x == 5 && emulator::current->block->block_index.x == 0"
    gdb = [
        *("gdb", "-q", "-cd", str(root)),
        *("-ex", "set breakpoint pending on"),
        *("-ex", f"break {file}:{kernel.line} if {condition}"),
        *("-ex", "run"),
        *("--args", sys.executable, *script_arguments),
    ]
    return f"""\
To step through {kernel.name} ({file}:{kernel.line}) in thread 5 of block 0:
    {shlex.join(gdb)}
There, `next` and `step` stay in that thread; what other threads do meanwhile, at a barrier for example, happens in between.
    print emulator::current->thread_index       which thread runs; ->block->block_index: which block
    info locals                                 its variables
    condition 1 emulator::current->lane == 0    stop in other threads; `continue` goes on to the next one
    print emulator::worker->block->arrived      how many threads wait at the block's barrier"""
