"""Messages between the driver and a worker: one JSON object a line over a pair of pipes.

JSON and not pickle, because the worker runs code that the driver does not trust. Its tensors travel as files of raw bytes
(tensors.py), for the same reason.
"""

import contextlib
import json
import os
import select
import time

LOOK_AGAIN = 0.5  # seconds
LONGEST = 16 << 20  # bytes of a message: whoever writes without end must not fill the reader's memory


class Channel:
    """One end: reads lines from one file descriptor and writes lines to the other."""

    def __init__(self, read_fd, write_fd):
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._buffer = b""

    def send(self, message, goes_on=lambda: True):
        """Write one message. Raises BrokenPipeError when nobody can read it.

        Raises TimeoutError where a pipe that does not block is full, and `goes_on()` says to wait no longer.
        """
        data = json.dumps(message).encode() + b"\n"
        while data:
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(self._write_fd, data) :]
                continue
            if not goes_on():
                raise TimeoutError
            select.select([], [self._write_fd], [], LOOK_AGAIN)

    def receive(self, seconds=None):
        """Return the next message. Raises TimeoutError after `seconds`, EOFError at the end of the stream.

        Raises ValueError or RecursionError where it is no JSON, nested too deeply, or longer than LONGEST.
        """
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

    def is_idle(self):
        """Return whether the other end has sent nothing that was not received."""
        return not self._buffer and not select.select([self._read_fd], [], [], 0)[0]

    def close(self):
        os.close(self._read_fd)
        os.close(self._write_fd)
