"""What the emulator's tests share."""

import functools
import itertools
import subprocess

import pytest

from cuda_emulator import errors


@pytest.fixture(scope="session", autouse=True)
def one_addr2line_a_library():
    """Ask one addr2line for the lines of all findings in a library: it reads the debugging information once."""

    @functools.cache
    def started(library):
        command = ["addr2line", *errors.HOW_IT_TELLS, library]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def addr2line(library, offsets):
        process = started(library)
        print(*map(hex, offsets), "0", sep="\n", file=process.stdin, flush=True)
        told = list(itertools.takewhile(lambda line: line.strip("0x\n"), process.stdout))  # until address 0
        process.stdout.readline(), process.stdout.readline()  # which belongs to nothing
        return errors.places_told(map(str.strip, told))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "addr2line", addr2line)
        yield
