"""What a worker does under the stopwatch, a variant's as well as that of the baselines."""

import torch

from playground import tensors
from playground.stopwatch import timer
from playground.stopwatch.workload import GRAPHED, Graphed, Workload, step_of


class Clocked:
    """Requests about a `side` (a baseline's name, or "variant") in a `mode`: one of stopwatch.workload's, GRAPHED or not.

    A subclass calls `_hold_clock` before it loads any file, and gives `_circumstances(side)`, a context, and
    `_subject(side)`: (problem, model, memory format and dtype of its inputs).
    """

    def _hold_clock(self, device):
        self.device = device
        self.clock = timer.clock_for(device)
        self.timed = {}

    def start(self, side, mode, seeds):
        """Prepare the side, and call it once for each seed: {"milliseconds", "peak_mib"} as in stopwatch.timer.

        A graph keeps the memory of its whole step, so those of other modes are given up.
        """
        self.clock.keep_memory()
        for other in [key for key in self.timed if key[1].startswith(GRAPHED) and key[1] != mode]:
            del self.timed[other]
        with self._circumstances(side):
            problem, model, *inputs_as = self._subject(side)
            workload = Workload(problem, model, step_of(mode), self.device, *inputs_as)
            if mode.startswith(GRAPHED):
                workload = Graphed(workload, seeds[0])
            self.timed[side, mode] = timer.Timed(workload, self.device, self.clock)
            return self.timed[side, mode].start(seeds)

    def time(self, side, mode, seeds):
        """Time one call for each seed, on content that follows from it. Returns what stopwatch.timer's Timed.time does."""
        for other in self.timed.values():
            other.forget()
        with self._circumstances(side):
            return self.timed[side, mode].time(seeds)

    def result(self, side, mode, outputs):
        """Write what the last timed call gave, its outputs or its gradients, to the file `outputs`."""
        result, names = self.timed[side, mode].result()
        if names is None:
            tensors.save_results(tensors.Results(tensors.flatten(result)), outputs)
        else:
            tensors.save_results(tensors.Results([], dict(zip(names, result, strict=True))), outputs)
        return {}

    def hold(self, side, mode, seeds):
        """Make contents for `repeat`."""
        self.timed[side, mode].hold(seeds)
        return {}

    def repeat(self, side, mode, count):
        """Call `count` times back to back on the contents that are held, with no clock in this process."""
        with self._circumstances(side):
            self.timed[side, mode].repeat(count)
        return {}


def memory_is_short():
    """Whether more than half of the GPU's memory is taken: what torch's allocator keeps should then be given back."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < total / 2
