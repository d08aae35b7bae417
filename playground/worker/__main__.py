"""A worker process: answers requests from the driver until it is told no more."""

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import signal
import sys

from playground.worker.ahead import AHEAD, UNTIMED
from playground.worker.channel import Channel
from playground.worker.failures import describe

# Requests after which memory stays where it is.
BETWEEN_CALLS = ("time", "outer", "draw", "await_quiet")


def end_with(parent):
    """Have the kernel end this process when its parent dies, whatever it is busy with then."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)


def limit(limits):
    """Set limits, {name in the module resource: number}, which no process that is started here can lift again."""
    import resource

    for name, number in limits.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(getattr(resource, name), (number, number))


def flush():
    """Hand on what the variant has printed: Python's own buffer, and the C library's, into which kernels print."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a judged file may have closed or replaced it
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def give_back(request):
    """Return to the GPU what torch's allocator keeps: another worker needs it now."""
    if not (torch := sys.modules.get("torch")):
        return
    with contextlib.suppress(Exception):  # after a fault nothing can be given back, nor where a judged file has replaced these
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (0, 0)
        if total and (request not in BETWEEN_CALLS or free < total / 2):
            torch.cuda.empty_cache()


def main(channel, shared, parent, limits, role):
    end_with(parent)
    faulthandler.enable(all_threads=False)  # to stderr, where the driver finds the line in which the file crashed
    if limits:
        limit(limits)
    answering = getattr(importlib.import_module(f"playground.worker.{role}"), role.title())()
    answering.shared = shared
    coming = list(AHEAD) if role == "candidate" and os.environ.items() >= UNTIMED.items() else []
    while True:
        while coming and channel.is_idle():
            with contextlib.suppress(Exception):  # a judged file may have replaced what this needs
                importlib.import_module(coming.pop(0))
        try:
            message = channel.receive()
        except EOFError:
            return
        path = message["request"].split(".")
        try:
            reply = {"result": functools.reduce(getattr, path, answering)(**message["arguments"])}
        except BaseException as exception:  # SystemExit and KeyboardInterrupt too: a judged file may raise anything
            try:
                reason, details = describe(exception)
            except Exception as another:  # a judged file's exception may not even have a text
                reason, details = f"{type(exception).__name__}, whose text raises {type(another).__name__}", ""
            reply = {"error": reason, "details": details, "is_finding": type(exception).__name__ == "Finding"}
        give_back(path[-1])
        flush()
        channel.send(reply)


if __name__ == "__main__":
    main(Channel(*map(int, sys.argv[1:3])), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]), sys.argv[6])
