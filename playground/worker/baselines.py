"""The worker's role that runs what a variant is compared with: the original, as PyTorch runs it best."""

import torch

from playground import catalog, tensors
from playground.machine import ceilings
from playground.stopwatch import floors, timer
from playground.stopwatch.baselines import BASELINES, prepared
from playground.stopwatch.workload import Workload, input_sets


class Baselines:
    """The original in this process, where no candidate's file is ever loaded."""

    def load(self, problem, settings, place, weights, seed):
        """Make the original, with the weights in the file `weights`."""
        self.device = torch.device(tensors.PLACES[place])
        self.problem = catalog.load_problem(problem, settings)
        self.model = tensors.make_model(self.problem, self.problem.Model, seed)
        self.model.load_state_dict(tensors.load(weights))
        self.model.to(self.device)
        self.input_sets = None
        return {}

    def time(self, baseline, mode, seed, seconds):
        """As Candidate.time, for one of stopwatch.baselines.BASELINES. The flags it needs are set for this call alone."""
        self.input_sets = self.input_sets or input_sets(self.problem, self.device, seed)
        with prepared(self.model, BASELINES[baseline]) as (model, memory_format):
            workload = Workload(model, self.input_sets, mode, memory_format)
            return timer.measure(workload, self.device, seconds)

    def floor(self, name, seed, precision):
        """{"milliseconds", "bound"} of a forward pass, from ceilings measured now; `name` is the model's."""
        inputs = tensors.to(tensors.make_inputs(self.problem, seed), self.device)
        with torch.no_grad():
            outputs = tensors.flatten(self.model(*inputs))
        work = floors.count_work(name, self.model, inputs, outputs)
        return vars(floors.floor(work, ceilings.measure(self.device), precision))
