"""The runtime library as Python sees it."""

import contextlib
import ctypes
import functools
import signal
from dataclasses import dataclass

from . import toolchain

MODES = {"fast": 0, "check": 1, "count": 2}
SCHEDULES = {"forward": 0, "reversed": 1, "random": 2}
# Sent to a process whose time is up: its launch ends with a finding that says where a thread was. Others ignore the signal.
CALL_OFF = signal.SIGURG
SECONDS_TO_ANSWER = 10.0


@dataclass(frozen=True)
class Launch:
    """One kernel launch: its name as the launch wrote it, and its configuration."""

    kernel: str
    grid: tuple
    block: tuple
    shared_bytes: int


@functools.cache
def library():
    loaded = ctypes.CDLL(str(toolchain.runtime_library()), mode=ctypes.RTLD_GLOBAL)
    loaded.emulator_configure.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_double]
    loaded.emulator_launches.restype = ctypes.c_char_p
    loaded.emulator_counts.restype = ctypes.c_char_p
    loaded.emulator_accept_races.argtypes = [ctypes.c_char_p, ctypes.c_int]
    loaded.emulator_waits.argtypes = [ctypes.c_char_p, ctypes.c_int]
    loaded.emulator_accepted_races.restype = ctypes.c_char_p
    loaded.emulator_rounds.restype = ctypes.c_char_p
    loaded.emulator_is_pageable.argtypes = [ctypes.c_void_p]
    loaded.emulator_set_pageable.argtypes = [ctypes.c_void_p, ctypes.c_int]
    for unwritten in (loaded.emulator_first_unwritten, loaded.emulator_count_unwritten):
        unwritten.argtypes, unwritten.restype = [ctypes.c_void_p, ctypes.c_longlong], ctypes.c_longlong
    return loaded


@functools.cache
def torch_glue():
    """The runtime's PyTorch side. Needs the runtime itself first."""
    library()
    return ctypes.PyDLL(str(toolchain.torch_glue_library()), mode=ctypes.RTLD_GLOBAL)


def configure(mode, schedule, seed, processors, time_limit):
    library().emulator_configure(MODES[mode], SCHEDULES[schedule], seed, processors, time_limit or 0.0)


def obey_call_off():
    """End the launch under way, and all that follow, with a finding once this process is sent CALL_OFF."""
    library().emulator_call_launches_off_at(int(CALL_OFF))


@contextlib.contextmanager
def without_values():
    """Let tensors have no values and launches run only some of their blocks."""
    library().emulator_extents(1)
    try:
        yield
    finally:
        library().emulator_extents(0)


def launches():
    """Every launch since the last reset, in order."""

    def triple(text):
        return tuple(int(part) for part in text.split(","))

    rows = (line.split("\t") for line in library().emulator_launches().decode().splitlines())
    return [Launch(name, triple(grid), triple(block), int(shared)) for name, grid, block, shared in rows]


def reset_launches():
    library().emulator_forget_launches()


def take_finding():
    """The text of a finding that no receiver has taken, or None."""
    buffer = ctypes.create_string_buffer(1 << 14)
    return buffer.value.decode() if library().emulator_take_finding(buffer, len(buffer)) else None


def accept_races(library_file, lines):
    """Let the kernels of a library have races at these lines of their text's file."""
    for line in lines:
        library().emulator_accept_races(str(library_file).encode(), line)


def waits(library_file, lines):
    """Take the volatile accesses of a library's kernels in these lines of their text's file for waiting on other threads."""
    for line in lines:
        library().emulator_waits(str(library_file).encode(), line)


def accepted_races():
    """{line: how often a race was found and accepted there}"""
    rows = (row.split() for row in library().emulator_accepted_races().decode().splitlines())
    return {int(line): int(count) for line, count in rows}


def rounds():
    """{kernel: {("mbarrier" or "cp.async", address in shared memory): rounds}} of all checked launches.

    Rounds are the ended phases of the mbarrier, or how often a warp's cp.async has filled the place, in the block with most.
    """
    found = {}
    for row in library().emulator_rounds().decode().splitlines():
        kernel, kind, address, count = row.split("\t")
        found.setdefault(kernel, {})[kind, int(address)] = int(count)
    return found


def unwritten(tensor):
    """(The byte offset, from a tensor's first element, of the first one that nothing has written; how many there are)."""
    if tensor.numel() == 0 or not tensor.data_ptr():
        return None, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span != tensor.numel():  # not dense: what lies between its elements is not its own
        return None, 0
    memory = tensor.data_ptr(), span * tensor.element_size()
    if (at := library().emulator_first_unwritten(*memory)) < 0:
        return None, 0
    return at, max(1, library().emulator_count_unwritten(*memory) * 4 // tensor.element_size())
