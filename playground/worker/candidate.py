"""The worker's role that runs a variant: load it, run it on the inputs it is given, time it."""

import contextlib
import functools
import itertools

import torch

from playground import catalog, emulator, tensors
from playground.stopwatch import timer
from playground.stopwatch.workload import Workload, input_sets
from playground.worker.builds import BuildWatch


class WrongInterface(Exception):
    """The variant's parameters are not those of the original."""


class Candidate:
    """A ModelNew in this process."""

    def load(self, problem, variant, settings, place, weights, seed):
        """Make a ModelNew of the variant's file and give it the weights in the file `weights` (its own when None).

        `place` is "cuda", "cpu" or "emulator". Nothing of ours is built before the first call. Raises CatalogError,
        WrongInterface and whatever the file raises.
        """
        self.device = torch.device(tensors.PLACES[place])
        self.emulator = emulator.install(mode="check", source_file=variant) if place == "emulator" else None
        self.schedules = itertools.cycle(("forward", "reversed", "random"))
        self.builds = BuildWatch(emulated=place == "emulator")
        self.problem = catalog.load_problem(problem, settings)
        module = catalog.load_variant(variant)
        self.model = tensors.make_model(self.problem, module.ModelNew, seed)
        if weights is not None:
            copy_weights(self.model, tensors.load(weights))
        self.model.to(self.device)
        self.input_sets = None
        return {}

    def build(self, seed):
        """Run forward once on the problem's own inputs, so that everything is built. Returns {"seconds", "built"}."""
        self._forward(tensors.to(tensors.make_inputs(self.problem, seed), self.device))
        return {"seconds": self.builds.seconds if self.builds.names else None, "built": self.builds.built}

    def run(self, inputs, outputs, poison):
        """Forward on the inputs in one file; the outputs go to another. Returns {"peak_mib"}.

        With `poison`, memory that torch hands out uninitialised is NaN, so that an element that is not written shows. (The
        emulator sees such elements by itself.)
        """
        self._next_schedule()
        given = tensors.to(tensors.load(inputs)["inputs"], self.device)
        forward = functools.partial(self._forward, given)
        with _poisoned_memory() if poison and not self.emulator else contextlib.nullcontext():
            result, peak_mib = timer.peak_memory(forward, self.device)
        tensors.save({"outputs": result}, outputs)
        return {"peak_mib": peak_mib}

    def differentiate(self, inputs, outputs):
        """Forward and backward on the inputs and upstream gradients in one file; the gradients go to another.

        Returns {"unsupported": reason or None}: the text of a NotImplementedError when the variant refuses to train.
        """
        self._next_schedule()
        given = tensors.load(inputs)
        try:
            results, gradients = tensors.gradients(
                self.model, tensors.to(given["inputs"], self.device), given["upstream"], given["wanted_inputs"]
            )
        except NotImplementedError as refusal:
            return {"unsupported": str(refusal).splitlines()[0]}
        self._synchronize()
        detached = not any(result.requires_grad for result in results)
        tensors.save({"outputs": results, "gradients": gradients, "detached": detached}, outputs)
        return {"unsupported": None}

    def time(self, mode, seed, seconds):
        """Milliseconds of every repetition within the budget of `seconds`, and the peak memory: {"samples_ms", "peak_mib"}."""
        self.input_sets = self.input_sets or input_sets(self.problem, self.device, seed)
        workload = Workload(self.model, self.input_sets, mode)
        return timer.measure(workload, self.device, seconds)

    def _next_schedule(self):
        """Under the emulator every run has its threads in another order, so that a race has more chances to show."""
        if self.emulator:
            self.emulator.configure(schedule=next(self.schedules))

    def _forward(self, inputs):
        with torch.no_grad():
            result = tensors.flatten(self.model(*inputs))
        self._synchronize()
        return result

    def _synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def copy_weights(model, weights):
    """load_state_dict by name, strictly. Raises WrongInterface that names the parameters which differ."""
    own = model.state_dict()
    complaints = [f"lacks {name}" for name in weights if name not in own]
    complaints += [f"has {name}, which the original lacks" for name in own if name not in weights]
    complaints += [
        f"{name} is {tuple(own[name].shape)} instead of {tuple(value.shape)}"
        for name, value in weights.items()
        if name in own and own[name].shape != value.shape
    ]
    if complaints:
        raise WrongInterface("ModelNew's parameters differ from the original's: it " + "; ".join(complaints))
    model.load_state_dict(weights)


@contextlib.contextmanager
def _poisoned_memory():
    """torch fills what it would leave uninitialised with NaN (or the largest integer) in its deterministic mode."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill
