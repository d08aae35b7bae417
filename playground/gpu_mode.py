"""GPU MODE's competition problems in KernelBench's form, in which the judge takes them.

A problem is a folder as in the repository gpu-mode/reference-kernels: task.yml lists the files, tests and benchmarks. `read`
writes a file for each problem, whose constants are the arguments of generate_input. In a worker it uses `problem`.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import linecache
import math
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import _pytree

from playground.catalog import CatalogError, lines_of
from playground.modes import uninitialised_is_nan
from playground.subject import Case
from playground.suite import Pair, Suite
from playground.tensors import flatten

TASK, KINDS, VALUES = "task.yml", ("test", "benchmark"), int | float | str | list | dict | None
SOLUTIONS = ("submission.py", "solutions/*/*.py", "submissions/*.py")  # where a problem's folder has submissions of its own
ON_GPU_ONLY = re.compile(r"^\s*(?:import|from)\s+(triton|helion|cutlass|cuda|cupy|numba|tilelang)\b", re.MULTILINE)
IN_FLOAT64 = re.compile(r"^def ref_kernel\b(?:(?!^\w).)*(?:float64|\.double\()(?!(?:(?!^\w).)*float)", re.MULTILINE | re.DOTALL)
DRAWS = 1 << 16  # seeds: a problem that adds its seed to its values would lose them in a large one
PROBLEM = """from math import inf, nan
from playground import gpu_mode as of_gpu_mode
{constants}
Model, get_inputs, get_init_inputs, model_new_of, check_outputs = of_gpu_mode.problem({files!r}, {{{arguments}}}, {device!r})
"""
_kept = functools.cache(lambda text: tempfile.TemporaryDirectory(prefix="playground-gpu-mode-"))  # until this process ends


def problems(path):
    """Return the folders of problems: the path itself, or those below it; none where it has to do with no problem."""
    return [Path(path)] if Path(path, TASK).is_file() else [file.parent for file in sorted(Path(path).rglob(TASK))]


def read(folder, submissions, has_gpu, settings=None):
    """Return the Suite of a problem's folder, or of all below it: a pair for each submission and each test and benchmark.

    `submissions` are files, a folder in which each problem has one of its name, or None: those in the problem's folder.
    `settings` replace arguments of generate_input. Without a GPU nothing is timed, CUDA is judged at the smallest test, and
    what needs a GPU is skipped. Raises CatalogError; of several problems a faulty one costs its own pairs alone.
    """
    found, pairs = problems(folder), []
    for each in found:
        name = each.absolute().name if found == [Path(folder)] else each.relative_to(folder).as_posix()
        files = submissions or [file for pattern in SOLUTIONS for file in sorted(each.glob(pattern))]
        for file in sorted((files / name).glob("*.py")) if isinstance(files, Path) else map(Path, files):
            solution = file.relative_to(each) if file.is_relative_to(each) else Path(file.name)
            names = {"problem_name": name, "solution_name": solution.with_suffix("").as_posix()}
            try:
                pairs += _pairs(each, file, names, has_gpu, settings or {})
            except (CatalogError, OSError, UnicodeError) as complaint:
                if len(found) == 1:
                    raise CatalogError(str(complaint)) from None
                pairs.append(Pair(each / TASK, file, **names, broken=str(complaint)))
    if not pairs:
        raise CatalogError(f"{submissions or folder}: no submissions of {', '.join(each.name for each in found)} are there")
    return Suite(tuple(pairs))


def _pairs(folder, file, names, has_gpu, settings):
    task, text, pairs = _task(folder), file.read_text(encoding="utf-8"), []
    if unknown := [key for key in settings if not all(key in each for each in task["tests"] + task["benchmarks"])]:
        raise CatalogError(f"--set: {folder.name} has no {', '.join(unknown)}; it has: {', '.join(task['tests'][0])}")
    kinds = {kind: [each | settings for each in task[kind + "s"]] for kind in KINDS}
    known = dict.fromkeys(key for cases in kinds.values() for arguments in cases for key in arguments)
    constants = "\n".join(f"{key} = {kinds['test'][0].get(key, ...)!r}" for key in known)
    arguments, device = ", ".join(f"{key!r}: {key}" for key in known), "cuda" if has_gpu else "cpu"
    problem = PROBLEM.format(constants=constants, files=task["files"], arguments=arguments, device=device)
    names |= {"problem": Path(_kept(problem).name, f"{folder.absolute().name}.py"), "solution": file}
    names["problem"].write_text(problem, encoding="utf-8")
    case = {"ranking": str(task.get("ranking_by", "last")), "benchmarks": len(kinds["benchmark"])}
    if not has_gpu:
        if m := ON_GPU_ONLY.search(text):
            return [Pair(**names, settings=kinds["test"][0], skipped=f"it imports {m[1]}, whose kernels run on a GPU only")]
        sizes = [math.prod(n for key, n in given.items() if key != "seed" and type(n) is int) for given in kinds["test"]]
        kinds = {"test": [kinds["test"][sizes.index(min(sizes))]] if "__global__" in text else kinds["test"]}
    for kind, given in ((kind, given) for kind, cases in kinds.items() for given in cases):
        name = " ".join([kind, *(f"{key}={value}" for key, value in given.items() if key != "seed")])
        if kind == "benchmark" or all(pair.case.name != name for pair in pairs):  # another seed is no other test
            pairs.append(Pair(**names, settings=given, timed=kind == "benchmark", case=Case(kind=kind, name=name, **case)))
    return pairs


def _task(folder):
    """Return what task.yml says. Its "files" are {module: (path, text)}, but for the submission and what runs it."""
    try:
        yaml = importlib.import_module("yaml")
        task = yaml.safe_load((folder / TASK).read_text(encoding="utf-8"))
    except ImportError:
        raise CatalogError(f"{folder / TASK} needs PyYAML: python -m pip install PyYAML") from None
    except yaml.YAMLError as error:
        line, what = getattr(getattr(error, "problem_mark", None), "line", 0) + 1, getattr(error, "problem", error)
        raise CatalogError(f"{folder / TASK}:{line}: no YAML: {str(what).splitlines()[0]}") from None
    task = {"lang": "py", "multi_gpu": False} | (task if isinstance(task, dict) else {})
    for key, least in {"files": 1, "tests": 1, "benchmarks": 0}.items():
        task[key] = task.get(key) or []
        _expect(isinstance(task[key], list) and len(task[key]) >= least, folder, f"a list called `{key}`", task[key])
    is_ours = task["lang"] == "py" and not task["multi_gpu"]
    _expect(is_ours, folder, "a problem in Python for one GPU", {key: task[key] for key in ("lang", "multi_gpu")})
    for each in task["tests"] + task["benchmarks"]:
        is_right = isinstance(each, dict) and all(str(k).isidentifier() and isinstance(v, VALUES) for k, v in each.items())
        _expect(is_right, folder, "a test as name: value of generate_input's arguments", each)
    found, config = {}, task["config"] if isinstance(task.get("config"), dict) else {}
    for each in task["files"]:
        _expect(isinstance(each, dict) and {"name", "source"} <= each.keys(), folder, "a file as name and source", each)
        name, path = Path(str(each["name"])), (folder / str(each["source"])).resolve()
        if name.suffix == ".py" and name.name not in ("submission.py", config.get("main")):
            _expect(path.is_file(), folder, f"{each['source']}, which `files` names", "no such file")
            found[name.stem] = str(path), path.read_text(encoding="utf-8")
    _expect("reference" in found, folder, "reference.py among `files`", list(found))
    return task | {"files": found}


def _expect(is_right, folder, what, found):
    if not is_right:
        raise CatalogError(f"{folder / TASK}: expected {what}, got {found!r:.99}")


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

    The model's inputs are the tensors in `data`, floats of one byte as bytes, and the form of `data` as text. A tensor that
    generate_input leaves uninitialised is an output buffer: each call gets a new one. check_implementation may be missing.
    """
    _Files(files, device)
    reference = importlib.import_module("reference")
    if missing := [name for name in ("generate_input", "ref_kernel") if not hasattr(reference, name)]:
        raise CatalogError(f"{reference.__file__} does not define {', '.join(missing)}")
    given = {key: value for key, value in arguments.items() if value is not ...}
    try:
        inspect.signature(make := reference.generate_input).bind(**given)
    except TypeError as error:
        raise CatalogError(f"{_place(make)}generate_input: {error}; {TASK} gives {', '.join(given) or 'nothing'}") from None
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
