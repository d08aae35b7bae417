"""A process that has imported PyTorch and forks workers in some 20 ms, where a new process takes two seconds.

It loads no file of a user's, keeps no thread and initialises no CUDA. Where a library leaves it a thread, and in a sandbox,
whose file could change it, workers are new processes.
"""

import contextlib
import fnmatch
import importlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from playground.worker.ahead import AHEAD
from playground.worker.channel import Channel

MODULES = ("torch", "setuptools", *(f"playground.worker.{role}" for role in ("__main__", "candidate", "referee", "baselines")))
# Of the environment, what is read after the fork. All else counts when a library is loaded (as OMP_WAIT_POLICY does for
# libgomp), so that it makes another server.
READ_LATE = ("PATH", "PWD", "OLDPWD", "HOME", "TMPDIR", "XDG_CACHE_HOME", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS")
READ_LATE += ("COLUMNS", "LINES", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_*", "TRITON_*", "CUDA_EMULATOR_*")
READ_LATE += ("PLAYGROUND_*", "PYTEST_*")
MOST = 4  # servers at once

_servers = {}  # by what each was started with: its Server, or None where it forks nothing
_lock = threading.Lock()


def start(environment):
    """Return the Server whose workers have this environment, which is started where there is none; None where none can be."""
    early = {name: value for name, value in environment.items() if not any(fnmatch.fnmatch(name, each) for each in READ_LATE)}
    key = os.getpid(), *sorted(os.sched_getaffinity(0)), *sorted(early.items())
    with _lock:
        if key not in _servers:
            for oldest in list(_servers)[: 1 - MOST or None]:
                if server := _servers.pop(oldest):
                    server.close()
            _servers[key] = Server(environment, lambda: _servers.update({key: None}))
        return _servers[key]


class Server:
    """The driver's side of a server. It ends when the driver does; `refused` is called when it forks nothing."""

    def __init__(self, environment, refused):
        self._refused = refused
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "playground.worker.server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )

    def fork(self, output, errors, request, reply, shared):
        """Return a Forked with these file descriptors, which reads from `request` what to be; None where there is none."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._connection, [b"fork"], [theirs.fileno(), output, errors, request, reply, shared])
        try:
            return Forked(control)
        except (OSError, ValueError):  # it has ended
            control.close()
            self._refused()
            return None

    def import_ahead(self):
        """Have it import AHEAD, one module at a time, whenever nobody waits for a process."""
        with contextlib.suppress(OSError):
            self._connection.send(b"ahead")

    def close(self):
        """Let it end after the last process that it has forked."""
        self._connection.close()
        threading.Thread(target=self._process.wait, daemon=True).start()


class Forked:
    """A process that a server has forked, with what subprocess.Popen tells of one. Raises ValueError where there is none."""

    def __init__(self, control):
        self._control = control
        self.pid = int(control.recv(64))
        self.returncode = None
        self._waiting = threading.Lock()

    def poll(self):
        """Return its exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout=None):
        """Return its exit status when it has ended: a signal's number is negative. Raises subprocess.TimeoutExpired."""
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._control], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a worker", timeout)
                with contextlib.suppress(OSError):
                    self.returncode = int(self._control.recv(64) or -signal.SIGKILL)  # it ends with its server
                    self._control.shutdown(socket.SHUT_WR)
                    self._control.recv(64)  # until then its number is no other's
                self._control.close()
            return self.returncode


def main(number):
    """Fork what the driver asks for, until it is gone. In a worker, this returns when the worker has done its work."""
    connection = socket.socket(fileno=number)
    with _ending_with(connection):
        for module in MODULES:
            importlib.import_module(module)
    if not _is_forkable():
        return
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    running, ended = {}, {}  # {the connection to who waits for it: its process id}
    coming = []  # modules to import when there is nothing else to do
    while connection or running or ended:
        ready = select.select([woken, *filter(None, [connection]), *running, *ended], [], [], 0 if coming else None)[0]
        if not ready:
            importlib.import_module(coming.pop(0))
        if woken in ready:
            os.read(woken, 1 << 12)
        for control in [control for control in ready if control in ended or control in running]:  # closed: its end is known
            pid = running.pop(control, None) or ended.pop(control)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # or the driver is gone
            os.waitpid(pid, 0)
            control.close()
        for control, pid in list(running.items()):  # until it is waited for, its number stays its own
            if end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended[control] = running.pop(control)
                with contextlib.suppress(OSError):
                    control.send(str(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status).encode())
        if connection in ready:
            message, received, *_ = socket.recv_fds(connection, 64, 6)
            if not message:
                connection.close()
                connection = None
                continue
            if message == b"ahead":
                coming = [module for module in AHEAD if module not in sys.modules]
                continue
            parent = os.getpid()
            if not (pid := os.fork()):
                for each in (connection, *running, *ended):
                    each.close()
                return _work(parent, (woken, wakes), *received)
            running[control := socket.socket(fileno=received[0])] = pid
            for each in received[1:]:
                os.close(each)
            with contextlib.suppress(OSError):
                control.send(str(pid).encode())


@contextlib.contextmanager
def _ending_with(connection):
    """End this process when the other end of a connection is closed within the block."""
    stopped, stop = os.pipe()
    looking = select.poll()
    looking.register(connection, select.POLLRDHUP)
    looking.register(stopped, select.POLLIN)

    def look():
        if connection.fileno() in dict(looking.poll()):
            os._exit(1)

    thread = threading.Thread(target=look)
    thread.start()
    yield
    os.write(stop, b".")
    thread.join()
    os.close(stopped)
    os.close(stop)


def _is_forkable():
    """Whether nothing is here that a child would lack. Threads that a library ends before a fork are no such thing."""
    import torch

    if not (pid := os.fork()):
        os._exit(torch.cuda._is_in_bad_fork())  # whether anything has asked CUDA
    _, status = os.waitpid(pid, 0)
    return status == 0 and len(list(Path("/proc/self/task").iterdir())) == 1


def _work(parent, of_server, control, output, errors, request, reply, shared):
    import numpy
    import torch

    from playground.worker.__main__ import main as answer

    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for each in (*of_server, control, output, errors):
        os.close(each)
    channel = Channel(request, reply)
    given = channel.receive()
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    sys.path[0], tempfile.tempdir = given["folder"], None
    sys.argv[1:] = [*map(str, (request, reply, shared, parent)), "{}", given["role"]]
    random.seed()  # and the others, by chance, as those of a new process are
    numpy.random.seed()
    torch.default_generator.seed()
    answer(channel, shared, parent, {}, given["role"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
