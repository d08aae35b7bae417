"""What one timed call does: forward, or forward and backward."""

import torch

from playground import tensors

MODES = ("forward", "weights", "weights_and_input")
INPUT_SETS = 3  # rotated, so that no call sees the content of the call before


class Workload:
    """A model on a rotation of its own inputs.

    mode "forward" runs without gradients; "weights" trains the parameters; "weights_and_input" the float inputs as well.
    `memory_format` converts 4-d and 5-d inputs beforehand. Calling the workload runs one step.
    """

    def __init__(self, model, problem, mode, device, seed, memory_format=None):
        self._model = model
        self._mode = mode
        self._sets = []
        for offset in range(INPUT_SETS):
            inputs = tensors.to(tensors.make_inputs(problem, seed + offset), device)
            self._sets.append([_converted(value, memory_format) for value in inputs])
        if mode == "weights_and_input":
            for inputs in self._sets:
                for value in filter(tensors.differentiable, inputs):
                    value.requires_grad_()
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


def _converted(value, memory_format):
    if memory_format == "channels_last" and isinstance(value, torch.Tensor) and value.dim() in (4, 5):
        return value.to(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)
    return value
