"""Ctrl-C, a terminal that closes, `kill`: at any moment they end a command with one line and the status 128 + signal."""

import os
import signal
import time

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
REPEATED = 5.0  # seconds within which another signal changes nothing: what runs is being ended


class Interrupted(KeyboardInterrupt):
    """One of the signals came; `status` is what the command ends with."""

    def __init__(self, number):
        super().__init__()
        self.status = 128 + number


def end_at_once():
    """End at once on a signal, until `heed` is called: an exception would come out of the middle of some import."""
    _handle(_leave)


def heed():
    """Have a signal raise Interrupted in the main thread from now on."""
    latest = float("-inf")

    def interrupt(number, _):
        nonlocal latest
        before, latest = latest, time.monotonic()
        if latest - before > REPEATED:
            raise Interrupted(number)

    _handle(interrupt)


def _handle(handler):
    """What is ignored, as SIGHUP is under nohup, stays so."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number, _):
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)
