"""Files in a folder that a judged process can write to, for the processes that judge, which hold it open beforehand.

What lies there may be a link, a pipe that nobody writes to, terabytes of holes, and something else a moment later: the
functions here alone open, measure and remove it.
"""

import fcntl
import os
import secrets
import stat
import weakref
from pathlib import Path
from typing import NamedTuple

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
DEEPEST = 64  # folders within one another that are measured


class Refused(Exception):
    """What lies at a name is no file that a judged process may leave there; the text continues a sentence about it."""


class File(NamedTuple):
    """A name in a Folder: `path` is for the process that writes there, `held` for those that judge."""

    path: Path
    held: Path


class Folder:
    """A folder that a judged process will write to, held open: make it before that begins. Other processes take `held`."""

    def __init__(self, path: Path | str) -> None:
        self.path, self._descriptor = Path(path), os.open(path, FOLDER)
        self.close = weakref.finalize(self, os.close, self._descriptor)  # which may be called twice
        self.held = held_at(self._descriptor)

    def file(self, name: str) -> File:
        """Return the File of that name."""
        return File(self.path / name, self.held / name)

    def size(self, most: int) -> float:
        """Return the bytes on the disk of all that is below; infinite for over `most` entries, or what cannot be looked at."""
        try:
            total, _ = _size(os.open(".", FOLDER, dir_fd=self._descriptor), most, DEEPEST)
            return total
        except OSError:
            return float("inf")


def held_at(descriptor: int) -> Path:
    """Return the path under which other processes of this user open what this process has open."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def opened(path: Path | str, flags: int = os.O_RDONLY, most: float | None = None, or_new: bool = False) -> int:
    """Return a descriptor of the file at a path, which is a File's `held`.

    With O_CREAT it is a new file, with `or_new` one where there is none. Raises Refused for what is no regular file of this
    user's alone, or has more than `most` bytes; OSError where there is none, or, to be made, there is one.
    """
    try:
        descriptor = os.open(path, flags | FILE | (os.O_EXCL if flags & os.O_CREAT else 0), 0o600)
    except FileNotFoundError:
        if not or_new:
            raise
        return opened(path, flags | os.O_CREAT)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != os.geteuid():
            raise Refused("is no regular file of its own")
        if most is not None and found.st_size > most:
            raise Refused(f"has {found.st_size} bytes, expected at most {most}")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path | str, most: int) -> bytes:
    """Return the bytes of a file, of up to `most`, however it grows meanwhile. Raises what `opened` does."""
    with os.fdopen(opened(path, most=most), "rb") as file:
        return file.read(most)


def remove(path: Path | str) -> None:
    """Remove what lies at a path, if anything does: a file, a link, an empty folder. Raises Refused where that cannot be."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError:
        try:
            Path(path).rmdir()
        except OSError:
            raise Refused("cannot be removed") from None


def erase(path: Path | str) -> bool:
    """Write zeros over the first eight bytes of a file, whose memory stays. Return whether it was a regular file."""
    try:
        with os.fdopen(opened(path, os.O_WRONLY), "wb") as file:
            file.write(bytes(8))
            return True
    except (OSError, Refused):
        return False


def new_seed(bits: int = 31) -> int:
    """Return a seed that nobody foresees, whatever the generators of Python and PyTorch were seeded with."""
    return secrets.randbits(bits)


def memory(name: str) -> int:
    """Return the descriptor of new memory, which may grow and nobody can shorten or seal; without memfd, no room."""
    if not hasattr(os, "memfd_create"):  # a Python that was built for older systems
        return os.open(os.devnull, os.O_RDWR)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def _size(folder: int, most: int, depth: int) -> tuple[int, int]:
    total = count = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                    inside = os.open(entry.name, FOLDER, dir_fd=folder) if stat.S_ISDIR(found.st_mode) else None
                except FileNotFoundError:
                    continue
                total, count = total + found.st_blocks * 512, count + 1
                if inside is not None:
                    more, counted = _size(inside, most - count, depth - 1)
                    total, count = total + more, count + counted
                if count > most or not depth:
                    raise OSError("too many entries")
    finally:
        os.close(folder)
    return total, count
