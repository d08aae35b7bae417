"""What one timed call does: forward, or forward and backward, on content that no call has seen before."""

from dataclasses import dataclass

import torch

from playground import tensors
from playground.clock.steps import WARM_UP_CALLS


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
    tensors.manual_seed(seed + 1)
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
        self._outputs = self._kept = None

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

    def on(self, given, kept):
        """Return the Content of a call on tensors of somebody else's: inputs, then upstream gradients.

        What is None there is in `kept`, if it can be said in JSON, {"is": value}, or else what get_inputs gives.
        """
        own = self._kept = self._kept or self.fresh(0)
        if len(given) < len(own.inputs) or len(kept) != len(given):
            raise ValueError(f"expected the inputs of {len(own.inputs)} arguments, got {len(given)}")
        values = []
        for i, (tensor, number) in enumerate(zip(given, kept, strict=True)):
            if tensor is not None:
                values.append(self._prepared(tensor) if i < len(own.inputs) else tensor)
            else:
                values.append(number["is"] if number else own.inputs[i] if i < len(own.inputs) else None)
        return Content(values[: len(own.inputs)], values[len(own.inputs) :])

    def turn(self, given, kept):
        """Return run(draws, most=None), which makes a call on each of `given`, see `on`, and returns their results.

        Call k draws its random numbers from draws[k], unless draws is None. Of all calls the first `most` are made.
        """
        contents = [self.on(*each) for each in zip(given, kept, strict=True)]

        def run(draws, most=None):
            results = []
            for k, content in enumerate(contents[:most]):
                if draws:
                    tensors.seed_draws(draws[k])
                results.append(self.with_outputs(content))
            return results

        return run

    def state(self):
        """Return copies of the model's parameters and buffers."""
        return [value.detach().clone() for value in self._stateful()]

    def restore(self, state):
        """Have the model's parameters and buffers be as they were when `state` gave this; of an empty list none is changed."""
        with torch.no_grad():
            for value, was in zip(self._stateful(), state, strict=False):
                value.copy_(was)

    def _stateful(self):
        return [*self._model.parameters(), *self._model.buffers()]

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

    def __init__(self, workload, seed):
        self._workload = workload
        self.state, self.restore, self.names = workload.state, workload.restore, workload.names
        self._static = workload.fresh(seed)
        self._graph, self._result = captured(lambda: workload(self._static), WARM_UP_CALLS)

    def turn(self, given, kept):
        """Return what Workload.turn does. All calls are in one graph, whose inputs are those tensors."""
        run, most = self._workload.turn(given, kept), len(given)
        graph, results = captured(lambda: run(None), 1)

        def replay(draws, most=most):
            if draws:
                tensors.seed_draws(draws[0])
            graph.replay()
            return results[:most]

        return replay

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


def captured(step, calls):
    """Return (a CUDA graph of step(), its result there), after so many calls to warm up.

    Raises what step raised, not what the capture's end says after it.
    """
    side, graph, raised = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(calls):
            step()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            try:
                result = step()
            except Exception as exception:
                raised.append(exception)
                raise
    except Exception as exception:
        raise (raised or [exception])[0] from None
    return graph, result
