"""Locks of torch.utils.cpp_extension (before 2.14.1) that a killed build has left: the next build would wait for ever."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

import cuda_emulator

JUDGED = "judged"  # the folder in torch's with one for each judged file that is not the project's
ROOM, KEPT = "builds-", "kept-"  # begin the names of those there that a file in a sandbox writes to; kept for its next run
SECOND_LOOK = 0.25  # seconds; a builder closes its lock a moment before it removes it
NETWORK_FILE_SYSTEMS = {"afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}


class Locks(NamedTuple):
    """The locks that were removed, and {lock that was left in place: who holds it, or why that cannot be known}."""

    cleared: list[Path]
    held: dict[Path, str]


def extensions_root() -> Path:
    """Return the directory in which torch keeps one build directory an extension."""
    if (directory := os.environ.get("TORCH_EXTENSIONS_DIR")) is not None:
        return Path(directory)
    version = cuda_emulator.torch_version()
    accelerator = "cpu" if version.cuda is None else f"cu{version.cuda}"
    accelerator = accelerator if version.hip is None else f"rocm{version.hip}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser().resolve()
    return caches / "torch_extensions" / f"{python}_{accelerator.replace('.', '')}"


def clear_stale_locks(root: Path | None = None, grace: float = 2.0) -> Locks:
    """Remove the locks below `root` (torch's own directory if None) whose builder is dead; leave and report the others.

    Dead: in two looks, the second when the lock is `grace` seconds old, no process had it open or worked in its directory.
    Another user's locks, and those on a network file system, stay.
    """
    root = extensions_root() if root is None else root
    cleared: list[Path] = []
    if "import FileBaton" not in (cuda_emulator.torch_folder() / "utils" / "cpp_extension.py").read_text():
        return Locks(cleared, {})  # newer ones lock through the operating system
    # A link would lead elsewhere; what a file in a sandbox leaves is removed with its folder.
    judged = [folder for folder in _folders(root / JUDGED) if not folder.name.startswith((ROOM, KEPT))]
    locks = [folder / "lock" for above in (root, *judged) for folder in _folders(above)]
    found = {path: status for path in locks if (status := _status(path))}
    held = _held(found)
    held |= {path: why for path in found.keys() - held.keys() if (why := _out_of_sight(path, found[path]))}
    unheld = {path: status for path, status in found.items() if path not in held}
    if unheld:
        age = min(time.time() - status.st_mtime for status in unheld.values())
        time.sleep(max(SECOND_LOOK, min(grace, grace - age)))
    held |= _held(unheld)
    for path in (path for path in unheld if path not in held):
        try:
            path.unlink()
            cleared.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            held[path] = f"stale, but it cannot be removed ({error.strerror})"
    return Locks(cleared, held)


def _folders(above: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(above) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _status(path: Path) -> os.stat_result | None:
    """Which file it is now: the path alone may name another one later."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def _held(locks: dict[Path, os.stat_result]) -> dict[Path, str]:
    """{lock: 'held by ...'} of those that still exist and have a holder, or are others by now."""
    holders, found = _holders() if locks else {}, {}
    for path, before in locks.items():
        if now := _status(path):
            real = path.resolve()
            is_same = (now.st_dev, now.st_ino, now.st_mtime_ns) == (before.st_dev, before.st_ino, before.st_mtime_ns)
            holder = holders.get(str(real)) or holders.get(str(real.parent))
            if holder or not is_same:
                found[path] = f"held by {holder or 'a build that has just begun'}"
    return found


def _holders() -> dict[str, str]:
    """A process for each file that is open and each directory that is worked in, as far as this user may know."""
    holders: dict[str, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or it is another user's
            name = f"{process.name()} (pid {process.pid})"
            holders.setdefault(process.cwd(), name)
            for file in process.open_files():
                holders.setdefault(file.path, name)
    return holders


def _out_of_sight(path: Path, status: os.stat_result) -> str | None:
    """Why the holder of a lock might not be seen from here; None if it would be."""
    if os.geteuid() not in (0, status.st_uid):
        return f"made by another user (uid {status.st_uid}), whose processes cannot be seen"
    mounted = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    kind = next((mounted[str(above)] for above in path.resolve().parents if str(above) in mounted), None)
    if kind in NETWORK_FILE_SYSTEMS:
        return f"on a network file system ({kind}), where another machine may hold it; remove it if none does"
    return None
