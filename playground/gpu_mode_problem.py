"""What a worker makes of a problem of GPU MODE's: the model and its inputs, for the file that gpu_mode.read has written."""

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import linecache
import math
import re
import sys

import torch
from torch.utils import _pytree

from playground.catalog import CatalogError, lines_of
from playground.modes import uninitialised_is_nan
from playground.tensors import flatten

IN_FLOAT64 = re.compile(r"^def ref_kernel\b(?:(?!^\w).)*(?:float64|\.double\()(?!(?:(?!^\w).)*float)", re.MULTILINE | re.DOTALL)
DRAWS = 1 << 16  # seeds: a problem that adds its seed to its values would lose them in a large one


class _Files(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that come along; elsewhere than on a GPU "cuda" is "cpu" in them."""

    def __init__(self, files, device):
        self._files, self._device = files, device
        sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if type(finder) is not _Files)]
        for name in files:
            sys.modules.pop(name, None)

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self, origin=self._files[name][0]) if name in self._files else None

    def exec_module(self, module):
        module.__file__, text = self._files[module.__name__]
        lines = [f"{line}\n" for line in lines_of(text)]
        linecache.cache[module.__file__] = len(text), None, lines, module.__file__  # as in a sandbox
        text = re.sub(r"(['\"])cuda(:\d+)?\1", r"\1cpu\1", text) if self._device == "cpu" else text
        exec(compile(text, module.__file__, "exec"), vars(module))


def problem(files, arguments, device):
    """Return (Model, get_inputs, get_init_inputs, model_new_of, check_outputs). Raises CatalogError for what does not fit.

    Inputs are the tensors in `data`, one-byte floats as bytes, and its form as text; uninitialised ones are output buffers, new
    for each call.
    """
    _Files(files, device)
    reference = importlib.import_module("reference")
    if missing := [name for name in ("generate_input", "ref_kernel") if not hasattr(reference, name)]:
        raise CatalogError(f"{reference.__file__} does not define {', '.join(missing)}")
    given = {key: value for key, value in arguments.items() if value is not ...}
    try:
        inspect.signature(make := reference.generate_input).bind(**given)
    except TypeError as error:
        raise CatalogError(f"{_place(make)}generate_input: {error}; task.yml gives {', '.join(given) or 'nothing'}") from None
    narrows, checks = IN_FLOAT64.search(files["reference"][1]), hasattr(reference, "check_implementation")

    def get_inputs():
        seed = given.get("seed")
        drawn = {"seed": seed + int(torch.randint(DRAWS, (), device="cpu"))} if type(seed) is int else {}
        with uninitialised_is_nan():
            form = _form(make(**given | drawn), t := [])
        if not t:
            raise CatalogError(f"{_place(make)}no tensor is made that has values, so nothing can be judged")
        like = next((i for i, value in enumerate(t) if value.is_floating_point()), 0)
        return [*t, form.replace("\0", f"t[{like}], {t[like].dtype}")]

    def model_new_of(solution):
        if not callable(kernel := getattr(solution, "custom_kernel", None)):
            raise CatalogError(f"{solution.__file__} does not define custom_kernel(data)")
        return _model(kernel, "custom_kernel", narrows)

    def check_outputs(inputs, outputs):
        form = _pytree.tree_structure(reference.ref_kernel(data(inputs)))
        output = _pytree.tree_unflatten(outputs, form) if form.num_leaves == len(outputs) else tuple(outputs)
        found = reference.check_implementation(data(inputs), output)
        good, why = found if isinstance(found, tuple) else (not found, found) if isinstance(found, str) else (found, "")
        return None if good else " ".join(str(why).split())[:200] or "no reason given"

    return _model(reference.ref_kernel, "ref_kernel", narrows), get_inputs, list, model_new_of, checks and check_outputs


def _model(function, name, narrows):
    """Return the class of a model that calls the function on `data`. Where it `narrows`, float64 becomes float32."""

    class Model(torch.nn.Module):
        def forward(self, *given):
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():  # no gradient is asked for
                result = function(data(given))
            try:
                flatten(result)
            except TypeError as complaint:
                raise CatalogError(_place(function) + str(complaint).replace("forward", name, 1)) from None
            if not narrows or any(getattr(value, "dtype", None) == torch.float64 for value in given):
                return result
            return _pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == torch.float64 else t, result)

    return Model


def _place(function):
    """Return 'FILE:LINE: ', where a function of Python's begins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""


def _form(value, t):
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype.itemsize == 1:
            return f"{_form(value.view(torch.uint8), t)}.view({value.dtype})"
        unset = value != value if value.is_floating_point() else value == _LARGEST.get(value.dtype)
        if value.numel() and torch.as_tensor(unset).all():
            return f"new({tuple(value.shape)}, {value.stride()}, {value.dtype}, \0)"
        t.append(value.detach())
        return f"t[{len(t) - 1}]"
    if kind in (tuple, list, torch.Size):
        return f"{'list' if kind is list else 'tuple'}(({''.join(_form(each, t) + ', ' for each in value)}))"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_form(each, t)}' for key, each in value.items())}}}"
    if value is None or isinstance(value, bool | int | float | str | set | torch.dtype | torch.device):
        return repr(value)
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return f"made(sys.modules[{kind.__module__!r}].{kind.__qualname__}, {_form(dict(vars(value)), t)})"
    place = _place(sys.modules["reference"].generate_input)
    raise CatalogError(f"{place}generate_input gives a {kind.__name__}: expected tensors, numbers, texts and collections")


def data(given):
    """Return the `data` of a call with these inputs of the model."""
    return _builder(given[-1])(given)


def _new(shape, stride, dtype, like, was):
    """Return an output buffer, in the precision to which the inputs were converted, as float64 for the reference."""
    dtype = like.dtype if dtype.is_floating_point and like.dtype != was else dtype
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


_LARGEST = {kind: torch.iinfo(kind).max for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}
_NAMES = {"torch": torch, "sys": sys, "new": _new, "device": torch.device, "inf": math.inf, "nan": math.nan}
_NAMES["made"] = lambda kind, fields: vars(made := object.__new__(kind)).update(fields) or made
_builder = functools.cache(lambda form: eval(f"lambda t: {form}", _NAMES))
