"""The driver's side of a worker: start it, ask it, give it a time limit, and leave no process behind."""

import collections
import contextlib
import contextvars
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import psutil

from cuda_emulator import CALL_OFF, SECONDS_TO_ANSWER
from playground import untrusted
from playground.catalog import ROOT
from playground.judge.failure import MOST_REASON, SANDBOX_ALLOWS, WorkerFailure
from playground.machine.load import Granted, standing, usable_processors
from playground.room import NoRoom
from playground.serial import DocumentError
from playground.worker import replies, sandbox, server
from playground.worker.channel import Channel
from playground.worker.failures import crash_place, without_our_frames
from playground.worker.stopped import Stopped, end_awaited, families, kill_family, send

LOOK_AT_LIMITS = 0.2  # seconds between looks at what a process in a sandbox takes; at least so many times as long as a look
LOOKS_SHARE = 4
MOST_DETAILS = 100_000  # characters of what a judged file can say
LOOK_AGAIN = 0.5  # seconds between looks at whether a paused process goes on
LOOK_AT_TIME = 2.0  # seconds between looks at what a process has got of the machine; or a quarter of its limit
PATIENCE = 10  # times its limit: as long may one take by the clock that gets nothing
SHOWN_BYTES = 8000  # of what a worker prints
COMPILERS = re.compile(r"nvcc|cicc|ptxas|cudafe\+\+|ninja|cc1(plus)?|clang.*|.*g\+\+(-\d+)?|as|ld|collect2")
# What a request of a variant's is, for a time limit's message.
PHASES = dict.fromkeys(("time", "outer"), "in a timed call")
PHASES |= {"load": "while its file is loaded, where extensions are built", "build": "in the first call of forward"}
PHASES |= dict.fromkeys(("run", "work"), "in forward") | {"differentiate": "in forward and backward"}
PHASES |= {"try_out": "in a call of the side-effect checks"}
OF_SIGNALS = 128  # an exit status beyond it, of a process in a sandbox, is a signal's number and this

FOR_A_GPU, LEAST_PROCESSORS = 2, 4  # that compilers leave to what is timed there; that are needed for both
_living = set()
_living_lock = threading.Lock()
_alone = threading.RLock()  # held while something is timed: no worker starts then

# Whose the workers are that are started in this context.
owner: contextvars.ContextVar[object] = contextvars.ContextVar("owner", default=None)
_over = weakref.WeakSet()  # owners whose run has been ended
spent = collections.defaultdict(float)  # seconds by request, of all workers of this process


def prepare(environment=None, ahead=False):
    """Begin to import PyTorch for the processes that will have this added to their environment; `ahead`: see import_ahead."""
    source = server.start(_variables(environment))
    if source and ahead:
        source.import_ahead()


def _variables(environment):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **(environment or {})}


class WorkerProcess(contextlib.AbstractContextManager):
    """A process of a `role`, a module of playground.worker, that answers one request at a time within `limit` seconds.

    `environment` is added to this process's. `bears_a_gpu`: it disturbs nothing on a GPU. It runs in the `room`, a
    sandbox.Room, where there is one. As a context manager, it ends the process.
    """

    def __init__(self, role, limit, environment=None, bears_a_gpu=False, room=None):
        self.role, self.limit = role, limit
        self.owner = owner.get()
        self.bears_a_gpu = bears_a_gpu
        self.compilers_go_on = False  # while something is timed on a GPU; see keep_compilers_off
        self.room = room
        self._reached = None  # why the process was ended: a limit of the sandbox's
        self._is_over = threading.Event()
        self._asking = threading.Lock()  # a request and its reply belong together
        self._paused, self._paused_since = 0.0, None  # seconds; the moment
        self._emulates = False  # it runs kernels under the emulator
        if self.owner in _over:
            raise WorkerFailure("the run has been ended")
        with _alone:
            self._start(environment)

    def _start(self, environment):
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        variables = _variables(environment)
        self.shared = untrusted.memory("shared")  # for the outer clock on a CPU, see clock.memory.Host
        self._printed, self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        streams = self._printed.fileno(), self._output.fileno(), request_read, reply_write, self.shared
        source = None if self.room or self.role == "compiler" else server.start(variables)
        forked = source and source.fork(*streams)
        self._process = forked or self._new_process(variables, environment, *streams)
        os.close(request_read)
        os.close(reply_write)
        os.set_blocking(request_write, False)  # nor does one that does not read its requests keep the driver waiting
        self._channel = Channel(reply_read, request_write)
        if forked:
            with contextlib.suppress(OSError):  # it has ended, which the first request says
                self._channel.send({"environment": variables, "folder": str(Path.cwd()), "role": self.role})
        with _living_lock:
            _living.add(self)
        if self.room:
            self.room.admit(self._process.pid)
        self._guard = threading.Thread(target=self._look_at_limits, daemon=True) if self.room else None
        if self._guard:
            self._guard.start()

    def _new_process(self, variables, environment, output, errors, request, reply, shared):
        """A Popen with these variables; in a room with what that gives, and the `environment`."""
        parent, limits = (sandbox.PARENT, self.room.limits.of_process()) if self.room else (os.getpid(), {})
        numbers = map(str, (request, reply, shared, parent))
        command = [sys.executable, "-m", "playground.worker", *numbers, json.dumps(limits), self.role]
        if self.room:
            command, variables = self.room.command(command), self.room.environment(environment)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            pass_fds=(request, reply, shared),
            env=variables,
            start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends its workers
        )

    def _look_at_limits(self):
        """End a process in a sandbox that takes more than it may. One that is paused takes no more than before."""
        took = 0.0
        while not self._is_over.wait(max(LOOK_AT_LIMITS, LOOKS_SHARE * took)):
            if self._paused_since is not None:
                continue
            began = time.monotonic()
            try:
                reached = self.room.reached(self.pid, (self._printed, self._output))
                self._reached = reached and f"was ended: {SANDBOX_ALLOWS}{reached}"
            except NoRoom as full:
                self._reached = str(full)
            except OSError as error:
                self._reached = f"was ended: its processes or files cannot be examined: {error}"
            if self._reached:
                return self.kill()
            took = time.monotonic() - began

    @property
    def pid(self):
        return self._process.pid

    @property
    def has_ended(self):
        return self._process.poll() is not None

    def make_nice(self, niceness):
        """Set the niceness of the process and of what it has started."""
        for pid in families([self._process]):
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).nice(niceness)

    def keep_compilers_off(self):
        """Leave two of enough processors to what is timed on a GPU, so that this worker's compilers go on beside it."""
        if len(usable := sorted(usable_processors())) >= LEAST_PROCESSORS:
            for pid in families([self._process]):
                with contextlib.suppress(psutil.Error):
                    psutil.Process(pid).cpu_affinity(usable[FOR_A_GPU:])
            self.compilers_go_on = True

    def __exit__(self, *exception):
        self.close()

    @contextlib.contextmanager
    def stopped(self):
        """Stop the process and all that it started, and have it go on in the end. Gives a Stopped."""
        stopped = Stopped([self._process])
        try:
            stopped.stop()
            stopped.has_grown()
            yield stopped
        finally:
            stopped.has_grown()  # or what was started meanwhile would never go on
            stopped.go_on()

    def ask(self, what, **arguments):
        """Return the reply to the request `what`, a method of its role: a record of replies.FORMS, or a dict.

        Raises WorkerFailure when the request raised, the process ended, the limit passed, or what came is no reply; but in the
        first case the process is gone.
        """
        request, failed = f"{self.role}.{what}", functools.partial(WorkerFailure, role=self.role)
        with self._asking:
            began, latest = time.perf_counter(), self._unpaused() + self.limit
            self._emulates |= request == "candidate.load" and arguments.get("place") == "emulator"
            try:
                message = {"request": what, "arguments": arguments}
                self._channel.send(message, lambda: self._unpaused() < latest)
                reply = self._receive()
            except TimeoutError:
                found = (self._whereabouts() if self._emulates else "") or self._phase(what)
                self.kill()
                raise failed(f"no answer within the time limit of {self.limit:g} s{found}", self.output()) from None
            except (EOFError, OSError):
                raise failed(self._cause_of_death(), without_our_frames(self.output())) from None
            except (ValueError, RecursionError):  # no JSON, or nested too deeply
                reply = None
            finally:
                with _living_lock:
                    spent[request] += time.perf_counter() - began
            match reply:
                case {"result": dict(result)}:
                    try:
                        return replies.read(request, result)
                    except DocumentError as complaint:
                        self.kill()
                        raise failed(str(complaint), self.output()) from None
                case {"error": str(reason), "details": str(details), "is_finding": bool(is_finding)} if reason.strip():
                    reason = reason[:MOST_REASON]
                    reason = sandbox.named(reason, self.room.limits) if self.room else reason
                    raise failed(reason, details[:MOST_DETAILS] + self.output(), is_finding)
            self.kill()
            raise failed("wrote something that is no reply into its connection to the driver", self.output())

    def _receive(self):
        granted, began = Granted(), self._unpaused()
        seen = began
        while True:
            left = min(self.limit - granted.seconds, LOOK_AT_TIME, self.limit / 4)
            try:
                return self._channel.receive(max(left, LOOK_AGAIN if self._paused_since else 0.0))
            except TimeoutError:
                last, seen = seen, self._unpaused()
                granted.look(families([self._process]), seen - last)
                if not self._paused_since and (granted.seconds >= self.limit or seen - began >= PATIENCE * self.limit):
                    raise

    def _whereabouts(self):
        send(families([self._process]), CALL_OFF)  # a sandbox's own processes ignore it, as compilers do
        try:
            reply = self._channel.receive(SECONDS_TO_ANSWER)
        except (EOFError, OSError, ValueError, RecursionError):
            return ""
        match reply:
            case {"error": str(reason), "is_finding": True}:
                return f": {in_which_block(reason[:MOST_REASON])}"
        return ""

    def _phase(self, what):
        for pid in families([self._process]):
            with contextlib.suppress(psutil.Error):
                if COMPILERS.fullmatch(name := psutil.Process(pid).name()):
                    return f": still compiling ({name}); raise --time-limit"
        if self.role == "referee":
            return ": while the original was run; make it smaller with --set, or raise --time-limit"
        return f": {PHASES[what]}" if self.role == "candidate" and what in PHASES else ""

    def _unpaused(self):
        """Seconds of the clock that stands still while the process is paused."""
        since = self._paused_since
        return (since or time.monotonic()) - self._paused

    def _cause_of_death(self):
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its connection to the driver"
        if self._reached:
            return self._reached
        if self.room and status > OF_SIGNALS:  # bubblewrap's way to say it
            status = OF_SIGNALS - status
        if status >= 0:
            return f"ended the process (exit status {status})"
        hint = ", which is how a machine that is out of memory ends a process" if -status == signal.SIGKILL else ""
        place = crash_place(self.output())
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"  # a real-time one
        crashed = f"crashed ({name}{f' in {place}' if place else ''}{hint})"
        return sandbox.named(crashed, self.room.limits) if self.room else crashed

    def output(self):
        """Return the end of what the process and its children printed, to both of their outputs."""
        return _part_of(self._output, -SHOWN_BYTES) + _part_of(self._printed, -SHOWN_BYTES)

    def printed(self):
        """Return the beginning of what the process printed to its standard output, kernels' printf among it."""
        text = _part_of(self._printed, SHOWN_BYTES)
        more = os.fstat(self._printed.fileno()).st_size - SHOWN_BYTES
        return text + f"\n({more} more bytes)\n" if more > 0 else text

    def kill(self):
        """End the process and everything it started."""
        with contextlib.ExitStack() as ends:
            if self.room:  # the first process inside takes all others with it, however fast they fork
                outer = self._process
                first = sandbox.family_of(outer.pid, most=1)[1:2] if outer.returncode is None else []
                for pid in first:
                    ends.enter_context(end_awaited(pid))
                send(first, signal.SIGKILL)
            kill_family(self._process)

    def close(self):
        """End the process. Safe to call twice."""
        with _living_lock:
            if self not in _living:
                return
            _living.discard(self)
        self._is_over.set()
        self.kill()
        if self._guard:
            self._guard.join()
        self._channel.close()
        os.close(self.shared)
        self._output.close()
        self._printed.close()


def _part_of(file, count):
    """The first `count` bytes of a file as a text, or, if negative, the last, without moving its shared place."""
    if file.closed:
        return ""
    start = max(0, os.fstat(file.fileno()).st_size + count) if count < 0 else 0
    return os.pread(file.fileno(), abs(count), start).decode(errors="replace")


def in_which_block(reason):
    """Return the emulator's finding about a launch that was called off, as what to do where only some blocks had begun."""
    found = re.match(r"(?P<place>.*?:\d+: )?time limit: .*?(?P<begun>\d+) of its (?P<all>\d+) blocks were begun,", reason)
    if not found:
        return reason
    where = f"{found['place'] or ''}in block {found['begun']} of {found['all']}"
    return f"{where}: make it smaller with --set, or raise --time-limit"


@contextlib.contextmanager
def pause_others(but, on_gpu=False, beside_compilers=False):
    """Stop all workers of this process except those in `but`, and what they started, compilers too: something is timed.

    If `on_gpu`, those that bear it go on; `beside_compilers`, also compilers that were kept off its processors. One thread at a
    time, also within another; paused seconds count against no limit.
    """
    with _alone:
        with _living_lock:
            others = [worker for worker in _living if worker not in but and not (on_gpu and worker.bears_a_gpu)]
            others = [worker for worker in others if worker._paused_since is None]  # or it would end with this one
        now = time.monotonic()
        for worker in others:
            worker._paused_since = now
        building = [worker.pid for worker in others if on_gpu and beside_compilers and worker.compilers_go_on]
        stopped = Stopped([worker._process for worker in others if worker.pid not in building])
        try:
            stopped.stop()
            send(building, signal.SIGSTOP)
            stopped.has_grown()
            standing.update(stopped.family)
            yield
        finally:
            standing.difference_update(stopped.family)
            stopped.go_on()
            send(building, signal.SIGCONT)
            now = time.monotonic()
            for worker in others:
                worker._paused += now - worker._paused_since
                worker._paused_since = None


def submit(pool, call, *arguments):
    """Return a future of a call in one of the pool's threads, whose workers have the same owner as this thread's."""
    return pool.submit(contextvars.copy_context().run, call, *arguments)


def kill_all(of=None):
    """End every worker, or those of an `owner`, which can start no more, from any thread; requests under way then fail."""
    if of is not None:
        _over.add(of)
    with _living_lock:
        workers = [worker for worker in _living if of is None or worker.owner is of]
    for worker in workers:
        worker.kill()
