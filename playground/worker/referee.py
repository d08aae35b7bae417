"""The worker's role that knows the truth: it makes the inputs and compares raw outputs with float64.

It runs the original alone. No candidate's file is ever loaded into this process.
"""

import torch

from playground import catalog, tensors
from playground.judge import probes
from playground.judge.oracle import Oracle
from playground.judge.tolerance import Reference, worst, wrong


class Referee:
    """The original, its truth on each probe, and the comparison with it."""

    def load(self, problem, settings, place, weights, seed):
        """Make the original and save its weights to the file `weights`.

        Returns {"inputs": [shape, ...], "precision": "tf32" or "fp32"}.
        """
        self.device = torch.device(tensors.PLACES[place])
        self.problem = catalog.load_problem(problem, settings)
        model = tensors.make_model(self.problem, self.problem.Model, seed)
        tensors.save(model.state_dict(), weights)
        self.oracle = Oracle(model.to(self.device), self.device)
        self.references = {}
        has_tf32 = place == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        self.precision = "tf32" if has_tf32 and torch.backends.cudnn.conv.fp32_precision == "tf32" else "fp32"
        inputs = tensors.make_inputs(self.problem, seed)
        shapes = [list(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs]
        return {"inputs": shapes, "precision": self.precision}

    def prepare(self, probe, seed, inputs):
        """Make a probe ("own" or "scaled"), save its inputs to the file `inputs`, and compute its truth.

        The scaled probe also gets upstream gradients where the original has any. Returns {"differentiable"}.
        """
        made = {"own": probes.own, "scaled": probes.scaled}[probe](self.problem, seed)
        eager = self.oracle.eager(made)
        if probe == "scaled" and any(tensors.differentiable(output) for output in eager.outputs):
            with_upstream = probes.with_upstream(made, eager.outputs, seed)
            differentiated = self.oracle.eager(with_upstream)
            if any(gradient is not None for gradient in differentiated.gradients.values()):
                made, eager = with_upstream, differentiated
        truth = self.oracle.truth(made)
        self.references[probe] = _references(truth, eager, self.oracle.permitted(made, self.precision))
        tensors.save({"inputs": made.inputs, "upstream": made.upstream, "wanted_inputs": made.wanted_inputs}, inputs)
        return {"differentiable": bool(eager.gradients)}

    def compare_outputs(self, probe, outputs):
        """{"max_error", "allowed", "eager_error", "complaint"} of the outputs in a file."""
        expected, _ = self.references[probe]
        actual = tensors.load(outputs)["outputs"]
        if len(actual) != len(expected):
            return vars(wrong(f"returns {len(actual)} tensors instead of {len(expected)}"))
        names = ["the output"] if len(expected) == 1 else [f"output {i}" for i in range(len(expected))]
        pairs = zip(expected, names, actual, strict=True)
        return vars(worst([reference.compare(name, value) for reference, name, value in pairs]))

    def compare_gradients(self, probe, gradients):
        """{name: {"max_error", "allowed", "eager_error", "complaint"}} of the gradients in a file."""
        _, expected = self.references[probe]
        found = tensors.load(gradients)
        if found["detached"]:
            return {"outputs": vars(wrong("the output is silently detached: no gradient reaches anything through it"))}
        return {
            name: vars(reference.compare(f"the gradient of {name}", found["gradients"].get(name)))
            for name, reference in expected.items()
        }


def _references(truth, eager, permitted):
    """(list for the outputs, {name: Reference} for the gradients that the original has)."""
    outputs = [
        Reference(true, in_eager, *(outcome.outputs[i] for outcome in permitted))
        for i, (true, in_eager) in enumerate(zip(truth.outputs, eager.outputs, strict=True))
    ]
    gradients = {
        name: Reference(true, eager.gradients[name], *(outcome.gradients[name] for outcome in permitted))
        for name, true in truth.gradients.items()
        if true is not None
    }
    return outputs, gradients
