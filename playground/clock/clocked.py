"""What a worker does under the clocks, a variant's as well as that of the baselines."""

import time

import torch

from playground import catalog, tensors
from playground.clock import timer
from playground.clock.memory import Gpu, Host
from playground.clock.side import Side
from playground.clock.steps import GRAPHED, step_of
from playground.clock.workload import Graphed, Workload
from playground.judge import domain
from playground.machine.peak_memory import peak_memory


class Clocked:
    """Requests about a `side` (a baseline's name, or "variant") in a `mode`: one of clock.steps', GRAPHED or not.

    `shared` is the descriptor of the memory that the process was born with, which the worker sets.
    A subclass calls `_take` before it loads any file, and gives `_circumstances(side)`, a context, and
    `_subject(side)`: (problem, model, memory format and dtype of its inputs).
    """

    def _take(self, problem, settings, place, seed, strict=False, precision=None, varied=False, float_outputs=False):
        """Know the original: a problem's file, the constants that are replaced there, where it runs, the seed of its weights.

        `place` is "cuda", "cpu" or "emulator". `precision` is that of weights and inputs, one of HALF. `varied` says that the
        inputs are varied: see judge.domain. `strict` says that TF32 is forbidden, which is left to the subclass, as is
        `float_outputs`, that a variant's are to be float32.
        """
        self._hold_clock(torch.device(tensors.PLACES[place]))
        self.path, self.settings, self.seed = problem, settings, seed
        self.strict, self.precision, self.varied, self.float_outputs = strict, precision, varied, float_outputs

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
                _, peak_mib = peak_memory(lambda content=content: workload(content), self.device)
                self.clock.wait()
                milliseconds = (time.perf_counter() - began) * 1e3
        return {"milliseconds": milliseconds, "peak_mib": peak_mib}

    def time(self, side, mode, seeds):
        """Time one call for each seed, each on content of its own that follows from it, and keep the last one's result.

        Returns {"samples_ms", "late", "flush_ms", "launch_ms"}: see clock.timer's clocks; the last is what the host took to
        launch each call. The first SETTLING_CALLS of them are for settling.
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

    def join_outer(self, side, mode, turn):
        """Take part in the outer clock, in memory that the referee's `outer_open` describes: see clock.side."""
        with self._circumstances(side):
            memory = Gpu() if self.device.type == "cuda" else Host(self.shared)
            self._outer = Side(self.workloads[side, mode], memory)
            return self._outer.join(turn)

    def ready_outer(self, side, mode, turn):
        """Get ready for a turn, which the referee's `outer.draw` describes."""
        with self._circumstances(side):
            return self._outer.ready(turn)

    def call_outer(self, side, mode, null, number):
        """Answer a turn; with `null` without any work."""
        with self._circumstances(side):
            return self._outer.call(null, number)

    def leave_outer(self, side, mode):
        """Let go of the shared memory."""
        if self._outer:
            self._outer.close()
        self._outer = None
        return {}
