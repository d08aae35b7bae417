"""The truth on the content of a timed call, which the referee makes again from the call's seed."""

from playground import tensors
from playground.judge.probes import Probe
from playground.judge.tolerance import Reference
from playground.stopwatch.workload import fresh_inputs, upstream_for

SLACK = 2.0


class TimedReference(Reference):
    """Allows twice what the check allowed on other inputs of the same distribution, `checked`: a Reference.

    A timed call that gives another answer (an old one, none, a constant) is off by about the spread itself. What a precision
    mode permits was computed for the check, and costs too much to be computed again for each timing.
    """

    def __init__(self, truth, eager, checked, decisions=None):
        super().__init__(truth, eager, others=[checked.truth, *checked.others], decisions=decisions)
        self.allowed = max(self.allowed, SLACK * checked.allowed)
        self._allowed_rms = max(self._allowed_rms, SLACK * checked._allowed_rms)


def probe_of(name, problem, oracle, mode, seed, device):
    """(Probe with the content that stopwatch.workload.Workload makes of `seed` in `mode`, its Outcome in eager PyTorch, and
    all of the outputs).
    """
    probe = Probe(name, fresh_inputs(problem, seed, device))
    eager = oracle.whole(probe)
    outputs = eager.outputs
    if mode != "forward":
        probe.upstream = upstream_for(eager.outputs, seed, device)
        if mode == "weights_and_input":
            probe.wanted_inputs = tuple(i for i, value in enumerate(probe.inputs) if tensors.differentiable(value))
        return probe, oracle.eager(probe), outputs
    return probe, oracle.sampled(probe, eager), outputs


def gradient_references(truth, eager, checked, decisions):
    """{name: TimedReference} beside what was allowed for another timed call's; `decisions()` as in tolerance.Reference."""
    return {
        name: TimedReference(truth.gradients[name], eager.gradients[name], reference, lambda name=name: decisions()[name])
        for name, reference in checked.items()
    }


def output_references(truth, eager, checked):
    """A TimedReference for each output, beside what the check allowed for it."""
    return [TimedReference(*each) for each in zip(truth.outputs, eager.outputs, checked, strict=True)]
