"""Who of a run's builds and judgements gets how many of the machine's processors, so that what begins also ends soon."""

import contextlib
import threading

LOOK_AGAIN = 0.5  # seconds


class Processors:
    """Counts a number of processors that are in use. Threads share it.

    A judgement takes its part at once, since its variant is built and the GPU waits for it. A build waits until its part is
    free, or until no other build is under way.
    """

    def __init__(self, count):
        self.free = count
        self._builds = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def judgement(self, count=1):
        """Take so many processors while the block runs."""
        self._take(count, 0)
        try:
            yield
        finally:
            self._take(-count, 0)

    @contextlib.contextmanager
    def build(self, count, is_over=lambda: False):
        """Wait for so many processors, or until is_over(), and take them while the block runs."""
        with self._changed:
            while self.free < count and self._builds and not is_over():
                self._changed.wait(LOOK_AGAIN)
            self._take(count, 1)
        try:
            yield
        finally:
            self._take(-count, -1)

    def _take(self, count, builds):
        with self._changed:
            self.free -= count
            self._builds += builds
            self._changed.notify_all()
