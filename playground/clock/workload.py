"""What one timed call does: forward, or forward and backward, on content that no call has seen before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from playground import tensors
from playground.clock import WARM_UP_CALLS


@dataclass
class Content:
    """The inputs of one call, and the gradients of its outputs (empty where nothing is differentiated)."""

    inputs: list[Any]
    upstream: list[torch.Tensor | None]


Kept = Sequence[dict[str, Any] | None]  # see Workload.on
Turn = Callable[..., list[Any]]


def fresh_inputs(problem: Any, seed: int, device: torch.device) -> list[Any]:
    """Return what the problem's get_inputs gives after every generator was seeded, made on the device where that works: the
    same in every process on the same kind of device.
    """
    return tensors.to(tensors.made_on(device, lambda: tensors.make_inputs(problem, seed)), device)


def upstream_for(outputs: Sequence[torch.Tensor], seed: int, device: torch.device) -> list[torch.Tensor | None]:
    """Return a gradient for each floating-point output, None for others; it follows from the seed and the shapes."""
    tensors.manual_seed(seed + 1)
    return [
        torch.rand(output.shape, dtype=output.dtype, device=device) if tensors.differentiable(output) else None
        for output in outputs
    ]


class Workload:
    """One step of a model, one of MODES: `content = workload.fresh(seed)`, which is not timed, then `workload(content)`.

    `memory_format` "channels_last" converts 4-d and 5-d inputs beforehand, `dtype` those of floats.
    """

    def __init__(
        self, problem: Any, model: Any, mode: str, device: torch.device, memory_format: str | None = None, dtype: Any = None
    ) -> None:
        self._problem, self._model, self.mode, self.device = problem, model, mode, device
        self._memory_format, self._dtype = memory_format, dtype
        self._outputs: list[torch.Tensor] | None = None
        self._kept: Content | None = None

    def fresh(self, seed: int) -> Content:
        """Return content that follows from the seed."""
        inputs = [self._prepared(value) for value in fresh_inputs(self._problem, seed, self.device)]
        if self.mode == "forward":
            content = Content(inputs, [])
        else:
            if self._outputs is None:
                self._outputs = [output.detach().to("meta") for output in tensors.flatten(self._model(*inputs))]
            content = Content(inputs, upstream_for(self._outputs, seed, self.device))
        tensors.seed_draws()
        return content

    def on(self, given: Sequence[torch.Tensor | None], kept: Kept) -> Content:
        """Return the Content of a call on tensors of somebody else's: inputs, then upstream gradients. What is None there is in
        `kept`, if it can be said in JSON, {"is": value}, or else what get_inputs gives.
        """
        own = self._kept = self._kept or self.fresh(0)
        count, values = len(own.inputs), []
        for i, (tensor, number) in enumerate(zip(given, kept, strict=True)):
            if tensor is not None:
                values.append(self._prepared(tensor) if i < count else tensor)
            else:
                values.append(number["is"] if number else own.inputs[i] if i < count else None)
        return Content(values[:count], values[count:])

    def turn(self, given: Sequence[Sequence[torch.Tensor | None]], kept: Sequence[Kept]) -> Turn:
        """Return run(draws, most=None), which makes a call on each of `given`, see `on`, or on the first `most`, and returns
        their results. Call k draws its random numbers from draws[k], unless draws is None.
        """
        contents = [self.on(*each) for each in zip(given, kept, strict=True)]

        def run(draws: Sequence[int] | None, most: int | None = None) -> list[Any]:
            results = []
            for k, content in enumerate(contents[:most]):
                if draws:
                    tensors.seed_draws(draws[k])
                results.append(self(content, with_outputs=True))
            return results

        return run

    def state(self) -> list[torch.Tensor]:
        """Return copies of the model's parameters and buffers."""
        return [value.detach().clone() for value in self._stateful()]

    def restore(self, state: Sequence[torch.Tensor]) -> None:
        """Have the model's parameters and buffers be as they were when `state` gave this; of an empty list none is changed."""
        with torch.no_grad():
            for value, was in zip(self._stateful(), state, strict=False):
                value.copy_(was)

    def _stateful(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def _prepared(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if self._dtype and value.is_floating_point():
            value = value.to(self._dtype)
        if self._memory_format == "channels_last" and value.dim() in (4, 5):
            value = value.to(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)
        return value.detach().requires_grad_(self.mode == "weights_and_input" and tensors.differentiable(value))

    def __call__(self, content: Content, with_outputs: bool = False) -> Any:
        """Return the outputs as the model gives them, or the gradients in the order of `names`; those behind the outputs
        `with_outputs`: what a step need not compute for its gradients is due under the outer clock, too.
        """
        if self.mode == "forward":
            with torch.no_grad():
                return self._model(*content.inputs)
        outputs = tensors.flatten(self._model(*content.inputs))
        pairs = [(o, g) for o, g in zip(outputs, content.upstream, strict=True) if o.requires_grad]
        wanted = [p for p in self._model.parameters() if p.requires_grad]
        if self.mode == "weights_and_input":
            wanted += [value for value in content.inputs if tensors.differentiable(value)]
        gradients = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        return [*(output.detach() for output in outputs), *gradients] if with_outputs else gradients

    def names(self, content: Content) -> list[str] | None:
        """Return the names of gradients: the parameters', then input0, ..., as of tensors.gradients; None for outputs."""
        if self.mode == "forward":
            return None
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        if self.mode == "weights_and_input":
            names += [f"input{i}" for i, value in enumerate(content.inputs) if tensors.differentiable(value)]
        return names


class Graphed:
    """The step of a workload in a CUDA graph, forward and backward in one.

    `fresh` writes new content into the graph's own inputs and upstream gradients, a call replays the graph, and its result lies
    in the graph's memory until the next call. Raises whatever the capture raises, as for a model that waits for the device.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self.state, self.restore, self.names = workload.state, workload.restore, workload.names
        self._static = workload.fresh(seed)
        self._graph, self._result = captured(lambda: workload(self._static), WARM_UP_CALLS)

    def turn(self, given: Sequence[Sequence[torch.Tensor | None]], kept: Sequence[Kept]) -> Turn:
        """Return what Workload.turn does. All calls are in one graph, whose inputs are those tensors."""
        run, most = self._workload.turn(given, kept), len(given)
        graph, results = captured(lambda: run(None), 1)

        def replay(draws: Sequence[int] | None, most: int = most) -> list[Any]:
            if draws:
                tensors.seed_draws(draws[0])
            graph.replay()
            return results[:most]

        return replay

    def fresh(self, seed: int) -> Content:
        new = self._workload.fresh(seed)
        for mine, value in zip(self._static.inputs + self._static.upstream, new.inputs + new.upstream, strict=True):
            if isinstance(mine, torch.Tensor):
                with torch.no_grad():
                    mine.copy_(value)
            elif mine != value:
                raise ValueError(f"get_inputs gave {mine!r}, which the graph keeps, and now gives {value!r}")
        return self._static

    def __call__(self, content: Content) -> Any:
        self._graph.replay()
        return self._result


def captured(step: Callable[[], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return (a CUDA graph of step(), its result there), after so many calls to warm up, on a stream of its own. Raises what
    step raised, not what the capture's end says after it.
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
