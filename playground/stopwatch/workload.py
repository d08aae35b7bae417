"""What one timed call does: forward, or forward and backward, on content that no call has seen before."""

from dataclasses import dataclass

import torch

from playground import tensors

MODES = ("forward", "weights", "weights_and_input")
GRAPHED = "graphed "  # before the name of a mode: the same step in a CUDA graph
WARM_UP_CALLS = 3


def step_of(mode):
    """Return the one of MODES whose step is timed in `mode`, which may be in a CUDA graph."""
    return mode.removeprefix(GRAPHED)


@dataclass
class Content:
    """The inputs of one call, and the gradients of its outputs (empty where nothing is differentiated)."""

    inputs: list
    upstream: list


def fresh_inputs(problem, seed, device):
    """Return what the problem's get_inputs gives after every generator was seeded, made on the device where that works.

    The same seed gives the same content in every process on the same kind of device.
    """
    return tensors.to(tensors.made_on(device, lambda: tensors.make_inputs(problem, seed)), device)


def upstream_for(outputs, seed, device):
    """Return a gradient for each floating-point output, None for others; it follows from the seed and the shapes."""
    torch.manual_seed(seed + 1)
    return [
        torch.rand(output.shape, dtype=output.dtype, device=device) if tensors.differentiable(output) else None
        for output in outputs
    ]


class Workload:
    """One step of a model: `content = workload.fresh(seed)`, which is not timed, then `workload(content)`, which is.

    mode "forward" runs without gradients; "weights" trains the parameters; "weights_and_input" the float inputs as well.
    `memory_format` "channels_last" converts 4-d and 5-d inputs beforehand, `dtype` those of floats.
    """

    def __init__(self, problem, model, mode, device, memory_format=None, dtype=None):
        self._problem = problem
        self._model = model
        self._mode = mode
        self._device = device
        self._memory_format = memory_format
        self._dtype = dtype
        self._outputs = None

    def fresh(self, seed):
        """Return content that follows from the seed."""
        inputs = [self._prepared(value) for value in fresh_inputs(self._problem, seed, self._device)]
        if self._mode == "forward":
            content = Content(inputs, [])
        else:
            if self._outputs is None:
                self._outputs = [output.detach().to("meta") for output in tensors.flatten(self._model(*inputs))]
            content = Content(inputs, upstream_for(self._outputs, seed, self._device))
        tensors.seed_draws()
        return content

    def on(self, given):
        """Return (what is to be called, its content) of a step on tensors of somebody else's: inputs, then upstream gradients.

        What is None there is that of get_inputs.
        """
        own = self.fresh(0)
        mine = [*own.inputs, *own.upstream]
        with torch.no_grad():  # a first call on zeros may raise, as of a matrix that has no inverse
            for place, value in zip(given, mine, strict=True):
                if place is not None:
                    place.copy_(value)
        values = [value if place is None else self._prepared(place) for place, value in zip(given, mine, strict=True)]
        count = len(own.inputs)
        upstream = [value if value is None else value.detach() for value in values[count:]]
        return self.with_outputs, Content(values[:count], upstream)

    def _prepared(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        if self._dtype and value.is_floating_point():
            value = value.to(self._dtype)
        if self._memory_format == "channels_last" and value.dim() in (4, 5):
            value = value.to(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)
        return value.detach().requires_grad_(self._mode == "weights_and_input" and tensors.differentiable(value))

    def __call__(self, content):
        """The outputs as the model gives them, or the list of gradients in the order of `names`."""
        return self._called(content)[1]

    def with_outputs(self, content):
        """Return the same, gradients behind the outputs: what a step need not compute for its gradients is due, too."""
        outputs, result = self._called(content)
        return result if self._mode == "forward" else [*(output.detach() for output in outputs), *result]

    def _called(self, content):
        """(the outputs, flat, where there are gradients; what __call__ returns)."""
        if self._mode == "forward":
            with torch.no_grad():
                return None, self._model(*content.inputs)
        outputs = tensors.flatten(self._model(*content.inputs))
        pairs = [(o, g) for o, g in zip(outputs, content.upstream, strict=True) if o.requires_grad]
        wanted = [p for p in self._model.parameters() if p.requires_grad]
        if self._mode == "weights_and_input":
            wanted += [value for value in content.inputs if tensors.differentiable(value)]
        return outputs, torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)

    def names(self, content):
        """Return the names of gradients: the parameters', then input0, ..., as of tensors.gradients; None for outputs."""
        if self._mode == "forward":
            return None
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        if self._mode == "weights_and_input":
            names += [f"input{i}" for i, value in enumerate(content.inputs) if tensors.differentiable(value)]
        return names


class Graphed:
    """The step of a workload in a CUDA graph, forward and backward in one.

    `fresh` writes new content into the graph's own inputs and upstream gradients, a call replays the graph, and its result lies
    in the graph's memory until the next call. Made as torch's notes on CUDA graphs say: warm-up on a side stream, then capture.
    Raises whatever the capture raises, as for a model that waits for the device.
    """

    def __init__(self, workload, seed, static=None):
        self._workload = workload
        self._static = static or workload.fresh(seed)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                workload(self._static)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        self._result = _captured(self._graph, lambda: workload(self._static))

    def on(self, given):
        """Return (a graph, its content), as Workload.on: the graph's own inputs are those tensors."""
        step, static = self._workload.on(given)
        return Graphed(step, 0, static), static

    def fresh(self, seed):
        new = self._workload.fresh(seed)
        for mine, value in zip(self._static.inputs + self._static.upstream, new.inputs + new.upstream, strict=True):
            if isinstance(mine, torch.Tensor):
                with torch.no_grad():
                    mine.copy_(value)
            elif mine != value:
                raise ValueError(f"get_inputs gave {mine!r}, which the graph keeps, and now gives {value!r}")
        return self._static

    def __call__(self, content):
        self._graph.replay()
        return self._result

    def names(self, content):
        return self._workload.names(content)


def _captured(graph, step):
    """The result of step(), captured into the graph. Raises what step raised, not what the capture's end says after it."""
    raised = []
    try:
        with torch.cuda.graph(graph):
            try:
                return step()
            except Exception as exception:
                raised.append(exception)
                raise
    except Exception as exception:
        raise (raised or [exception])[0] from None
