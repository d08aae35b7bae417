"""Messages between the driver and an untrusted worker: one JSON object, never a pickle, a line over a pair of pipes."""

import contextlib
import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

LOOK_AGAIN = 0.5  # seconds
LONGEST = 16 << 20  # bytes of a message: whoever writes without end must not fill the reader's memory


class Channel:
    """One end: reads lines from one file descriptor and writes lines to the other."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._buffer = b""

    def send(self, message: Any, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Write one message. Raises BrokenPipeError, or TimeoutError where the pipe is full and `goes_on()` gives up."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(self._write_fd, data) :]
                continue
            if not goes_on():
                raise TimeoutError
            select.select([], [self._write_fd], [], LOOK_AGAIN)

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message. Raises TimeoutError after `seconds`, EOFError, ValueError or RecursionError (no JSON)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST:
                raise ValueError(f"a message of more than {LONGEST} bytes")
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read_fd], [], [], left)[0]:
                raise TimeoutError
            data = os.read(self._read_fd, 1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        # Lone surrogates, which JSON can hold and UTF-8 cannot, become question marks.
        return json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))

    def is_idle(self) -> bool:
        """Return whether the other end has sent nothing that was not received."""
        return not self._buffer and not select.select([self._read_fd], [], [], 0)[0]

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)
