"""Tensors of a model: how they are made, copied, moved, flattened, and carried from process to process."""

import contextlib
import copy
import json
import math
import numbers
import os
import random
import re
import shutil
import struct
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from playground import subject, untrusted
from playground.room import NoRoom, is_full, no_room_in

PLACES = {"cuda": "cuda", "cpu": "cpu", "emulator": "cpu"}  # where a variant runs -> the torch device of its tensors


LARGE = 1 << 30  # bytes of a file that is worth mapping
BLOCK = 1 << 26  # bytes of results that are read or written at once: fresh memory for all takes longer than to copy them
FULL = 1 << 16  # bytes that are left of a file system where a file did not fit


@contextlib.contextmanager
def _writing(path):
    """Raises NoRoom where its block cannot write the file for want of room."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's says nothing of the reason
        folder = Path(path).parent
        if is_full(error) or (isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < FULL):
            raise NoRoom(no_room_in(folder)) from None
        raise


def save(content, path):
    """Write a dict or list of tensors (moved to the CPU first), for `load`. Raises NoRoom."""
    with _writing(path):
        torch.save(torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), content), path)


def load(path, mapped=False):
    """Read what `save` wrote in a trusted process; `mapped`: large files share memory until they are written to."""
    return torch.load(path, weights_only=True, mmap=mapped and Path(path).stat().st_size >= LARGE)


# What a variant's process hands back: eight bytes that say how long the header is; the header, in JSON, with "detached" and, in
# "tensors", [name, dtype, shape] of each, [name, None, None] where there is none; then the tensors' bytes.
LENGTH = struct.Struct("<Q")  # what untrusted.erase writes over
LONGEST_HEADER = 1 << 20
# Memory of a quantised type that a judged process names is no tensor, and ends who looks at it; parts of bytes do not compute.
WHOLE = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float(8_\w+|16|32|64)|complex\d+)")
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype) and WHOLE.fullmatch(str(each))}
MOST_DIMENSIONS = 64  # of which PyTorch computes
OUTPUT, GRADIENT = "output ", "gradient "  # begin the names


class InternalLimit(Exception):
    """What the judge cannot judge, whoever is right: neither the problem nor a variant is at fault."""


class NotTensors(Exception):
    """A file of a variant's that does not hold what was asked for."""


@dataclass
class Results:
    """`outputs`, a list of tensors; `gradients` by name, None where there is none; `detached`, and `form` of the original's."""

    outputs: list
    gradients: dict = field(default_factory=dict)
    detached: bool = False
    form: str | None = None


def save_results(results, path):
    """Write a Results for `load_results`. Raises TypeError for tensors that are not dense, and NoRoom."""
    named = {f"{OUTPUT}{i}": value for i, value in enumerate(results.outputs)}
    named |= {GRADIENT + name: value for name, value in results.gradients.items()}
    listed, contents = [], []
    for name, value in named.items():
        if value is None:
            listed.append([name, None, None])
            continue
        if value.layout != torch.strided:
            raise TypeError(f"{name} is {value.layout}, expected a dense tensor: return its to_dense()")
        listed.append([name, str(value.dtype), list(value.shape)])
        contents.append(value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8))
    header = json.dumps({"detached": results.detached, "tensors": listed}).encode()
    with _writing(path), os.fdopen(untrusted.opened(path, os.O_RDWR, or_new=True), "r+b") as file:
        file.write(LENGTH.pack(len(header)) + header)
        for block in (block for content in contents for block in content.split(BLOCK)):
            file.write(_pinned(len(block)).copy_(block).numpy() if block.is_cuda else block.numpy())
        file.truncate()


def load_results(path, most, device="cpu"):
    """Return the Results in an untrusted file of up to `most` bytes, on the device. Raises NotTensors, OutOfMemoryError."""
    try:
        with os.fdopen(untrusted.opened(path, most=most), "rb") as file:
            return _read_results(file, device)
    except torch.OutOfMemoryError:
        raise
    except untrusted.Refused as refused:
        raise NotTensors(f"the file of results {refused}") from None
    except OSError as error:
        raise NotTensors(f"the file of results cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise NotTensors(f"the file of results holds something that is no tensor: {type(error).__name__}") from error


def _read_results(file, device):
    left = os.fstat(file.fileno()).st_size  # what is added from now on is not read
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > LONGEST_HEADER:
        raise ValueError(length)
    header = json.loads(file.read(length))
    outputs, gradients = [], {}
    for name, kind, shape in header["tensors"]:
        value = None if kind is None else _read_tensor(file, DTYPES[kind], shape, left, device)
        left -= 0 if value is None else value.nbytes
        if name == f"{OUTPUT}{len(outputs)}" and value is not None:
            outputs.append(value)
        elif name.startswith(GRADIENT):
            gradients[name.removeprefix(GRADIENT)] = value
        else:
            raise ValueError(name)
    return Results(outputs, gradients, header["detached"] is True)


def _read_tensor(file, dtype, shape, most, device):
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(shape)
    if math.prod(shape) * dtype.itemsize > most:
        raise ValueError(shape)
    value = torch.empty(shape, dtype=dtype, device=device)
    for part in value.view(-1).view(torch.uint8).split(BLOCK):
        read = _pinned(len(part)) if part.is_cuda else part
        if file.readinto(memoryview(read.numpy())) != len(part):
            raise ValueError(shape)
        part.copy_(read)
    return value


def _pinned(length):
    """Bytes of host memory that a GPU reaches by itself: to other memory it copies at 1 GB/s on some machines instead of 50."""
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)


class _GpuMemory:
    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


def bytes_at(address, count):
    """Return a tensor of `count` bytes of GPU memory, which somebody else keeps."""
    return torch.as_tensor(_GpuMemory(address, count), device="cuda")


def on_host(value):
    """Return the tensor in host memory."""
    if not value.is_cuda or value.layout != torch.strided or value.nbytes <= BLOCK:
        return value.cpu()
    host = torch.empty(value.shape, dtype=value.dtype)
    parts = (part.contiguous().view(-1).view(torch.uint8).split(BLOCK) for part in (value, host))
    for there, here in zip(*parts, strict=True):
        here.copy_(_pinned(len(there)).copy_(there))
    return host


def to(inputs, device):
    """Return the list with its tensors on the device; what is not a tensor stays as it is."""
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs]


_draws = 20261124  # the seed of what a model draws in a call, for dropout
HALF = dict(zip(subject.HALF, (torch.float16, torch.bfloat16), strict=True))


def in_precision(problem, precision):
    """Return the problem's module itself; inputs and models are in a precision of HALF from now on, as they are for None."""
    if precision:
        original, problem.converted_to = problem.get_inputs, HALF[precision]
        problem.get_inputs = lambda: [each.to(HALF[precision]) if differentiable(each) else each for each in original()]
    return problem


def manual_seed(seed):
    """Seed the generators of the host and of all GPUs, as torch.manual_seed does, without 0.15 ms for each kind of device."""
    if torch.backends.cuda.is_built() and not torch.cuda.is_initialized():
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_draws(seed=None):
    """Have a model's next call draw the random numbers that every judged call draws; a `seed` is of the outer clock's call."""
    manual_seed(_draws if seed is None else seed)


@contextlib.contextmanager
def drawing_from(seed):
    """Have `seed_draws` begin with this seed meanwhile."""
    global _draws
    before, _draws = _draws, seed
    try:
        yield
    finally:
        _draws = before


def made_on(device, make):
    """Return what make() gives, its tensors on the device, or else on the CPU, in every process. Raises OutOfMemoryError."""
    try:
        with torch.device(device):
            return make()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return make()


def make_inputs(problem, seed):
    """Return inputs_of(problem), after every generator was seeded: torch's, NumPy's and Python's."""
    random.seed(seed)
    np.random.seed(seed)
    manual_seed(seed)
    return inputs_of(problem)


def inputs_of(problem):
    """Return a list of what get_inputs gives, NumPy's numbers as Python's. Raises TypeError for what cannot be passed on."""
    inputs = problem.get_inputs()
    if not isinstance(inputs, list | tuple):
        raise TypeError(f"get_inputs must return a list of forward's arguments, got {type(inputs).__name__}")
    require_judgeable(inputs)
    return [_argument(i, value) for i, value in enumerate(inputs)]


def _argument(i, value):
    if isinstance(value, np.generic):
        return value.item()
    inside = torch.utils._pytree.tree_leaves(value)
    if isinstance(value, np.ndarray) or (not isinstance(value, torch.Tensor) and any(map(torch.is_tensor, inside))):
        what = f"a {type(value).__name__}{'' if isinstance(value, np.ndarray) else ' of tensors'}"
        how = f"but its element {i} is {what}; give each tensor an argument of its own"
        raise TypeError(f"get_inputs must return tensors, numbers and the like, {how}")
    return value.to(torch.get_default_device()) if isinstance(value, torch.Tensor) else value


def make_model(problem, cls, seed, device="cpu"):
    """Return an instance of `cls` with the problem's init inputs, on the device, seeded before either."""
    torch.manual_seed(seed)
    init_inputs = to(problem.get_init_inputs(), device)
    torch.manual_seed(seed)
    made = cls(*init_inputs)
    if not isinstance(made, torch.nn.Module):
        raise TypeError(f"{cls.__name__} must make a torch.nn.Module, got {type(made).__name__}")
    return made.to(device, getattr(problem, "converted_to", None))


def copy_model(model):
    """Return a deep copy whose functions use its own layers; what was computed from parameters is a constant."""
    attributes = [leaf for module in model.modules() for leaf in torch.utils._pytree.tree_leaves(vars(module))]
    functions, memo = _closures(attributes), {}
    for function in functions:
        cells = tuple(types.CellType() for _ in function.__closure__)
        own = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        own.__kwdefaults__ = function.__kwdefaults__
        memo[id(function)] = own  # what deepcopy takes for its copy
    for tensor in attributes:
        if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:  # deepcopy refuses those, such as an old weight_norm's
            memo[id(tensor)] = tensor.detach().clone()
    copied = copy.deepcopy(model, memo)
    for function in functions:
        for cell, own in zip(function.__closure__, memo[id(function)].__closure__, strict=True):
            if cell != types.CellType():  # a variable that was never set
                own.cell_contents = copy.deepcopy(cell.cell_contents, memo) if _held(cell) else cell.cell_contents
    return copied


def _closures(attributes):
    """The functions among them that have variables of their own, and those that such functions hold."""
    found, waiting = [], list(attributes)
    while waiting:
        value = waiting.pop()
        if isinstance(value, types.FunctionType) and value.__closure__ and value not in found:
            found.append(value)
            waiting += [leaf for cell in value.__closure__ for leaf in _held(cell)]
    return found


def _held(cell):
    """The layers, tensors and functions in a variable of a closure; what else is in it, such as a module of Python's, stays."""
    leaves = torch.utils._pytree.tree_leaves(cell.cell_contents) if cell != types.CellType() else []
    return [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module | torch.Tensor | types.FunctionType)]


def differentiable(tensor):
    """Return whether a value is a tensor of numbers that can vary and have a gradient; floats of one byte hardly compute."""
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1


# Held here, since a file may put others in their places.
_type, _Tensor, _Parameter = type, torch.Tensor, torch.nn.Parameter
_NUMBERS = (bool, int, float, complex)
_READING = "__iter__", "__getitem__", "__len__", "__getattribute__", "__getattr__", "keys", "values", "items", "get"
# {class of collections: how pytree flattens it, or None} of those that there were when known_classes_only was called.
_known = None


def known_classes_only():
    """Have `flatten` refuse collections of classes made from now on that override reading, and may compute late."""
    global _known
    _known = {_type(None): None}
    nodes = filter(lambda kind: isinstance(kind, type), torch.utils._pytree.SUPPORTED_NODES)
    waiting = [tuple, list, dict, *nodes]
    while waiting:
        kind = waiting.pop()
        if kind not in _known:
            _known[kind] = torch.utils._pytree.SUPPORTED_NODES.get(kind)
            waiting += kind.__subclasses__()


def flatten(outputs):
    """Return the tensors of a result: one, a tuple, list or dict, in key order; numbers become tensors. Raises TypeError."""
    leaves = list(_leaves(outputs))
    if not any(_type(leaf) in (_Tensor, _Parameter) for leaf in leaves):
        raise TypeError(f"forward must return a tensor or a collection of tensors, got {_type(outputs).__name__}")
    return [leaf if _type(leaf) in (_Tensor, _Parameter) else _from_number(leaf) for leaf in leaves]


def require_judgeable(values):
    """Raise InternalLimit for a tensor among the values that the judge cannot compare: sparse, nested, quantised, float4."""
    for value in values:
        if _type(value) not in (_Tensor, _Parameter):
            continue
        kind = "that are nested" if value.is_nested else None
        kind = kind or (None if value.layout == torch.strided else f"in the layout {value.layout}")
        kind = kind or (f"of the type {value.dtype}" if value.is_quantized or "float4" in str(value.dtype) else None)
        if kind:
            raise InternalLimit(f"internal limit: the judge cannot compare tensors {kind}; expected dense ones of whole bytes")


def form(outputs):
    """Return how a model's result is made up: "(tensor, {'mean': tensor})"; a number counts as a tensor, a list as a tuple."""
    kind, parts = _parts(outputs)
    if kind is dict:
        return "{" + ", ".join(f"{key!r}: {form(value)}" for key, value in parts) + "}"
    if kind is tuple:
        return "(" + ", ".join(form(value) for _, value in parts) + ("," if len(parts) == 1 else "") + ")"
    return "tensor" if isinstance(outputs, torch.Tensor | numbers.Number) else _type(outputs).__name__


def require_plain(outputs):
    """Raise TypeError for what flatten refuses: tensors and collections that may compute when read, after the clock stopped."""
    for _ in _leaves(outputs):
        pass


def _parts(value):
    kind = _type(value)
    mro = _type.mro(kind) if kind is not _type else []
    base = next((each for each in mro if each in (dict, list, tuple)), None)
    if base is None:
        return None, []
    if kind is not base and _known is not None and kind not in _known:
        own = [name for each in mro[: mro.index(base)] for name in _READING if name in _type.__dict__["__dict__"].__get__(each)]
        if own:
            raise TypeError(
                f"forward must return plain tuples, lists and dicts, got a {kind.__name__}, a {base.__name__} with its own "
                f"{own[0]}: return what it computes to"
            )
    if base is dict:
        return dict, [(key, dict.__getitem__(value, key)) for key in sorted(dict.keys(value), key=str)]
    return tuple, [(None, each) for each in base.__iter__(value)]


def _leaves(outputs):
    kind = _type(outputs)
    if kind is _Tensor or kind is _Parameter or kind in _NUMBERS:
        yield outputs
        return
    of, parts = _parts(outputs)
    if of:
        for _, part in parts:
            yield from _leaves(part)
    elif issubclass(kind, _Tensor):
        raise TypeError(f"forward must return plain tensors, got a {kind.__name__}; return what it computes to")
    elif issubclass(kind, numbers.Number):
        if _known is not None and not issubclass(kind, np.generic):
            raise TypeError(f"forward must return plain numbers, got a {kind.__name__}; return what it computes to")
        yield outputs
    elif kind in torch.utils._pytree.SUPPORTED_NODES:
        node = torch.utils._pytree.SUPPORTED_NODES[kind] if _known is None else _known.get(kind)
        if node is None:
            raise TypeError(f"forward must return plain tuples, lists and dicts, got a {kind.__name__}; return what it holds")
        for part in node.flatten_fn(outputs)[0]:
            yield from _leaves(part)


def _from_number(value):
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def as_real(tensor):
    """Return a complex tensor's parts along a last dimension, one-byte floats in float32, long unsigned integers in int64."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:  # which hardly compute
        return tensor.float()
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.long()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_steps(tensor):
    """Return whether a tensor's values are steps to which something was rounded: integers, bools, or floats of one byte."""
    return tensor.dtype.itemsize == 1 if tensor.is_floating_point() else not tensor.is_complex()


def in_float32(outputs):
    """Return the list with what is in a floating-point type of another size converted."""
    return [value.float() if differentiable(value) else value for value in outputs]


def gradients(model, inputs, upstream, wanted_inputs, before_backward=lambda outputs: None):
    """Run one forward and backward pass; between them `before_backward(outputs)` is called. Raises what they raise.

    `upstream` holds a gradient for each output or None. Returns (outputs, {name, input0, ...: gradient or None}).
    """
    inputs = [value.detach().requires_grad_() if i in wanted_inputs else value for i, value in enumerate(inputs)]
    names = [name for name, p in model.named_parameters() if p.requires_grad] + [f"input{i}" for i in wanted_inputs]
    leaves = [p for p in model.parameters() if p.requires_grad] + [inputs[i] for i in wanted_inputs]
    outputs = flatten(model(*inputs))
    pairs = [(o, g) for o, g in zip(outputs, upstream, strict=False) if g is not None and o.requires_grad]
    if not pairs:
        return outputs, dict.fromkeys(names)
    before_backward(outputs)
    found = torch.autograd.grad([o for o, _ in pairs], leaves, [g.to(o) for o, g in pairs], allow_unused=True)
    return outputs, dict(zip(names, found, strict=True))
