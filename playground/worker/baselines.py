"""The worker's role that runs what a variant is compared with: the original, as PyTorch runs it best."""

import torch

from playground import tensors
from playground.clock.baselines import named
from playground.clock.clocked import Clocked
from playground.clock.prepared import precision_of, prepare
from playground.clock.workload import fresh_inputs
from playground.floor import work
from playground.judge.precision import forbid_tf32
from playground.machine import ceilings
from playground.record import Work


class Baselines(Clocked):
    """The original in this process, where no candidate's file is ever loaded."""

    def load(self, weights, **original):
        """Take the original (see Clocked), with the weights in the file `weights`."""
        self._take(**original)
        if self.strict:
            forbid_tf32()
        self.weights, self.prepared = weights, {}
        return {}

    def ceilings(self):
        """Return the fields of a record.Ceilings of this device, measured now."""
        return vars(ceilings.measure(self.device))

    def work(self, name, counted):
        """Return {"least", "as_written", "certain"}, each {"bytes", "flops"}, of a step of a mode; see floor.work."""
        problem = self._problem()
        model = self._model(problem)
        inputs = fresh_inputs(problem, self.seed, self.device)
        with torch.no_grad():
            outputs = tensors.flatten(model(*inputs))
        least = work.count_work(name, model, inputs, outputs, counted)
        certain = Work(work.certain_bytes(model, inputs, outputs), 0)
        as_written = work.as_written(model, inputs, counted)
        return {"least": vars(least), "as_written": vars(as_written), "certain": vars(certain)}

    def free_memory(self):
        """Return {"mib"} of GPU memory that no process has taken, but for what this one keeps at hand."""
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return {"mib": (torch.cuda.mem_get_info()[0] + kept) / 2**20}

    def flush_in_a_row(self, side, mode, flush_ms):
        """Return {"milliseconds"} of each of many flushes; see clock.timer.CudaClock. Any side's process can do it."""
        return {"milliseconds": self.clock.flush_in_a_row(flush_ms)}

    def _subject(self, side):
        if side not in self.prepared:
            problem = self._problem()
            self.prepared[side] = problem, *prepare(self._model(problem), named(side))
        return self.prepared[side]

    def _circumstances(self, side):
        return precision_of(named(side))

    def _model(self, problem):
        model = tensors.make_model(problem, problem.Model, self.seed, self.device)
        model.load_state_dict(tensors.load(self.weights))
        return model
