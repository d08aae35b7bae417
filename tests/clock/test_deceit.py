"""Files written to deceive the outer clock: each is found out, or gains nothing. Right ones like them are timed.

On the CPU, and on a GPU if there is one.
"""

import contextlib
import os
import signal
import time
import types

import pytest
import torch

from playground.clock import outer, step_of
from playground.serial import dump
from playground.worker import WorkerProcess
from playground.worker.referee_client import RefereeClient
from playground.worker.stopped import CPUCLOCK_SCHED
from tests.judge.problems import pairs

PROBLEM = """
class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        {forward}

batch, features = (4096, 1024) if torch.cuda.is_available() else (256, 128)

def get_inputs():
    return [torch.randn(batch, features)]
"""

WORK = """
        for _ in range(12):
            x = torch.tanh(self.linear(x))
        return x"""

SOLUTION = """
import threading, time
import torch
import torch.nn as nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.kept = self.seen = None

    def work(self, x, times=12):
        for _ in range(times):
            x = torch.tanh(self.linear(x))
        return x

    def late(self, x, out):
        with torch.no_grad():
            out.copy_(self.work(x))

    def other_stream(self, x, out):
        self.stream = getattr(self, "stream", None) or torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)
            self.late(x, out)

    def sides(self):  # of the outer clock, in this process
        import gc
        if not getattr(self, "found", None):
            self.found = [each for each in gc.get_objects() if type(each).__name__ == "Side" and each._turn is not None]
        return self.found

    def others(self):  # processes that are timed, too, or that compare
        import glob, os
        of = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
        for path in glob.glob("/proc/[0-9]*/fd/*"):
            pid = path.split("/")[2]
            try:
                if "memfd:shared" in os.readlink(path) and of(pid) == of("self") and int(pid) != os.getpid():
                    yield int(pid)
            except OSError:
                pass

    def forward(self, x):
        if torch.is_grad_enabled():
            return {trained}
        {forward}
"""

# What the file does -> its forward. In FOUND_OUT and FORGES its results are wrong.
FOUND_OUT = {
    "returns the result of an earlier call": """
        if self.kept is None:
            self.kept = self.work(x)
        return self.kept""",
    "computes half of the steps": "return self.work(x, 6)",
    "computes a part of the samples": """
        if self.kept is None:
            self.kept = self.work(x)
        return torch.cat([self.work(x[: len(x) // 2]), self.kept[len(x) // 2 :]])""",
    "has a thread finish behind its reply": """
        out = torch.empty_like(x)
        threading.Thread(target=self.late, args=(x, out)).start()
        return out""",
    "changes the inputs to those of an earlier call": """
        if self.kept is None:
            self.seen, self.kept = x.clone(), self.work(x)
        x.copy_(self.seen)
        return self.kept""",
    "finishes each call in the next one": """
        if self.seen is not None:
            self.late(self.seen, self.kept)
        self.seen, self.kept = x.clone(), torch.zeros_like(x)
        return self.kept""",
    "skips one call in twenty": """
        self.count = getattr(self, "count", 0) + 1
        if self.kept is None or self.count % 20:
            self.kept = self.work(x)
            return self.kept
        return self.kept.clone()""",
    "works in 16 bits": """
        x, linear = x.bfloat16(), [each.bfloat16() for each in self.linear.parameters()]
        for _ in range(12):
            x = torch.tanh(nn.functional.linear(x, *linear))
        return x.float()""",
}
# The same, of files that reach for what times them in their process.
FORGES = {
    "says that its results share no memory": """
        import playground.clock.clocked
        playground.clock.clocked._share = lambda results: False
        if self.kept is None:
            self.kept = torch.empty_like(x)
        return self.kept.copy_(self.work(x))""",
    "replaces what copies its results": """
        torch._foreach_copy_ = lambda places, values: None
        return torch.empty_like(x)""",
    "gives each call its neighbour's result": """
        for side in self.sides():
            if self.seen is not side._places:
                self.seen = side._places = side._places[1:] + side._places[:1]
        return self.work(x)""",
    "works in the first and the last call of a turn alone": """
        for side in self.sides():
            places = [side._inputs.data_ptr() + call["given"][0]["offset"] for call in side._turn["calls"]]
            if x.data_ptr() in places[1:-1]:
                return torch.zeros_like(x)
        return self.work(x)""",
}
FORGES_ON_A_GPU = {
    "opens the gate of its inputs": """
        for side in self.sides():
            side._memory.write(side._inputs, 0, 1 << 30)
        return self.work(x)""",
    "says that it is done before it has begun": """
        for side in self.sides():
            side._memory.write(side._inputs, 64, 1 << 30)
        return self.work(x)""",
}
# No times come of it: what it does -> (why, its forward).
WITHHELD = {
    "has a debugger that keeps SIGSTOP from its threads": (
        "ran on while they had to be stopped",
        """
        if self.seen is None:
            import ctypes, os
            self.seen, libc = x, ctypes.CDLL(None)
            libc.prctl(0x59616D61, ctypes.c_long(-1), 0, 0, 0)  # PR_SET_PTRACER: any
            if os.fork() == 0:
                PTRACE_CONT, PTRACE_SEIZE, ALL = 7, 0x4206, 0x40000000
                libc.ptrace(PTRACE_SEIZE, os.getppid(), None, None)
                while libc.waitpid(os.getppid(), None, ALL) > 0:
                    libc.ptrace(PTRACE_CONT, os.getppid(), None, None)
                os._exit(0)
            def poll():
                while True:
                    time.sleep(1e-4)
            threading.Thread(target=poll, daemon=True).start()
        return self.work(x)""",
    ),
    "has a debugger at the process that it is compared with": (
        "a debugger",
        """
        if self.seen is None:
            import ctypes, os
            self.seen, libc = x, ctypes.CDLL(None)
            if os.fork() == 0:
                PTRACE_SEIZE = 0x4206
                of = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
                for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
                    try:
                        if of(pid) == of(os.getppid()) and pid != os.getppid():
                            libc.ptrace(PTRACE_SEIZE, pid, None, None)
                    except OSError:  # it has ended
                        pass
                while True:
                    time.sleep(1)
        return self.work(x)""",
    ),
    "ends the process that it is compared with": (
        "crashed .SIGKILL|has ended",
        """
        if self.sides():
            import os
            for pid in self.others():
                os.kill(pid, 9)
        return self.work(x)""",
    ),
    "gives the others a single processor": (
        "the processors or the priority of another process",
        """
        if self.sides():
            import os
            for pid in self.others():
                os.sched_setaffinity(pid, [min(os.sched_getaffinity(pid))])
        return self.work(x)""",
    ),
    "returns what is computed when it is copied": (
        "must return plain tensors",
        """
        work = self.work
        class Late(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, arguments=(), named=None):
                with torch._C.DisableTorchFunctionSubclass():
                    if function is torch._foreach_copy_:
                        places, values = arguments
                        arguments = places, [work(value.as_subclass(torch.Tensor)) for value in values]
                    return function(*arguments, **(named or {}))
        return x.clone().as_subclass(Late)""",
    ),
    "answers before it is asked": (
        "something that is no time",
        """
        if self.sides() and self.kept is None:
            from playground.worker.channel import Channel
            self.kept, send, forged = x, Channel.send, {"result": {"milliseconds": 1e-3, "share": False}}
            Channel.send = lambda own, reply: [send(own, each) for each in [reply, forged][: 1 + ("strides" in str(reply))]]
        return self.work(x)""",
    ),
    "says that its calls take longer than a float can hold": (
        "something that is no time",
        """
        for side in self.sides():
            side.call = lambda null, number: type(side).call(side, null, number) | {"milliseconds": 10**400}
        return self.work(x)""",
    ),
    "returns numbers of another type": ("results of the types", "return self.work(x).double()"),
    "returns its input's memory": ("are in an earlier call's memory", "return x.copy_(self.work(x))"),
    "returns the same memory in each call": (
        "are in an earlier call's memory",
        """
        if self.kept is None:
            self.kept = torch.empty_like(x)
        return self.kept.copy_(self.work(x))""",
    ),
}
# Found out, too.
ON_THE_CPU = {
    "answers a turn as soon as it is ready": """
        if self.sides() and self.kept is None:
            from playground.worker.channel import Channel
            self.kept, send, forged = x, Channel.send, {"result": {"milliseconds": 1e-3, "share": False}}
            Channel.send = lambda own, reply: [send(own, each) for each in [reply, forged][: 1 + (reply == {"result": {}})]]
        return self.work(x)""",
    "has a second process write its results late": """
        if self.kept is None:
            import gc, os
            sides = [each for each in gc.get_objects() if type(each).__name__ == "Side" and each._turn is not None]
            if sides and os.fork() == 0:  # its memory is shared with this process and the referee
                torch.set_num_threads(1)
                while True:
                    for call, place in zip(sides[0]._turn["calls"], sides[0]._places):
                        given = sides[0]._memory.opened(sides[0]._turn["inputs"])[call["given"][0]["offset"] :]
                        self.late(given[: place.nbytes].view(place.dtype).view(place.shape), place)
            self.kept = sides or None
        return torch.zeros_like(x) if self.kept else self.work(x)""",
    "returns what lies in another side's memory": """
        import glob, os
        for path in glob.glob("/proc/[0-9]*/fd/*"):
            try:
                if "memfd:shared" not in os.readlink(path) or f"/{os.getpid()}/" in path:
                    continue
                with open(path, "rb") as memory:
                    found = memory.read()
            except OSError:
                continue
            if len(found) > x.nbytes:  # the last of its results
                return torch.frombuffer(bytearray(found[-x.nbytes :]), dtype=x.dtype).view(x.shape)
        return self.work(x)""",
}
ON_A_GPU = {
    "leaves work on another stream": """
        out = torch.empty_like(x)
        self.other_stream(x, out)
        return out"""
}
WITHHELD_ON_A_GPU = {
    "leaves a kernel that never ends": (
        "no answer within|no result within|works on the GPU",
        """
        self.count = getattr(self, "count", 0) + 1
        if self.count == 40:
            self.stream = torch.cuda.Stream()
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(1 << 62)
        return self.work(x)""",
    ),
    "never ends a call in a turn": (
        "no answer within|no result within",
        """
        self.count = getattr(self, "count", 0) + 1
        if self.count > 40:
            torch.cuda._sleep(1 << 62)
        return self.work(x)""",
    ),
}
# Right, timed, and shown to be no faster for it.
GAINS_NOTHING = {
    "works ahead in a thread that polls its inputs": """
        if self.kept is None:
            self.kept = {}
        if self.seen is None and self.sides():  # x is where the first call's inputs will be
            self.seen = x
            def poll():
                with torch.no_grad():
                    while True:
                        mark = float(self.seen.flatten()[::997].sum())
                        if mark not in self.kept:
                            made = self.work(self.seen.clone())
                            self.kept.clear()
                            self.kept[mark] = made
                        time.sleep(1e-4)
            threading.Thread(target=poll, daemon=True).start()
        made = self.kept.pop(float(x.flatten()[::997].sum()), None)
        return self.work(x) if made is None else made""",
    "leaves a thread that takes the others' processors": """
        if self.seen is None:
            self.seen = x
            def burn():
                other = torch.randn(512, 512)
                while True:
                    other = torch.tanh(other @ other)
            for _ in range(4):
                threading.Thread(target=burn, daemon=True).start()
        return self.work(x)""",
    "says that its calls take no time": """
        for side in self.sides():
            side._clock.between = lambda began, ended: 1e-9
        return self.work(x)""",
    "shortens and grows the memory that the referee reads": """
        import glob, os
        for path in glob.glob("/proc/self/fd/*"):
            for count in (0, 1 << 33):
                try:
                    if "memfd:shared" in os.readlink(path):
                        os.truncate(path, count)
                except OSError:
                    pass
        return self.work(x)""",
    "works as the original does": "return self.work(x)",
}
GAINS_NOTHING_ON_A_GPU = {
    "leaves lines that persist in L2 to the others' turns": """
        if self.seen is None:
            import ctypes
            PERSISTING_L2, ACCESS_POLICY_WINDOW, PERSISTING, STREAMING = 6, 1, 2, 1  # cuda.h
            self.seen, cuda, most = torch.ones(1 << 24, device=x.device), ctypes.CDLL("libcuda.so.1"), 16 << 20
            class Window(ctypes.Structure):
                _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("ratio", ctypes.c_float),
                            ("hit", ctypes.c_int), ("miss", ctypes.c_int), ("rest", ctypes.c_char * 36)]
            window = Window(self.seen.data_ptr(), most, 1.0, PERSISTING, STREAMING)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert not cuda.cuCtxSetLimit(PERSISTING_L2, ctypes.c_size_t(most))
            assert not cuda.cuStreamSetAttribute(stream, ACCESS_POLICY_WINDOW, ctypes.byref(window))
        self.seen[: 1 << 22].mul_(1.0)
        return self.work(x)""",
    "works on all calls of a turn at once": """
        from playground.clock.memory import placed
        for side in self.sides():
            given = [placed(side._inputs, call["given"][0]) for call in side._turn["calls"]]
            if x.data_ptr() == given[0].data_ptr():
                self.seen = [each.clone() for each in self.work(torch.cat(given)).split(len(x))]
            return self.seen.pop(0)
        return self.work(x)""",
    "leaves pulses of work that go on in the others' turns": """
        if self.seen is None:
            self.seen, self.count, self.stream = x, 0, torch.cuda.Stream()
            self.host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
            self.far = self.host.cuda()
            torch.cuda.synchronize = lambda *_: torch.cuda.current_stream().synchronize()
        out = self.work(x)
        self.count += 1
        if self.count % 10 == 0:
            with torch.cuda.stream(self.stream):
                for _ in range(15):
                    for _ in range(2):
                        self.host.copy_(self.far, non_blocking=True)
                    torch.cuda._sleep(20_000_000)
        return out""",
}
# Honest, and must be timed.
RIGHT = {
    "works in memory that it keeps": """
        if self.kept is None or self.kept.shape != x.shape:
            self.kept = torch.empty_like(x)
        for _ in range(12):
            torch.addmm(self.linear.bias, x, self.linear.weight.t(), out=self.kept)
            x = torch.tanh(self.kept)
        return x""",
    "tries two ways in its first call": """
        if self.kept is None:
            self.kept = min((time.perf_counter() - began, way) for way in (12, 12) for began in [time.perf_counter()]
                            if self.work(x, way) is not None)[1]
        return self.work(x, self.kept)""",
    "returns a view of padded memory": """
        padded = x.new_empty(len(x), x.shape[1] + 8)
        padded[:, : x.shape[1]] = self.work(x)
        return padded[:, : x.shape[1]]""",
    "returns a result of other strides": "return self.work(x).t().contiguous().t()",
    "has threads that it waits for": """
        out = torch.empty_like(x)
        threads = [threading.Thread(target=self.late, args=(part, into)) for part, into in zip(x.chunk(2), out.chunk(2))]
        [each.start() for each in threads]
        [each.join() for each in threads]
        return out""",
    "compiles itself": """
        if self.kept is None:
            self.kept = torch.compile(self.work)
        return self.kept(x)""",
}
RIGHT_ON_A_GPU = {
    "works on a stream that it joins": """
        self.stream = getattr(self, "stream", None) or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            out = self.work(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        return out""",
    "replays a CUDA graph": """
        if self.kept is None:
            self.seen, self.graph = x.clone(), torch.cuda.CUDAGraph()
            self.work(x)
            with torch.cuda.graph(self.graph):
                self.kept = self.work(self.seen)
        self.seen.copy_(x)
        self.graph.replay()
        return self.kept.clone()""",
    "returns memory of cudaMallocAsync": """
        import ctypes
        address, stream = ctypes.c_void_p(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert not ctypes.CDLL("libcudart.so").cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(x.nbytes), stream)
        class Memory:
            __cuda_array_interface__ = {"shape": tuple(x.shape), "typestr": "<f4", "data": (address.value, False), "version": 3}
        return torch.as_tensor(Memory(), device=x.device).copy_(self.work(x))""",
}
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
LIMIT = 60
CALLS = 16  # of a turn
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # several wait for one another, for as long as other programs have the processors


class Measured:
    """The original at a place in two steps, and `of(file)`: what the outer clock says of a file."""

    def __init__(self, place, folder, step, forward=WORK):
        self._place, self._folder, self._step, self._open = place, folder, step, contextlib.ExitStack()
        problem = folder / "problem.py"
        problem.write_text(pairs.whole(PROBLEM.replace("{forward}", forward.strip())))
        original = {"problem": str(problem), "settings": {}, "place": place, "seed": 1, "precision": None}
        self._truth = RefereeClient(original, folder, 5, LIMIT)
        self._open.callback(self._truth.close)
        self._truth.load()
        self._truth.prepare()
        if step_of(step) != "forward":
            self._truth.ask("prepare_timed", probe="timed", mode=step_of(step), seed=7)
        self._original = original | {"weights": self._truth.weights}
        self._eager = self._begun("baselines")
        self._worker = self._begun("candidate")
        self._start_eager()
        self._call_ms = outer.TURN_MS[place] / CALLS

    def _begun(self, role):
        return self._open.enter_context(WorkerProcess(role, LIMIT, ONE_THREAD))

    def by_processor_time(self, patch):
        """On the CPU, have the outer clock go by what both processes have used of it, which other programs do not change."""

        def used():
            return sum(time.clock_gettime((~process.pid << 3) | CPUCLOCK_SCHED) for process in (self._eager, self._worker))

        if self._place == "cpu":
            patch.setattr(outer, "time", types.SimpleNamespace(perf_counter=used, monotonic=time.monotonic))

    def _start_eager(self):
        self._eager.ask("load", **self._original)
        self._eager.ask("start", side="eager", mode=self._step, seeds=[1, 2, 3])

    def of(self, forward, trained="self.work(x)"):
        """What outer.measure gives of a file whose forward does this, and returns `trained` where gradients are wanted.

        Files that leave nothing behind share a process.
        """
        file = self._folder / "solution.py"
        file.write_text(SOLUTION.replace("{forward}", forward.strip()).replace("{trained}", trained))
        self._worker.ask("load", variant=str(file), **self._original)
        self._worker.ask("start", side="variant", mode=self._step, seeds=[1, 2, 3])
        players = {}
        for name, process in ((outer.VARIANT, self._worker), (outer.EAGER, self._eager)):
            players[name] = outer.Player(name, self._step, process, self._call_ms if name == outer.EAGER else 0.0)
        return dump(outer.measure(self._truth, players, self._place, None, 1))

    def renew(self):
        """Begin a process, in the place of one in which a file's threads go on, and of those to which it did something."""
        for process in (self._eager, self._truth.worker):
            if not process.has_ended and os.sched_getaffinity(process.pid) != os.sched_getaffinity(0):
                process.kill()
        if self._eager.has_ended:
            self._eager = self._begun("baselines")
            self._start_eager()
        self._worker.close()
        self._worker = self._begun("candidate")

    def close(self):
        self._open.close()


@pytest.fixture(scope="module", params=PLACES)
def measured(request, tmp_path_factory):
    with contextlib.closing(Measured(request.param, tmp_path_factory.mktemp("deceit"), "forward")) as made:
        made.place = request.param
        yield made


@pytest.mark.parametrize("what", [*FOUND_OUT, *FORGES, *ON_THE_CPU, *ON_A_GPU, *FORGES_ON_A_GPU])
def test_a_result_that_was_not_computed_from_the_inputs_is_wrong(measured, what):
    if what in (ON_A_GPU | FORGES_ON_A_GPU if measured.place == "cpu" else ON_THE_CPU):
        pytest.skip("is about the other place")
    with pytest.raises(outer.Rejected, match=r"off by|the output is NaN|once it was taken"):
        measured.of((FOUND_OUT | FORGES | ON_THE_CPU | ON_A_GPU | FORGES_ON_A_GPU)[what])
    if what in FORGES | ON_THE_CPU | FORGES_ON_A_GPU:
        measured.renew()


# What the original does -> its forward, and that of a file which keeps what it gave in an earlier call.
KEPT = {
    "decides by near ties": (
        "return torch.sign(self.linear(x))",
        """
        if self.kept is None:
            self.kept = torch.sign(self.linear(x))
        return self.kept""",
    ),
    "draws random numbers": (
        "return self.linear(x) + torch.randn_like(x)",
        """
        if self.kept is None:
            self.kept = torch.randn_like(x)
        return self.linear(x) + self.kept""",
    ),
}


@pytest.mark.parametrize(
    "what", ["decides by near ties", *(pytest.param(each, marks=pytest.mark.full) for each in [*KEPT][1:])]
)
@pytest.mark.parametrize("place", PLACES)
def test_what_was_kept_is_wrong_whatever_the_original_does(place, tmp_path, what):
    does, keeps = KEPT[what]
    with contextlib.closing(Measured(place, tmp_path, "forward", does)) as measured:
        assert measured.of(does)["rounds"] >= outer.FEWEST_ROUNDS
        with pytest.raises(outer.Rejected, match="off by"):
            measured.of(keeps)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_memory_that_was_filled_once_is_no_result(place, tmp_path):
    """Nor where a caller cannot write to all of it, as between the rows of a view."""
    fills = """
        if self.kept is None:
            self.kept = x.new_zeros(len(x), 64, 80)
        result = self.kept[:, :, :64]
        result.diagonal(dim1=1, dim2=2).copy_(self.linear(x)[:, :64])
        return result"""
    with (
        contextlib.closing(Measured(place, tmp_path, "forward", "return torch.diag_embed(self.linear(x)[:, :64])")) as measured,
        pytest.raises(outer.WorkerFailure, match="are in an earlier call's memory"),
    ):
        measured.of(fills)


@pytest.mark.parametrize("what", [*WITHHELD, *(pytest.param(each, marks=pytest.mark.full) for each in WITHHELD_ON_A_GPU)])
def test_nothing_is_claimed_of_what_cannot_be_timed(measured, what):
    if what in WITHHELD_ON_A_GPU and measured.place != "cuda":
        pytest.skip("needs a GPU")
    reason, forward = (WITHHELD | WITHHELD_ON_A_GPU)[what]
    measured.renew()
    with pytest.raises((outer.WorkerFailure, outer.Rejected), match=reason):
        measured.of(forward)
    measured.renew()


def test_whoever_comes_after_a_call_that_never_ends_is_timed(measured):
    """And after the judge's own process has been ended, which is nobody's fault but the judge's."""
    measured.renew()
    measured._worker.limit = 4
    with pytest.raises(outer.WorkerFailure, match="no answer within the time limit of 4 s: in a timed call"):
        measured.of("""
        while any(side._warm for side in self.sides()):  # behind the first call of the first turn
            pass
        return self.work(x)""")
    os.kill(measured._truth.worker.pid, signal.SIGKILL)
    measured._truth._worker._process.wait(10)
    measured.renew()
    assert measured.of("return self.work(x)")["rounds"] >= outer.FEWEST_ROUNDS


OF_THE_DEFAULT_TIER = [
    "works ahead in a thread that polls its inputs",
    "says that its calls take no time",
    "shortens and grows the memory that the referee reads",
]
OF_THE_FULL_TIER = [each for each in [*GAINS_NOTHING, *GAINS_NOTHING_ON_A_GPU] if each not in OF_THE_DEFAULT_TIER]


@pytest.mark.parametrize(
    "what",
    [
        *OF_THE_DEFAULT_TIER,
        *(pytest.param(each, marks=pytest.mark.full) for each in OF_THE_FULL_TIER),
    ],
)
def test_work_that_is_moved_gains_nothing(measured, what, monkeypatch):
    if what in GAINS_NOTHING_ON_A_GPU and measured.place != "cuda":
        pytest.skip("needs a GPU")
    measured.renew()
    if what != "leaves a thread that takes the others' processors":
        measured.by_processor_time(monkeypatch)
    found = measured.of((GAINS_NOTHING | GAINS_NOTHING_ON_A_GPU)[what])
    measured.renew()
    assert found["rounds"] >= outer.FEWEST_ROUNDS and found["ms"] > 0
    assert found["low"] < 1.3, found  # that it is faster than the original would be shown by the whole interval


@pytest.mark.full
@pytest.mark.parametrize("what", [*RIGHT, *RIGHT_ON_A_GPU])
def test_a_right_one_is_timed(measured, what, monkeypatch):
    if what in RIGHT_ON_A_GPU and measured.place != "cuda":
        pytest.skip("needs a GPU")
    measured.by_processor_time(monkeypatch)
    found = measured.of((RIGHT | RIGHT_ON_A_GPU)[what])
    assert found["rounds"] >= outer.FEWEST_ROUNDS
    assert 0.1 < found["ratio"] < 3 and found["low"] <= found["ratio"] <= found["high"], found


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_a_training_step_are_compared_too(place, tmp_path):
    with contextlib.closing(Measured(place, tmp_path, "weights_and_input")) as measured:
        honest = measured.of("pass")
        assert honest["low"] < 1.3 and honest["ms"] > 0
        steps = "self.work(x, 11)"
        with pytest.raises(outer.Rejected, match="the gradient of"):
            measured.of("pass", trained=f"self.work(x).detach() + ({steps} - {steps}.detach())")
        with pytest.raises(outer.Rejected, match="the output is off"):  # the gradients are right without it
            measured.of("pass", trained="self.work(x) + 1")


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_is_a_sum_is_not_estimated_by_a_sample(place, tmp_path):
    quarter = "(lambda y, b: torch.cat([y[: len(y) // 4] * (4 * b - 3 * b.detach()), y[len(y) // 4 :] * b.detach()]))"
    with (
        contextlib.closing(Measured(place, tmp_path, "weights", "return x.abs() * self.linear.bias[0]")) as measured,
        pytest.raises(outer.Rejected, match=r"the gradient of linear\.bias"),
    ):
        measured.of("pass", trained=f"{quarter}(x.abs(), self.linear.bias[0])")
