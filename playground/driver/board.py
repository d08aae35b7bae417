"""The queue that ranks share, on a TCPStore: who has taken which item, what came of it, and who is still there.

An item is a number below a count, of one of several kinds. Taking one is a single compare-and-set, so no two ranks have the
same; what a lost rank had taken is free to be taken once more.
"""

import json
import time

LOST_AFTER = 30.0  # seconds without a sign of life, of which there is one a second
FIRST_SIGN_WITHIN = 300.0  # seconds: a rank that starts has much to import
ATTEMPTS = 2
PAUSE = 0.2  # seconds between looks at what others do


class Board:
    """One rank's view of the queue. `store` is a torch.distributed store that nobody else in this process uses."""

    def __init__(self, store, rank):
        self._store = store
        self._rank = rank
        self._seen = {}  # {rank: (its last count of signs of life, when that changed)}

    def sign_of_life(self, name=None):
        """This rank's, or that of what gives its own under another name."""
        self._store.add(f"life/{self._rank if name is None else name}", 1)

    def declare_lost(self, rank):
        """Whoever knows that a rank has ended spares the others the wait."""
        self._store.set(f"lost/{rank}", "1")

    def was_declared_lost(self, rank):
        return bool(self._read(f"lost/{rank}"))

    def is_lost(self, rank):
        """Whether a rank (or another name) was declared lost, or has given no sign of life for too long."""
        if self.was_declared_lost(rank):
            return True
        now, count = time.monotonic(), self._store.add(f"life/{rank}", 0)
        last, since = self._seen.get(rank, (None, now))
        if count != last:
            since = now
        self._seen[rank] = count, since
        return now - since > (LOST_AFTER if count else FIRST_SIGN_WITHIN)

    def take(self, kind, items):
        """The first of `items` that is free, which is this rank's from now on; None when none is."""
        for item in items:
            key = f"{kind}/{item}/taken"
            taken = self._read(key)
            attempt, holder = map(int, taken.split()) if taken else (0, None)
            if taken and not (holder != self._rank and self.is_lost(holder)):
                continue
            if attempt == ATTEMPTS:
                self.finish(kind, item, None)
            elif self._replace(key, taken, f"{attempt + 1} {self._rank}"):
                return item
        return None

    def taken(self, kind, items):
        """Those of `items` that some rank has taken."""
        return [item for item in items if self._read(f"{kind}/{item}/taken")]

    def finish(self, kind, item, outcome):
        """What came of an item, something for JSON; None when every rank that took it was lost. The first word counts."""
        self._replace(f"{kind}/{item}/outcome", "", json.dumps(outcome))

    def unfinished(self, kind, items):
        return [item for item in items if not self._read(f"{kind}/{item}/outcome")]

    def outcome(self, kind, item):
        """Of an item that is finished."""
        return json.loads(self._read(f"{kind}/{item}/outcome"))

    def announce(self, key, value):
        self._store.set(key, json.dumps(value))

    def announced(self, key):
        """What was announced under that key; None if nothing was."""
        text = self._read(key)
        return json.loads(text) if text else None

    def _read(self, key):
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _replace(self, key, expected, value):
        """Whether it was this rank that replaced the expected text ("": none) by the value."""
        return self._store.compare_set(key, expected, value).decode() == value


def work_off(board, kind, items, do, order=lambda items: items):
    """Take items and `do` them until all are finished, by whichever rank. `order` puts those first that suit this rank best."""
    while left := board.unfinished(kind, items):
        item = board.take(kind, order(left))
        if item is None:
            time.sleep(PAUSE)
        else:
            board.finish(kind, item, do(item))
