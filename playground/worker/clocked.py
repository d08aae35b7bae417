"""What a worker does under the stopwatch, a variant's as well as that of the baselines."""

import contextlib
import os
import time

import torch

from playground import catalog, tensors
from playground.judge import domain
from playground.stopwatch import outer, timer
from playground.stopwatch.workload import GRAPHED, Graphed, Workload, step_of


class Clocked:
    """Requests about a `side` (a baseline's name, or "variant") in a `mode`: one of stopwatch.workload's, GRAPHED or not.

    A subclass calls `_take` before it loads any file, and gives `_circumstances(side)`, a context, and
    `_subject(side)`: (problem, model, memory format and dtype of its inputs).
    """

    def _take(self, problem, settings, place, seed, strict=False, precision=None, varied=False):
        """Know the original: a problem's file, the constants that are replaced there, where it runs, the seed of its weights.

        `place` is "cuda", "cpu" or "emulator". `precision` is that of weights and inputs, one of HALF. `varied` says that the
        inputs are varied: see judge.domain. `strict` says that TF32 is forbidden, which is left to the subclass.
        """
        self._hold_clock(torch.device(tensors.PLACES[place]))
        self.path, self.settings, self.seed = problem, settings, seed
        self.strict, self.precision, self.varied = strict, precision, varied

    def _problem(self):
        """The problem's module, a new one each time: so what torch.compile keeps with a class belongs to one baseline."""
        problem = tensors.in_precision(catalog.load_problem(self.path, self.settings), self.precision)
        if self.varied:
            domain.vary(problem)
        return problem

    def _hold_clock(self, device):
        self.device = device
        self.clock = timer.clock_for(device)
        self.workloads = {}  # by side and mode
        self._outer = None
        self._forget()

    def _forget(self):
        """Let go of contents and results."""
        self._content = self._result = None  # of the last timed call
        self._held = []

    def start(self, side, mode, seeds):
        """Prepare the side, and call it once for each seed, to warm up.

        Returns {"milliseconds": of making content, flushing and calling, "peak_mib"}. A graph keeps the memory of its whole
        step, so those of other modes are given up.
        """
        self.clock.keep_memory()
        self._forget()
        for other in [key for key in self.workloads if key[1].startswith(GRAPHED) and key[1] != mode]:
            del self.workloads[other]
        with self._circumstances(side):
            problem, model, *inputs_as = self._subject(side)
            workload = Workload(problem, model, step_of(mode), self.device, *inputs_as)
            if mode.startswith(GRAPHED):
                workload = Graphed(workload, seeds[0])
            self.workloads[side, mode] = workload
            for seed in seeds:
                began = time.perf_counter()
                content = workload.fresh(seed)
                self.clock.flush()
                _, peak_mib = timer.peak_memory(lambda content=content: workload(content), self.device)
                self.clock.wait()
                milliseconds = (time.perf_counter() - began) * 1e3
        return {"milliseconds": milliseconds, "peak_mib": peak_mib}

    def time(self, side, mode, seeds):
        """Time one call for each seed, each on content of its own that follows from it, and keep the last one's result.

        Returns {"samples_ms", "late", "flush_ms", "launch_ms"}: see stopwatch.timer's clocks; the last is what the host took to
        launch each call. The first `settling_calls` of them are for settling.
        """
        self._forget()
        workload, calls = self.workloads[side, mode], []
        with self._circumstances(side):
            for seed in seeds:
                self._result = None
                self._content = content = workload.fresh(seed)
                self.clock.flush()
                milliseconds, is_late, self._result = self.clock.time(lambda content=content: workload(content))
                tensors.require_plain(self._result)
                calls.append((milliseconds, is_late, self.clock.flush_ms, self.clock.launch_ms))
        return dict(zip(("samples_ms", "late", "flush_ms", "launch_ms"), map(list, zip(*calls, strict=True)), strict=True))

    def result(self, side, mode, outputs):
        """Write what the last timed call gave, its outputs or its gradients, to the file `outputs`."""
        names = self.workloads[side, mode].names(self._content)
        gradients = {} if names is None else dict(zip(names, self._result, strict=True))
        tensors.save_results(tensors.Results(tensors.flatten(self._result) if names is None else [], gradients), outputs)
        return {}

    def hold(self, side, mode, seeds):
        """Make contents for `repeat`."""
        self._held = [self.workloads[side, mode].fresh(seed) for seed in seeds]
        self.clock.wait()
        return {}

    def repeat(self, side, mode, count):
        """Call `count` times back to back on the contents that are held, with no clock in this process."""
        with self._circumstances(side):
            for call in range(count):
                self.workloads[side, mode](self._held[call % len(self._held)])
            self.clock.wait()
        return {}

    def join_outer(self, side, mode, shared, page):
        """Take part in the outer clock, on memory that the referee's `outer_open` describes, and call the side once.

        Returns {"pid", "address"}, on the CPU: where the inputs are.
        """
        kind = _OnGpu if self.device.type == "cuda" else _OnCpu
        with self._circumstances(side):
            self._outer = kind(self.workloads[side, mode], shared, page)
        return self._outer.told

    def call_outer(self, side, mode, null, **more):
        """Call the side on inputs that are written to its memory: on the CPU once, and {"results": their places} is returned.

        With `null` it does no work: an earlier call's result is its answer. `more`: see _OnGpu.call and _OnCpu.call.
        """
        with self._circumstances(side):
            return self._outer.call(null, **more)

    def leave_outer(self, side, mode):
        """Let go of the shared memory."""
        if self._outer:
            self._outer.close()
        self._outer = None
        return {}


def _flat(result):
    """The tensors of a result; gradients that there are not are left out."""
    return tensors.flatten([each for each in result if each is not None] if type(result) in (tuple, list) else result)


class _OnCpu:
    """The timed side of the outer clock where inputs are written to its memory, and results are read there."""

    def __init__(self, workload, shared, page):
        self._block = torch.zeros(shared["bytes"], dtype=torch.uint8)
        given = [outer.placed(self._block, place) if place else None for place in shared["places"]]
        self._step, self._content = workload.on(given)
        self._last = self._result = self._step(self._content)
        self.told = {"pid": os.getpid(), "address": self._block.data_ptr()}

    def call(self, null, draws):
        tensors.seed_draws(draws)
        self._result = self._last if null else self._step(self._content)
        flat = [value.detach().resolve_conj().resolve_neg() for value in _flat(self._result)]
        self._result = flat  # as long as they are read
        return {"results": [outer.form_of(value) | {"address": value.data_ptr()} for value in flat]}

    def close(self):
        self._block = self._content = self._last = self._result = self._step = None


class _OnGpu:
    """The timed side of the outer clock: its work is queued behind a gate, which opens when the inputs are there."""

    def __init__(self, workload, shared, page):
        self._memory = outer.Memory()
        address, count = self._memory.opened(shared["handle"])
        self._block = address + shared["offset"]
        memory = outer.bytes_at(self._block + outer.HEADER, count - shared["offset"] - outer.HEADER)
        given = [outer.placed(memory, place) if place else None for place in shared["places"]]
        self._step, self._content = workload.on(given)
        self._page = outer.Page(page)
        self._copies = {}
        self._ticks = torch.zeros(1, device="cuda")
        self._number = 0
        self._last, self.told = self._shared(self._step(self._content)), {}
        torch.cuda.synchronize()

    def call(self, null, calls, seconds):
        """Answer so many calls, each within `seconds`."""
        for _ in range(calls):
            self._number += 1
            if not self._page.wait(outer.CALL, self._number, seconds):
                raise RuntimeError("the outer clock has not begun a call in time")
            try:
                self._queue(null)
            except BaseException:  # or it would be waited for until the time limit
                self._page.say(None)
                raise
            finally:
                self._page.set(outer.QUEUED, self._number)
            torch.cuda.synchronize()
        return {}

    def _queue(self, null):
        tensors.seed_draws(self._page.get(outer.DRAWS))
        self._memory.wait_for(self._block + outer.RELEASE, self._number)
        if null:  # without any kernel, the GPU would not change over
            self._ticks.add_(1)
        results = self._last if null else self._shared(self._step(self._content))
        self._memory.write(self._block + outer.DONE, self._number)
        self._page.say([self._place(value) for value in results])

    def _shared(self, result):
        return [self._shareable(i, value) for i, value in enumerate(_flat(result))]

    def _shareable(self, index, tensor):
        """The tensor, or a copy of one whose memory cannot be shared as it is, such as cudaMallocAsync's."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        with contextlib.suppress(outer.Unshareable):
            if tensor.is_cuda:
                self._memory.exported(tensor.data_ptr())
                return tensor
        tensor = tensor.contiguous()  # one that is expanded could not be written to
        place = outer.Layout([tensor]).places[0]
        own = self._copies.get((index, str(place)))
        if own is None:
            count = max(outer.extent(tensor), outer.ALIGNED)
            own = self._copies[index, str(place)] = outer.placed(outer.bytes_at(self._memory.allocate(count), count), place)
        return own.copy_(tensor)

    def _place(self, tensor):
        handle, offset = self._memory.exported(tensor.data_ptr() or tensor.untyped_storage().data_ptr())  # 0 of an empty one
        return outer.form_of(tensor) | {"handle": handle, "offset": offset}

    def close(self):
        self._content = self._last = self._step = None
        self._copies = {}
        self._memory.free()
        self._page.close()
