"""How much memory a judgement takes, from shapes alone: it is known before anything is computed."""

import math
import time
from dataclasses import dataclass

import torch
from torch.utils import _pytree

from playground import catalog, tensors
from playground.judge.precision import Uncompiled
from playground.judge.sample import LEAST, MOST

GIB = 1 << 30
OWN_PROBES, REPEATED = 6, 8  # of the problem's own size; those that are repeated there for a variant that takes no other
TIMED = 3  # further references of that size, for timed calls
PROCESSES = 4  # referee, candidate, baselines, control
HOST_BYTES = {"cuda": 3 * GIB // 2, "cpu": GIB // 2, "emulator": GIB // 2}  # of a process that has loaded torch
DEVICE_BYTES = {"cuda": 5 * GIB // 8, "cpu": 0, "emulator": 0}  # of a CUDA context
UNKNOWN = 4  # times its inputs and parameters are the results of a model that does not run on shapes
SECONDS = 5.0  # of a processor, that a model may take on shapes: a recurrent one takes every step


@dataclass(frozen=True)
class Footprint:
    """Bytes of a problem in its own precision; `results` are those of all its operators together."""

    inputs: int
    parameters: int
    outputs: int
    results: int

    def of_judgement(self, place, share=1.0):
        """Return {"host", "files", "device"}: the bytes that a judgement takes which compares a share of all results.

        Host: the probes' files, three times the inputs of the one that is made, those of the baselines, the outputs as the
        candidate and the referee have them, the weights; of what is compared, the float64 reference with its masks for each
        probe, and for the present one what the precision permits. Device: the referee's float64 with all that a backward needs;
        the others take less, and not at the same time. Where only a part is compared, each process draws the inputs, on the
        device.
        """
        in_part = share < 1.0
        own = OWN_PROBES + (0 if in_part else REPEATED)
        files = (0 if in_part else own * self.inputs) + 2 * self.outputs
        whole = PROCESSES * HOST_BYTES[place] + files + 13.5 * self.parameters
        if not (in_part and place == "cuda"):
            whole += 5 * self.inputs + 2 * self.outputs
        compared = (own + TIMED) * 2.5 * self.outputs + 8 * self.outputs + 9.5 * self.inputs
        computed = 5 * self.inputs + 7 * self.outputs + 8 * self.parameters + 4 * self.results + PROCESSES * DEVICE_BYTES[place]
        host, on_gpu = int(whole + share * compared), place == "cuda"
        return {"host": host if on_gpu else host + computed, "files": files, "device": computed if on_gpu else 0}

    def of_baselines(self, place):
        """Return the same for PyTorch's ways to run the original, a judgement's processes counted there."""
        computed = 3 * self.inputs + 2 * (self.parameters + self.outputs + self.results)
        return {"host": 0 if place == "cuda" else computed, "files": 0, "device": computed if place == "cuda" else 0}

    def of_call(self, place):
        """Return the same for one call of a variant that was just built."""
        bytes_of_call = self.inputs + self.parameters + self.outputs
        on_device = bytes_of_call + DEVICE_BYTES[place] if place == "cuda" else 0
        return {"host": 2 * bytes_of_call + HOST_BYTES[place], "files": 0, "device": on_device}

    def share_for(self, place, host, most=math.inf):
        """Return the share of all results for which so many bytes of host memory, and the time for `most` bytes of one, do."""
        largest = max(self.inputs, self.outputs, self.parameters)
        if largest > most:
            return min(self.share_for(place, host), max(LEAST, min(MOST, most / largest)))
        if self.of_judgement(place)["host"] <= host:
            return 1.0
        none, nearly_all = (self.of_judgement(place, share)["host"] for share in (0.0, MOST))
        return min(MOST, max(LEAST, MOST * (host - none) / (nearly_all - none)))


def size_up(problem, settings, place, precision=None):
    """Return the fields of the Footprint of the problem in a file, before anything of it is computed: a worker's request."""
    module = tensors.in_precision(catalog.load_problem(problem, settings), precision)
    return vars(measure(module, by_running=place == "cuda"))  # elsewhere one is judged at a time


def measure(problem, by_running=True):
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

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._latest = time.process_time() + SECONDS

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if time.process_time() > self._latest:
            raise TimeoutError
        result = function(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in _pytree.tree_leaves((args, kwargs))}
        self.bytes += _bytes(leaf for leaf in _pytree.tree_leaves(result) if _memory(leaf) not in given)
        return result


def _memory(value):
    """What a tensor and its views have in common."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _bytes(values):
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
