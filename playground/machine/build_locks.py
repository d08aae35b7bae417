"""Locks that a killed build has left behind, on which the next build of the same extension would wait for ever.

torch.utils.cpp_extension (before 2.14.1) locks a build directory by creating a file named `lock` in it. The builder keeps
that file open until it removes it, so a lock that no process has open is stale, unless its builder is out of sight.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

JUDGED = "judged"  # the folder in torch's with one for each judged file that is not the project's
SECOND_LOOK = 0.25  # seconds; a builder closes its lock a moment before it removes it
NETWORK_FILE_SYSTEMS = {"afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}


class HeldLock(NamedTuple):
    """A lock that was left in place, and who holds it or why that cannot be known."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Locks(NamedTuple):
    """What `clear_stale_locks` did: the locks that it removed, and those that it left."""

    cleared: list[Path]
    held: list[HeldLock]


def extensions_root() -> Path:
    """The directory in which torch keeps one build directory an extension."""
    if (directory := os.environ.get("TORCH_EXTENSIONS_DIR")) is not None:
        return Path(directory)
    from torch.utils import cpp_extension

    if torch.version.hip is not None:
        accelerator = f"rocm{torch.version.hip}"
    else:
        accelerator = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cpp_extension.get_default_build_root()) / f"{python}_{accelerator.replace('.', '')}"


def clear_stale_locks(root: Path | None = None, grace: float = 2.0) -> Locks:
    """Remove the locks below `root` (torch's own directory if None) whose builder is dead; leave and report the others.

    A lock is stale when, in two looks, no process had it open and none worked in its directory (a ninja outlives the
    Python that started it). The second look comes when the lock is `grace` seconds old, and at least a moment later.
    Left in place are also locks whose builder may be out of sight: another user's, and those on a network file system.
    """
    root = extensions_root() if root is None else root
    cleared, held = [], []
    if not root.is_dir() or _locks_end_with_their_holder():
        return Locks(cleared, held)
    with _one_at_a_time(root):
        unheld = {}
        for path, made in _look(_lock_files(root), held).items():
            if reason := _out_of_sight(path):
                held.append(HeldLock(path, reason))
            else:
                unheld[path] = made
        if unheld:
            age = min(time.time() - made.st_mtime for made in unheld.values())
            time.sleep(max(SECOND_LOOK, min(grace, grace - age)))
        for path in _look(unheld, held):
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                held.append(HeldLock(path, f"stale, but it cannot be removed ({error.strerror})"))
            else:
                cleared.append(path)
    return Locks(cleared, held)


def _locks_end_with_their_holder() -> bool:
    """Whether this torch locks through the operating system and not through the existence of a file."""
    from torch.utils import cpp_extension

    return not hasattr(cpp_extension, "FileBaton")


def _lock_files(root: Path) -> dict[Path, os.stat_result]:
    """Every lock below `root`, and which file it is now: the path alone may name another one later."""
    found = {}
    for path in sorted([*root.glob("*/lock"), *root.glob(f"{JUDGED}/*/*/lock")]):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat()
    return found


def _look(locks: dict[Path, os.stat_result], held: list[HeldLock]) -> dict[Path, os.stat_result]:
    """Those of `locks` that still exist, unchanged, and have no holder. The others that exist are added to `held`."""
    holders = _holders() if locks else {}
    unheld = {}
    for path, made in locks.items():
        try:
            now = path.stat()
        except FileNotFoundError:
            continue
        real = path.resolve()
        holder = holders.get(str(real)) or holders.get(str(real.parent))
        if holder is None and (now.st_dev, now.st_ino, now.st_mtime_ns) != (made.st_dev, made.st_ino, made.st_mtime_ns):
            holder = "a build that has just begun"
        if holder is None:
            unheld[path] = made
        else:
            held.append(HeldLock(path, f"held by {holder}"))
    return unheld


def _holders() -> dict[str, str]:
    """A process for each file that is open and each directory that is worked in, as far as this user may know."""
    holders = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or it is another user's
            name = f"{process.name()} (pid {process.pid})"
            holders.setdefault(process.cwd(), name)
            for file in process.open_files():
                holders.setdefault(file.path, name)
    return holders


def _out_of_sight(path: Path) -> str | None:
    """Why the holder of a lock might not be seen from here; None if it would be."""
    owner = path.stat().st_uid if path.exists() else None
    if owner is not None and hasattr(os, "geteuid") and os.geteuid() not in (0, owner):
        return f"made by another user (uid {owner}), whose processes cannot be seen"
    if (kind := _file_system(path, psutil.disk_partitions(all=True))) in NETWORK_FILE_SYSTEMS:
        return f"on a network file system ({kind}), where another machine may hold it; remove it if none does"
    return None


def _file_system(path: Path, partitions: list) -> str | None:
    """The type of the file system that holds `path`: of the innermost mount point above it, the one mounted last."""
    above = [str(parent) for parent in path.resolve().parents]
    mounted = {partition.mountpoint: partition.fstype for partition in partitions}
    return next((mounted[parent] for parent in above if parent in mounted), None)


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Two processes that clear the same root would remove, between the other's look and its removal, what is new."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
