"""Whether a variant's own code runs, and whether the result comes from it."""

import contextlib
import ctypes
import functools
import gc
import inspect
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from playground import untrusted
from playground.judge import foreign

_generator = torch.Generator().manual_seed(untrusted.new_seed(63))


class WrongArguments(TypeError):
    """A function that a file has built is called with other arguments than it takes."""


def misfit(error: TypeError) -> WrongArguments | None:
    """Return WrongArguments for what pybind11 raises of a call; None for another TypeError."""
    match = re.match(
        r"(\w+)\(\): incompatible function arguments\..*?\n +1\. \((.*?)\) -> .*?\n\nInvoked with: ?(.*)", str(error), re.DOTALL
    )
    if not match or "\n    2. " in str(error):  # of several overloads nobody knows which was meant
        return None
    name, taken, given = match[1], _split(match[2]), _split(match[3])
    if len(taken) != len(given):
        return WrongArguments(f"{name} takes {len(taken)} argument{'s' * (len(taken) != 1)}, got {len(given)}")
    return WrongArguments(f"{name} takes ({match[2]}), got ({', '.join(map(_kind_of_repr, given))})")


def _split(text: str) -> list[str]:
    """The parts of a list of arguments between the commas that stand in no bracket and no quotes."""
    parts, depth = [""] if text.strip() else [], 0
    for token in re.findall(r"'(?:\\.|[^'])*'|.", text, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _kind_of_repr(text: str) -> str:
    """What a value's repr says it is: tensor, 'a text', 1.5."""
    return "Tensor" if text.startswith(("tensor(", "Parameter containing")) else " ".join(text.split())[:40]


class OwnCode:
    """The functions and operators that the variant built or opened, while they are called from Python.

    `calls` counts them, `handed_memory` those that are given tensors or addresses; `running` are under way. While `spoiling`,
    numbers that they return are changed, integers only `with_integers`, and counted in `spoiled`. While `contiguous`, they get
    contiguous tensors; `strided` says which was the first that was none.
    """

    def __init__(self) -> None:
        self.calls = self.handed_memory = self.running = 0
        self.operators: set[str] = set()
        self.modules: set[str] = set()  # names such as "namespace::operator", and of modules
        self.spoiling = False
        self.with_integers = False
        self.spoiled = 0
        self.contiguous = False
        self.strided: str | None = None
        self._copies: list[Tensor] = []  # live as long as code may read them by their addresses
        self.names: dict[Any, str] = {}  # function of a module -> its name there
        foreign.install()
        foreign.watch_cffi(self.run_foreign)
        _enter_operators()

    def wrap_module(self, module: Any) -> None:
        """Watch the functions of an extension's Python module, and those of a library that cffi has compiled into it."""
        self.modules.add(module.__name__)
        for name, function in list(vars(module).items()):
            if isinstance(function, foreign.Library) or foreign.is_library_of_cffi(function):
                setattr(module, name, foreign.Library(function, self.run_foreign))
            elif callable(function) and not (name.startswith("__") or isinstance(function, type)):
                setattr(module, name, self._watched(name, function))

    def _watched(self, name: str, function: Any) -> Any:
        """The function in whose place the calls are counted, by this OwnCode alone and once."""
        if getattr(getattr(function, "__wrapped__", None), "counted_by", None) is self:  # the emulator looks around it
            return function
        function = getattr(function, "of_own_code", function)
        self.names[function] = name

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.run(function, args, kwargs)

        vars(watched).update(of_own_code=function, counted_by=self)
        return watched

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of the variant's own that takes tensors."""
        return self._run(function, args, kwargs, bool(_tensors((args, kwargs))))

    def run_foreign(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call one of ctypes or cffi, which is given addresses."""
        return self._run(function, args, kwargs, False)

    def _run(self, function: Any, args: Any, kwargs: Any, takes_tensors: bool) -> Any:
        self.calls += 1
        self.handed_memory += takes_tensors or foreign.gives_memory([*args, *kwargs.values()])
        if self.contiguous:
            args = [self._made_contiguous(function, position, value) for position, value in enumerate(args, 1)]
            kwargs = {name: self._made_contiguous(function, name, value) for name, value in kwargs.items()}
        self.running += 1
        try:
            result = function(*args, **kwargs)
        except TypeError as error:
            raise misfit(error) or error from None
        finally:
            self.running -= 1
        if self.spoiling and isinstance(result, int | float if self.with_integers else float):
            self.spoiled += 1
            away = 10 * _drawn(()).item()
            return not result if isinstance(result, bool) else type(result)(result + away + math.copysign(1, away))
        return result

    def _made_contiguous(self, function: Any, position: int | str, value: Any) -> Any:
        """The argument, or a contiguous copy in the place of a tensor, or of the address of one, that is not."""
        given = value if isinstance(value, Tensor) else foreign.strided_at(value)
        if given is None or given.layout != torch.strided or given.is_contiguous():
            return value
        what = f"argument {position} of {self.names.get(function) or getattr(function, '__name__', 'its operator')}"
        self.strided = self.strided or f"{what} (shape {tuple(given.shape)}, strides {given.stride()})"
        self._copies.append(given.contiguous())
        if given is value:
            return self._copies[-1]
        address = self._copies[-1].data_ptr()
        return address if isinstance(value, int) else type(value)(address)

    def hears_all(self) -> bool:
        """Return whether Python sees each call that hands memory to its code: none is made by C++, as of an autograd node."""
        return not self.operators and not self.modules

    @contextlib.contextmanager
    def counted(self) -> Iterator["OwnCode"]:
        """Count `handed_memory` from 0 while this lasts; operators, for which PyTorch is put in another mode, do not count."""
        self.handed_memory = 0
        with foreign.watched(self.run_foreign):
            yield self

    @contextlib.contextmanager
    def watched(self, spoiling: bool = False, with_integers: bool = False, contiguous: bool = False) -> Iterator["OwnCode"]:
        """See operators and functions of ctypes, too, while this lasts. (Functions of modules and of cffi always are.)"""
        self.spoiling, self.with_integers, self.spoiled = spoiling, with_integers, 0
        self.contiguous, self.strided = contiguous, None
        try:
            with foreign.watched(self.run_foreign), _Operators(self):
                yield self
        finally:
            self.spoiling = self.contiguous = False
            self._copies = []


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """For what the judge does with tensors inside of a variant's call."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class _Operators(TorchFunctionMode):
    """Sees calls of torch.ops from Python, those without a kernel of their own for each device included."""

    def __init__(self, own: OwnCode) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator_name(function) in self._own.operators:
            return self._own.run(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class WrittenBetween(TorchDispatchMode):
    """Finds what is written between two of PyTorch's operators, whoever launches it and however; `count` is how often.

    While `spoiling`, that is overwritten with random numbers; tensors made of Python's numbers only `with_data`. `reached` are
    the operators that the functions of `own` call. Tensors that live when it is made hold what they should.
    """

    active: "WrittenBetween | None" = None  # the one that operators in Python enter, too

    def __init__(self, own: OwnCode) -> None:
        super().__init__()
        self.count, self.spoiling, self.with_data = 0, False, False
        self.reached: set[str] = set()
        self._own = own
        self._seen: dict[Any, tuple[int, ...]] = {}
        self._keep([value for value in gc.get_objects() if type(value) in (Tensor, torch.nn.Parameter)])

    def __enter__(self) -> Any:
        WrittenBetween.active = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self not in _get_current_dispatch_mode_stack():
            WrittenBetween.active = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        # Of from_numpy the memory belongs to others.
        is_of_numbers = function is torch.ops.aten.lift_fresh.default and args[0].untyped_storage().resizable()
        looked_at = self.check((args, kwargs)) if self.with_data or not is_of_numbers else set()
        if name in self._own.operators:
            return self._within(function, args, kwargs)
        if self._own.running and _computes(function):
            self.reached.add(name.replace("aten::", "at::"))
        result = function(*args, **kwargs)
        changed = (args, kwargs, result) if function._schema.is_mutable else result
        if name in _entered:
            self.check(changed)
        else:
            self._keep(changed, set() if function._schema.is_mutable else looked_at)
        return result

    def _within(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator in C++ in such a way that those that it calls are seen."""
        device = next((value.device.type for value in _tensors((args, kwargs))), "cpu")
        key = getattr(torch._C.DispatchKey, device.upper())
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(function.name(), key):
            return function(*args, **kwargs)
        with self:
            return function._op_dk(key, *args, **kwargs)

    def check(self, tree: Any) -> Collection[Any]:
        """Find the tensors in it that something else than an operator has written. Returns the places of all in it."""
        with _undisturbed():
            values = {_place(value): value for value in _with_memory(tree)}
            for place, value in values.items():
                if self._seen.get(place) != (found := _fingerprint(value)):
                    self.count += 1
                    if self.spoiling:
                        _spoil(_whole(value, value.dtype))
                        found = _fingerprint(value)
                    self._seen[place] = found
        return values.keys()

    def _keep(self, tree: Any, but: Collection[Any] = ()) -> None:
        """Take what the tensors in it hold, but for those at some places, for right."""
        with _undisturbed():
            values = {_place(value): value for value in _with_memory(tree)}
            self._seen |= {place: _fingerprint(value) for place, value in values.items() if place not in but}


_entered: set[str] = set()  # the names of operators in Python whose calls are seen


def _enter_operators() -> None:
    """Have operators that a file registers in Python run under WrittenBetween.active, which would not see into them."""
    plain = inspect.unwrap(torch.library.Library.impl)

    @functools.wraps(plain)
    def impl(library: Any, operator: Any, function: Any, key: str = "", **kwargs: Any) -> Any:
        is_kernel = callable(function) and function is not torch.library.fallthrough_kernel and key != "Meta"
        if not is_kernel or library.ns in OF_PYTORCH:
            return plain(library, operator, function, key, **kwargs)
        name = str(operator).replace(".", "::", 1) if isinstance(operator, torch._ops.OpOverload) else operator
        _entered.add(f"{library.ns}::{name.split('::')[-1].split('.')[0]}")

        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            mode = WrittenBetween.active
            with mode if mode and mode not in _get_current_dispatch_mode_stack() else contextlib.nullcontext():
                return function(*args, **kwargs)

        return plain(library, operator, entered, key, **kwargs)

    torch.library.Library.impl = impl  # type: ignore[method-assign, assignment]


OF_PYTORCH = ("aten", "prim", "prims")
# Operators that make, copy or look at memory.
MOVES = re.compile(
    r"(new_)?(empty|zeros|ones|full)|.*_like$|clone|.*copy|contiguous|to$|fill|zero_|resize|set_|item|_local_scalar|lift"
)


def _computes(function: Any) -> bool:
    """Whether an operator of PyTorch's computes something."""
    infos = [output.alias_info for output in function._schema.returns]
    is_view = any(info is not None and not info.is_write for info in infos)
    space, name = function._schema.name.split("::")
    return space in OF_PYTORCH and not is_view and not MOVES.match(name)


def _with_memory(tree: Any) -> list[Tensor]:
    kinds = Tensor, torch.nn.Parameter
    plain = (v for v in _tensors(tree) if type(v) in kinds and v.layout == torch.strided)
    return [v for v in plain if v.device.type != "meta" and v.numel()]


def _place(tensor: Tensor) -> tuple[Any, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _fingerprint(tensor: Tensor) -> tuple[int, ...]:
    """A few numbers of all of a tensor's storage, of which one is another where anything in it is, but for rare luck."""
    words = _whole(tensor, torch.uint8)
    words = words.view(torch.int32) if len(words) % 4 == 0 else words
    sums = [part.sum(dtype=torch.int64) for part in (words, words[: len(words) // 2], words[::3])]
    return tuple(torch.stack(sums).tolist())


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All of a tensor's storage, in one dimension."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def operator_name(function: Any) -> str | None:
    """Return 'namespace::operator' of an operator or of one of its overloads; None of anything else."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    return function._qualified_op_name if isinstance(function, torch._ops.OpOverloadPacket) else None


def all_operators() -> set[str]:
    """Return the names of all operators that are registered in this process, without their overloads."""
    return {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _drawn(shape: Any) -> Tensor:
    """Normal numbers, of a generator that `seed_draws` does not set."""
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=_generator)


def _spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.copy_(10 * _drawn(tensor.shape))
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextlib.contextmanager
def kernels_launched() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that holds, afterwards, [{"name", "calls", "microseconds"}] of the kernels launched, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    found: list[dict[str, Any]] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield found
        torch.cuda.synchronize()
    for each in profiler.key_averages():
        if each.self_device_time_total > 0 and not each.key.startswith(("Memcpy", "Memset")):
            found.append({"name": each.key, "calls": each.count, "microseconds": float(each.self_device_time_total)})
    found.sort(key=lambda kernel: -kernel["microseconds"])


def own_share(kernels: list[dict[str, Any]], names: set[str]) -> float | None:
    """Return the part of the GPU's time that kernels of these names take; None where nothing ran."""
    total = sum(kernel["microseconds"] for kernel in kernels)
    own = sum(kernel["microseconds"] for kernel in kernels if set(re.findall(r"\w+", kernel["name"])) & names)
    return own / total if total else None


def pending_cuda_error() -> str | None:
    """Return the text of an error that the CUDA runtime still holds, as of a launch nobody looked at; None without one."""
    runtime = _cuda_runtime()
    if runtime is None:
        return None
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    error = runtime.cudaGetLastError()
    return runtime.cudaGetErrorString(error).decode() if error else None


@functools.cache
def _cuda_runtime() -> Any:
    maps = Path("/proc/self/maps")
    paths = sorted(set(re.findall(r"/\S*libcudart\.so\S*", maps.read_text()))) if maps.exists() else []
    return ctypes.CDLL(paths[0]) if paths else None
