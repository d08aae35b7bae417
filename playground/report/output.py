"""A file that an option asked for: that it can be written is seen before a run, and what fails later is written elsewhere."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import filelock

from playground.catalog import Impossible

ROOM = 64 << 10  # bytes; what a small run's document takes


class Output:
    """The file of an option such as "--json". `is_elsewhere` says that `path` is no longer the one that was asked for."""

    def __init__(self, option, path):
        self.option, self.path = option, Path(path)
        self.is_elsewhere = False
        self._lock = None

    def claim(self):
        """See that the file can be written, and keep it from other runs until `release`. Raises Impossible."""
        where = f"{self.option} {self.path}"
        if str(self.path) == "-":
            raise Impossible(f"{where}: only --json goes to standard output; name a file")
        try:
            if self.path.is_dir():
                raise OSError("it is a folder; name a file")
            if self.is_special and not os.access(self.path, os.W_OK):
                raise OSError("no permission")
            if not self.is_special:
                path = self.path.resolve()
                self._try_out(path)
                lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
                lock.acquire()
                self._lock = lock
        except filelock.Timeout:
            raise Impossible(f"{where}: another run or option writes it; name another file") from None
        except NotImplementedError:  # some network file systems have no locks
            pass
        except (OSError, RuntimeError) as complaint:  # RuntimeError: links in a circle
            why = getattr(complaint, "strerror", None) or complaint
            raise Impossible(f"{where}: cannot be written: {why}") from None

    @property
    def is_special(self):
        """Return whether it is a pipe or a device, which takes everything at once."""
        return self.path.exists() and not self.path.is_file()

    def _try_out(self, path):
        if not path.parent.exists():
            raise OSError(f"there is no folder {path.parent}; make it first")
        trial = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # where document.write_whole puts the text first
        try:
            with trial.open("wb") as file:
                file.write(bytes(ROOM))
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                trial.unlink(missing_ok=True)

    def write(self, make):
        """Write the file by `make(path)`, or else a temporary one instead, which a line on stderr names."""
        try:
            make(self.path)
        except OSError as complaint:
            failed = f"{self.option} {self.path}: {complaint.strerror or complaint}"
            self.is_elsewhere = True
            try:
                number, name = tempfile.mkstemp(prefix=f"{self.path.stem}-", suffix=self.path.suffix)
                os.close(number)
                self.path = Path(name)
                make(self.path)
                _say(f"{failed}; what was to be written is in {name}")
            except OSError as another:
                _say(f"{failed}; {tempfile.gettempdir()}: {another.strerror or another}")

    def release(self):
        """Let other runs have the file. Safe to call twice."""
        lock, self._lock = self._lock, None
        if lock:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def _say(line):
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
