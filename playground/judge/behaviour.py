"""What a call changes and remembers, and when it works: what the judged process says, which could forge it."""

import copy
import gc
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from playground import tensors
from playground.judge.checks import BY_NAME
from playground.judge.global_state import changed, complaints_about_flags, flags, random_state

NO_STREAMS = "not run: only CUDA has streams"
ELEMENTS, STALE = 6, 3  # that are changed, one after the other; that may change without being seen
LATER_CALLS = 3  # after which an output is still its caller's; where the file keeps results' memory, after many more:
SECONDS_IN_A_RING, BYTES_IN_A_RING = 5.0, 1 << 30
TURNS = 3  # of each of two instances
FEW = 1 << 22  # elements, whose places in memory are worth counting
DELAY_CYCLES = 100_000_000  # about 50 ms on a GPU: much longer than a launch takes


class SideEffects:
    """Find the side effects of one call: make it before, ask `complaints` after. `model` is a module, `inputs` a list.

    Or a backward pass: `upstream` are the gradients of its outputs; ask `writes` after. Buffers that are not in `state`, the
    original's, are workspaces, which may be written; None: there are none.
    """

    def __init__(
        self, model: Any, inputs: list[Any], upstream: Sequence[torch.Tensor | None] = (), state: Collection[str] | None = None
    ) -> None:
        given = {f"input {i}": value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        given |= {f"the gradient of output {i}": value for i, value in enumerate(upstream) if value is not None}
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        buffers = {name: value.detach() for name, value in model.named_buffers() if state is None or name in state}
        self._names = {"inputs unchanged": [*given], "weights unchanged": [*parameters], "buffers unchanged": [*buffers]}
        self._tensors = given | parameters | buffers
        self._copies = {name: value.clone() for name, value in self._tensors.items()}
        self._versions = {name: value._version for name, value in self._tensors.items()}
        self._wants = {name: value.requires_grad for name, value in given.items()}
        self._flags, self._random = flags(), random_state()

    def complaints(self, outputs: list[torch.Tensor]) -> dict[str, str]:
        """Return {check: reason} of what the call should not have done."""
        reasons = {
            "random state": changed(self._random, random_state()),
            "memory of its own": self._shared(outputs),
            "an element's own memory": next(filter(None, map(overlap, outputs)), None),
            **{check: self._written(names) for check, names in self._names.items()},
        }
        of_flags = complaints_about_flags(self._flags, flags())
        return of_flags | {check: reason for check, reason in reasons.items() if reason}

    def writes(self) -> str | None:
        """Return one line on what was written to of all that the call was given; None where nothing was."""
        return self._written(self._tensors)

    def _written(self, names: Iterable[str]) -> str | None:
        for name in names:
            value = self._tensors[name]
            if not same_bits(value, self._copies[name]):
                return f"changes {name}"
            if value._version != self._versions[name]:
                return f"writes to {name} (its version counter went up)"
            if value.requires_grad != self._wants.get(name, value.requires_grad):
                return f"changes requires_grad of {name}"
        return None

    def _shared(self, outputs: list[torch.Tensor]) -> str | None:
        owners = {storage(value): name for name, value in self._tensors.items() if value.numel()}
        for output in outputs:
            if output.numel() and storage(output) in owners:
                return f"returns the memory of {owners[storage(output)]}"
        return None


def overlap(tensor: torch.Tensor) -> str | None:
    """Return what is wrong with a tensor that has several elements in one place of memory; None where it has not."""
    pairs = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in pairs if tensor.numel() else ():
        if stride <= reach and (stride == 0 or tensor.numel() > FEW or _count_of_places(pairs) < tensor.numel()):
            return f"returns a tensor with elements that share memory: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        reach += (size - 1) * stride
    return None


def _count_of_places(pairs: list[tuple[int, int]]) -> int:
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in pairs:
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return len(places.unique())


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal, NaNs of the same bits included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_complex or not a.dtype.is_floating_point:
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size(), torch.uint8)
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


@dataclass
class Trial:
    """What a circumstance led to: `outputs` of a call on the inputs called `of`, or why there are none."""

    outputs: list[Any] | None = None
    of: str = "first"
    complaint: str | None = None
    note: str | None = None


class StressTests:
    """Calls of a model on `first` and `second`, inputs of the same form on its device, under all sorts of circumstances."""

    def __init__(
        self,
        model: Any,
        first: list[Any],
        second: list[Any],
        device: torch.device,
        declared_deterministic: bool | None = None,
        another: Callable[[], Any] | None = None,
    ) -> None:
        """`another()` makes a second instance, whose weights are those that belong to `second`."""
        self._model, self._another = model, another
        self._first, self._second = first, second
        self._device, self._declared = device, declared_deterministic

    def run(self, name: str) -> "Trial":
        """Return the Trial of that name. Exceptions come through."""
        return getattr(self, f"_{BY_NAME[name].function}")()

    def _call(self, inputs: list[Any], model: Any = None) -> list[torch.Tensor]:
        tensors.seed_draws()
        with torch.no_grad():
            outputs = tensors.flatten((self._model if model is None else model)(*inputs))
        self._synchronize()
        return outputs

    @property
    def _changes_size(self) -> bool:
        shapes = [[value.shape for value in each if isinstance(value, torch.Tensor)] for each in (self._first, self._second)]
        return shapes[0] != shapes[1]

    def _new_content(self) -> Trial:
        held = copies(self._first)
        self._call(held)
        if self._changes_size:
            return Trial(self._call(copies(self._second)), of="second")
        _refill(held, self._second)
        outputs = self._call(held)
        seen = self._sees_one_element()
        return Trial(outputs, of="second", complaint=None if seen else "one element was changed, and the result is the old one")

    def _sees_one_element(self) -> bool:
        """Whether a change of one element in the same memory is seen, if in new memory. A few times: bits may differ."""
        stale = 0
        for _ in range(ELEMENTS):
            held = copies(self._first)
            before = self._call(held)
            if _change_an_element(held, self._second):
                try:
                    if not same(before, self._call(held)):
                        return True
                    matters = not same(before, self._call(copies(held)))
                except Exception:  # such as where a matrix is no longer definite
                    return True
                stale += matters and same(before, self._call(copies(self._first)))
                if stale == STALE:
                    return False
        return True

    def _same_content(self) -> Trial:
        """The same numbers once more must cost as many operators as new ones do."""
        self._call(copies(self._first))
        new = [other_content(value) for value in self._first]
        first, kept = self._counted(new)
        given = {storage(value) for value in new if isinstance(value, torch.Tensor)}  # is the caller's, also in views
        earlier = {storage(output) for output in kept if output.numel()} - given  # while `kept` holds it
        for inputs in (new, copies(new)):
            again, outputs = self._counted(inputs)
            if earlier & {storage(output) for output in outputs if output.numel()}:
                return Trial(complaint="returns the memory of an earlier output")
            if again < first:
                return Trial(complaint=f"runs {again} operators instead of {first}")
        return Trial(self._call(copies(self._first)))

    def _counted(self, inputs: list[Any]) -> tuple[int, list[torch.Tensor]]:
        with _Operators() as operators, _Functions() as functions:
            outputs = self._call(inputs)
        return operators.calls + functions.calls, outputs

    def _earlier_output(self) -> Trial:
        """An output that the caller still holds must not change in later calls, until a ring of buffers comes round."""
        first = self._call(copies(self._first))
        # Place in memory -> (an output, what it held, after how many others).
        held = {storage(output): (output, output.clone(), 0) for output in first if output.numel()}
        self._call(copies(self._second))  # the last result may be kept: the one before is looked at
        kept_by_file = self._keeps_results()
        latest = time.monotonic() + (SECONDS_IN_A_RING if kept_by_file else 0)
        most = BYTES_IN_A_RING // (2 * sum(output.nbytes for output in first) + 1)
        count, outputs = 0, first
        while count <= LATER_CALLS or (time.monotonic() < latest and count < most):
            for output in filter(torch.Tensor.numel, outputs):
                earlier, content, number = held.setdefault(storage(output), (output, output.clone(), count))
                if not same_bits(earlier, content):
                    after = "a later call" if count - number <= LATER_CALLS else f"the call after {count - number} others"
                    return Trial(first, complaint=f"{after} overwrites what an earlier one returned")
            inputs = secrets.choice((self._first, self._second)) if count else self._second
            outputs = self._call(copies(inputs))
            count += 1
        return Trial(first, note=f"keeps the memory of its results; {count} were apart" if kept_by_file else None)

    def _keeps_results(self) -> bool:
        outputs = [output for output in self._call(copies(self._second)) if output.numel()]
        memory = [output.untyped_storage() for output in outputs]
        if not all(each.resizable() for each in memory):
            return True
        watched = [StorageWeakRef(each) for each in memory]
        del outputs, memory
        self._call(copies(self._second))  # so that what keeps the last result alone has another
        gc.collect()
        return not all(each.expired() for each in watched)

    def _two_instances(self, of: str = "first") -> Trial:
        """Two models of the class with different weights, called in turn; one of their results, all of which are held."""
        if self._another is None:
            return Trial(note="not run: the weights are not the original's")
        models = {"first": (self._model, self._first), "second": (self._another(), self._second)}
        held: dict[str, list[Any]] = {name: [] for name in models}
        for _ in range(TURNS):
            for name, (model, content) in models.items():
                tensors.seed_draws()
                with torch.no_grad():
                    held[name].append(tensors.flatten(model(*copies(content))))
        self._synchronize()
        return Trial(secrets.choice(held[of]), of=of)

    def _second_instance(self) -> Trial:
        return self._two_instances("second")

    def _double(self) -> Trial:
        """In float64, where parameters and inputs are in float32; they are themselves again afterwards."""
        floats = [value for value in [*self._model.parameters(), *self._first] if tensors.differentiable(value)]
        if {value.dtype for value in floats} != {torch.float32}:
            return Trial(note="not run: not all is in float32")
        kept = [(value, value.data) for value in self._model.parameters()]
        buffers = [(module, dict(module._buffers)) for module in self._model.modules()]  # which double() replaces
        try:
            self._model.double()
            outputs = self._call([value.double() if tensors.differentiable(value) else value for value in copies(self._first)])
        finally:
            for value, data in kept:
                value.data = data
            for module, before in buffers:
                module._buffers.update(before)
        narrow = [output.dtype for output in outputs if tensors.differentiable(output) and output.dtype != torch.float64]
        outputs = [value.to(torch.complex64) if value.dtype == torch.complex128 else value for value in outputs]
        return Trial(tensors.in_float32(outputs), complaint=f"gives {narrow[0]} for torch.float64" if narrow else None)

    def _run_to_run(self) -> Trial:
        first, again = self._call(copies(self._first)), self._call(copies(self._first))
        if same(first, again) or self._declared is False:
            return Trial(again)
        declared = "the class says deterministic = True" if self._declared else "it does not say deterministic = False"
        return Trial(again, complaint=f"bits differ from run to run, and {declared}")

    def _out_dtype(self) -> Trial:
        in_float32, self._model.out_dtype = self._call(copies(self._first)), None
        rounded = self._call(copies(self._first))
        self._model.out_dtype = torch.float32
        expected = [each.to(other.dtype) for each, other in zip(in_float32, rounded, strict=True)]
        wide = next((each.dtype for each in rounded if tensors.differentiable(each) and each.dtype.itemsize > 2), None)
        if wide or not same(rounded, expected):
            return Trial(complaint=f"gives {wide}" if wide else "the result is not the float32 one, rounded")
        return Trial(in_float32)

    def _inference_mode(self) -> Trial:
        tensors.seed_draws()
        try:
            with torch.inference_mode():
                outputs = tensors.flatten(self._model(*self._first))
            return Trial([output.clone() for output in outputs])
        finally:
            _forget_inference(self._model)

    def _stream_order(self) -> Trial:
        """Make inputs late on the default stream: a stream of the variant's own that waits for nobody misses them."""
        return self._delayed(torch.cuda.default_stream) if self._device.type == "cuda" else Trial(note=NO_STREAMS)

    def _side_stream(self) -> Trial:
        return self._delayed(torch.cuda.Stream) if self._device.type == "cuda" else Trial(note=NO_STREAMS)

    def _delayed(self, stream: Callable[[], Any]) -> Trial:
        held = _without_content(self._first)
        side = stream()
        tensors.seed_draws()
        self._synchronize()
        with torch.no_grad(), torch.cuda.stream(side):
            torch.cuda._sleep(DELAY_CYCLES)
            _refill(held, self._first)
            outputs = [output.clone() for output in tensors.flatten(self._model(*held))]
        self._synchronize()
        return Trial(outputs)

    def _second_device(self) -> Trial:
        """Inputs that are late on a device that is not the current one: only who works on that device sees them."""
        if self._device.type != "cuda" or torch.cuda.device_count() < 2:
            return Trial(note="not run: there is no second GPU")
        other = torch.device("cuda", 1)
        try:
            self._model.to(other)
            content = tensors.to(self._first, other)
            held = _without_content(content)
            with torch.no_grad():
                self._model(*held)
            torch.cuda.synchronize()
            torch.cuda.synchronize(other)
            with torch.cuda.device(other):
                torch.cuda._sleep(DELAY_CYCLES)
            _refill(held, content)
            tensors.seed_draws()
            with torch.no_grad():
                outputs = tensors.flatten(self._model(*held))
            torch.cuda.synchronize()
            torch.cuda.synchronize(other)
        finally:
            self._model.to(self._device)
        wrong = [output for output in outputs if output.device != other]
        return Trial(outputs, complaint=f"gives a result on {wrong[0].device} for inputs on {other}" if wrong else None)

    def _cuda_graph(self) -> Trial:
        if self._device.type != "cuda":
            return Trial(note="not run: only CUDA has graphs")
        if self._changes_size:
            return Trial(note="not run: the sizes of the inputs change from draw to draw")
        held = copies(self._first)
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._model(*held)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = tensors.flatten(self._model(*held))
            _refill(held, self._second)
            tensors.seed_draws()
            graph.replay()
        self._synchronize()
        return Trial([output.clone() for output in outputs], of="second")

    def _compiled(self) -> Trial:
        """Without a code generator: what is looked for are breaks in the graph and wrong fake kernels."""
        torch._dynamo.reset()
        compiled = torch.compile(self._model, fullgraph=True, backend="aot_eager")
        return Trial(self._call(self._first, compiled))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _forget_inference(model: Any) -> None:
    """What a recurrent model keeps of a call in inference mode is of no use to the next one outside of it."""
    for module in model.modules():
        for kept in (vars(module), dict(module._buffers)):  # PyTorch's scripts cannot be changed by a dict
            for name, value in list(kept.items()):
                if isinstance(value, torch.Tensor) and value.is_inference():
                    setattr(module, name, value.clone())


class _Counting:
    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))

    __torch_dispatch__ = __torch_function__


class _Functions(_Counting, TorchFunctionMode):
    """Counts every call of a function of torch."""


class _Operators(_Counting, TorchDispatchMode):
    """Counts every operator that is dispatched."""


def copies(inputs: list[Any]) -> list[Any]:
    """Return a list of inputs in other memory."""
    return [value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) for value in inputs]


def _without_content(inputs: list[Any]) -> list[Any]:
    return [torch.full_like(v, float("nan")) if tensors.differentiable(v) else v for v in copies(inputs)]


def other_content(value: Any) -> Any:
    """Return something of a value's form that no call has seen."""
    if tensors.differentiable(value):
        return 0.75 * value
    return value.flip(0) if isinstance(value, torch.Tensor) and value.dim() else value


def _change_an_element(held: list[Any], content: list[Any]) -> bool:
    """Give one element of a tensor of numbers, anywhere, its value in `content`. Whether that is another one."""
    numbers = [i for i, value in enumerate(held) if isinstance(value, torch.Tensor) and tensors.differentiable(value)]
    numbers = [i for i in numbers if held[i].numel() and held[i].shape == content[i].shape]  # a call may have changed it
    if not numbers:
        return False
    i = secrets.choice(numbers)
    index = tuple(secrets.randbelow(size) for size in held[i].shape)
    changes = not same_bits(held[i][index], content[i][index])
    held[i][index] = content[i][index]
    return changes


def same(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists of tensors have the same bits."""
    return len(results) == len(others) and all(map(same_bits, results, others))


def _refill(held: list[Any], content: list[Any]) -> None:
    for i, value in enumerate(content):
        if isinstance(value, torch.Tensor):
            held[i].detach().copy_(value)
        else:
            held[i] = value
