"""What one timed call does: forward, or forward and backward."""

import torch

from playground import tensors

MODES = ("forward", "weights", "weights_and_input")
INPUT_SETS = 3  # rotated, so that no call sees the content of the call before


def input_sets(problem, device, seed):
    """INPUT_SETS lists of the problem's inputs, on the device."""
    return [tensors.to(tensors.make_inputs(problem, seed + offset), device) for offset in range(INPUT_SETS)]


class Workload:
    """A model on a rotation of inputs.

    mode "forward" runs without gradients; "weights" trains the parameters; "weights_and_input" the float inputs as well.
    `memory_format` converts 4-d and 5-d inputs beforehand. Calling the workload runs one step.
    """

    def __init__(self, model, sets, mode, memory_format=None):
        self._model = model
        self._mode = mode
        self._sets = [[_prepared(value, mode, memory_format) for value in inputs] for inputs in sets]
        self._upstream = None
        self._calls = 0

    def __call__(self):
        inputs = self._sets[self._calls % INPUT_SETS]
        self._calls += 1
        if self._mode == "forward":
            with torch.no_grad():
                return self._model(*inputs)
        outputs = [output for output in tensors.flatten(self._model(*inputs)) if output.requires_grad]
        if self._upstream is None:
            self._upstream = [torch.rand_like(output) for output in outputs]
        wanted = [p for p in self._model.parameters() if p.requires_grad]
        if self._mode == "weights_and_input":
            wanted += [value for value in inputs if tensors.differentiable(value)]
        return torch.autograd.grad(outputs, wanted, self._upstream, allow_unused=True)


def _prepared(value, mode, memory_format):
    if not isinstance(value, torch.Tensor):
        return value
    if memory_format == "channels_last" and value.dim() in (4, 5):
        value = value.to(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)
    return value.detach().requires_grad_(mode == "weights_and_input" and tensors.differentiable(value))
