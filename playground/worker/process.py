"""The driver's side of a worker: start it, ask it, give it a time limit, and leave no process behind."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil

from playground.catalog import ROOT
from playground.worker.channel import Channel, ChannelClosed
from playground.worker.replies import malformed

# For a process that is never timed. Threads of OpenMP that wait for their share of the next loop keep a processor busy, and
# take it from the compilers and the other workers: a referee beside them needs three times its processor time.
UNTIMED = {"OMP_WAIT_POLICY": "PASSIVE"}

_living = set()
_living_lock = threading.Lock()
spent = collections.defaultdict(float)  # seconds by request, of all workers of this process


class WorkerFailure(Exception):
    """A request that got no result. The text is one line; `details` may hold a traceback or a compiler's output.

    `is_finding` says that the emulator found a mistake in a kernel.
    """

    def __init__(self, reason, details="", is_finding=False):
        super().__init__(reason)
        self.details = details
        self.is_finding = is_finding


class WorkerProcess:
    """A process that answers requests one at a time. Use it as a context manager; leaving it ends the process.

    `environment` is added to this process's environment.
    """

    def __init__(self, environment=None):
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "playground.worker", str(request_read), str(reply_write), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(request_read, reply_write),
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends its workers
        )
        os.close(request_read)
        os.close(reply_write)
        self._channel = Channel(reply_read, request_write)
        with _living_lock:
            _living.add(self)

    @property
    def pid(self):
        return self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def ask(self, what, limit, **arguments):
        """The reply (a dict) to the request `what`, a name in playground.worker.requests.

        Raises WorkerFailure when the request raised, the process died or ended, `limit` seconds passed, or what came is no
        reply (a judged file can write to the pipe); in all but the first case the process is gone and every further request
        fails.
        """
        began = time.perf_counter()
        try:
            self._channel.send({"request": what, "arguments": arguments})
            reply = self._channel.receive(limit)
        except TimeoutError:
            self.kill()
            raise WorkerFailure(f"no answer within the time limit of {limit:g} s", self.output()) from None
        except (ChannelClosed, OSError):
            raise WorkerFailure(self._cause_of_death(), self.output()) from None
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            reply = None
        finally:
            with _living_lock:
                spent[what] += time.perf_counter() - began
        match reply:
            case {"result": dict(result)}:
                if complaint := malformed(what, result):
                    self.kill()
                    raise WorkerFailure(complaint, self.output())
                return result
            case {"error": str(reason), "details": str(details), "is_finding": bool(is_finding)} if reason.strip():
                raise WorkerFailure(reason, details + self.output(), is_finding)
        self.kill()
        raise WorkerFailure("wrote something else than a reply into its connection to the driver", self.output())

    def _cause_of_death(self):
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its connection to the driver"
        if status >= 0:
            return f"ended the process (exit status {status})"
        hint = ", which is how a machine that is out of memory ends a process" if -status == signal.SIGKILL else ""
        return f"crashed ({_name_of_signal(-status)}{hint})"

    def output(self):
        """The end of what the process and its children printed."""
        try:
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - 8000))
            return self._output.read().decode(errors="replace")
        except ValueError:  # closed
            return ""

    def kill(self):
        """End the process and everything it started."""
        kill_family(self._process)

    def close(self):
        """End the process. Safe to call twice."""
        with _living_lock:
            if self not in _living:
                return
            _living.discard(self)
        self.kill()
        self._channel.close()
        self._output.close()


class Spare:
    """A worker that is started before it is needed: until PyTorch is imported there, seconds pass."""

    def __init__(self):
        self._worker = None

    def start(self):
        self._worker = self._worker or WorkerProcess()

    def take(self):
        """The worker, which is the caller's from now on; a new one where none was started."""
        worker, self._worker = self._worker or WorkerProcess(), None
        return worker

    def close(self):
        if self._worker:
            self._worker.close()


def _name_of_signal(number):
    """'SIGSEGV'; real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def kill_family(process):
    """End a Popen that has a session of its own, and everything it started.

    That is its tree, since compilers run in process groups of their own, and its session: when the process is dead already,
    what it started has another parent but is still there.
    """
    root = process.pid
    family = [root] if process.returncode is None else []  # a number that was waited for may be another's by now
    with contextlib.suppress(psutil.NoSuchProcess):
        family += [child.pid for child in psutil.Process(root).children(recursive=True) if family]
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == root and pid not in family:
                family.append(pid)
    for pid in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def kill_all():
    """End every worker, from any thread; requests under way then fail."""
    with _living_lock:
        workers = list(_living)
    for worker in workers:
        worker.kill()
