"""The Footprint of a problem, by its shapes alone."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree

from playground import catalog, tensors
from playground.judge.footprint import Footprint
from playground.judge.precision import Uncompiled

UNKNOWN = 4  # times its inputs and parameters are the results of a model that does not run on shapes
SECONDS = 5.0  # of a processor, that a model may take on shapes: a recurrent one takes every step


def size_up(problem: Any, settings: dict[str, Any], place: str, precision: str | None = None) -> dict[str, Any]:
    """Return the fields of the Footprint of the problem in a file, before anything of it is computed: a worker's request."""
    module = tensors.in_precision(catalog.load_problem(problem, settings), precision)
    return vars(measure(module, by_running=place == "cuda"))  # elsewhere one is judged at a time


def measure(problem: Any, by_running: bool = True) -> Footprint:
    """Return the Footprint of a problem's module. Nothing is computed, unless its inputs can be made in no other way.

    Running the model on shapes imports torch._dynamo, for two seconds; without, outputs and results are estimated.
    """
    try:
        with torch.device("meta"):
            inputs = tensors.make_inputs(problem, 0)
    except Exception:  # of the file's own: it asks for values, or names a device
        inputs = tensors.make_inputs(problem, 0)
    given, parameters = _bytes(inputs), 0
    try:
        with torch.device("meta"), torch.no_grad():
            model = tensors.make_model(problem, problem.Model, 0, "meta")
            parameters = _bytes((*model.parameters(), *model.buffers()))
            if by_running:
                with _Results() as results:
                    outputs = _pytree.tree_leaves(model(*tensors.to(inputs, "meta")))
                return Footprint(given, parameters, _bytes(outputs), results.bytes)
    except Exception:  # it asks for values, or for something that there is not for shapes
        pass
    return Footprint(given, parameters, given, UNKNOWN * (given + parameters))


class _Results(Uncompiled):
    """Adds up the bytes of all that operators give. Raises TimeoutError."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._latest = time.process_time() + SECONDS

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.process_time() > self._latest:
            raise TimeoutError
        result = function(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in _pytree.tree_leaves((args, kwargs))}
        self.bytes += _bytes(leaf for leaf in _pytree.tree_leaves(result) if _memory(leaf) not in given)
        return result


def _memory(value: Any) -> Any:
    """What a tensor and its views have in common."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
