"""GPU MODE's competition problems in KernelBench's form, in which the judge takes them.

A problem is a folder as in the repository gpu-mode/reference-kernels: task.yml lists the files, tests and benchmarks. `read`
writes a file for each problem, whose constants are the arguments of generate_input, and one for each submission: its own text,
so that its line numbers stay, and a ModelNew. In a worker these files use `problem`, `data` and `finish`.
"""

import ast
import contextlib
import functools
import importlib.abc
import importlib.util
import math
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import _pytree

from playground.catalog import CatalogError
from playground.suite import Pair, Suite
from playground.tensors import uninitialised_is_nan

TASK, KINDS = "task.yml", ("test", "benchmark")
SOLUTIONS = ("submission.py", "solutions/*/*.py", "submissions/*.py")  # where a problem's folder has submissions of its own
ON_GPU_ONLY = re.compile(r"^\s*(?:import|from)\s+(triton|helion|cutlass|cuda|cupy|numba|tilelang)\b", re.MULTILINE)
IN_FLOAT64 = re.compile(r"^def ref_kernel\b(?:(?!^\w).)*(?:float64|\.double\()(?!(?:(?!^\w).)*float)", re.MULTILINE | re.DOTALL)
_folder = functools.cache(lambda name, text: tempfile.TemporaryDirectory(prefix="playground-gpu-mode-"))
DRAWS = 1 << 16  # seeds: a problem that adds its seed to its values would lose them in a large one
PROBLEM = """from playground.gpu_mode import problem
{constants}
Model, get_inputs, get_init_inputs, check_outputs = problem({files!r}, {{{arguments}}}, {device!r})
"""
MODEL_NEW = """

class ModelNew(__import__("torch").nn.Module):  # added by playground.gpu_mode
    def forward(self, *given, playground=__import__("playground.gpu_mode").gpu_mode):
        return playground.finish(custom_kernel(playground.data(given)), given)
"""


def problems(path):
    """Return the folders of problems: the path itself, or those below it; none where it has to do with no problem."""
    found = [file.parent for file in sorted(Path(path).rglob(TASK))]
    return [Path(path)] if Path(path) in found else found


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
    """Return the pairs of one submission."""
    task, text, pairs = _task(folder), file.read_text(encoding="utf-8"), []
    kinds = {kind: [_arguments(each, folder, settings) for each in task.get(kind + "s") or []] for kind in KINDS}
    known = dict.fromkeys(key for cases in kinds.values() for arguments in cases for key in arguments)
    constants = "\n".join(f"{key} = {kinds['test'][0].get(key, ...)!r}" for key in known)
    arguments, device = ", ".join(f"{key!r}: {key}" for key in known), "cuda" if has_gpu else "cpu"
    problem = PROBLEM.format(constants=constants, files=_files(folder, task), arguments=arguments, device=device)
    names |= {"problem": _kept(f"{folder.name}.py", problem), "solution": _kept(file.name, text + MODEL_NEW)}
    case = {"ranking": task.get("ranking_by", "last"), "benchmarks": len(kinds["benchmark"])}
    if not has_gpu:
        if module := ON_GPU_ONLY.search(text):
            why = f"it imports {module[1]}, whose kernels run on a GPU only"
            return [Pair(**names, settings=kinds["test"][0], skipped=why)]
        sizes = [math.prod(n for key, n in given.items() if key != "seed" and type(n) is int) for given in kinds["test"]]
        kinds = {"test": [kinds["test"][sizes.index(min(sizes))]] if "__global__" in text else kinds["test"]}
    for kind, given in ((kind, given) for kind, cases in kinds.items() for given in cases):
        name = " ".join([kind, *(f"{key}={value}" for key, value in given.items() if key != "seed")])
        if kind == "benchmark" or all(pair.case["name"] != name for pair in pairs):  # another seed is no other test
            pairs.append(Pair(**names, settings=given, timed=kind == "benchmark", case=case | {"kind": kind, "name": name}))
    return pairs


def _task(folder):
    """Return what task.yml says."""
    try:
        import yaml
    except ImportError:
        raise CatalogError(f"{folder / TASK} needs PyYAML: python -m pip install -r requirements-gpu-mode.txt") from None
    try:
        task = yaml.safe_load((folder / TASK).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CatalogError(f"{folder / TASK} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(task, dict) or not all(isinstance(task.get(key), list) and task[key] for key in ("files", "tests")):
        raise CatalogError(f"{folder / TASK}: expected `files` and `tests`, which are lists")
    if task.get("lang", "py") != "py" or task.get("multi_gpu"):
        what = "takes several GPUs" if task.get("multi_gpu") else f"is in {task['lang']}"
        raise CatalogError(f"{folder / TASK}: the problem {what}; expected one in Python for one GPU")
    return task


def _arguments(case, folder, settings):
    if not isinstance(case, dict) or not all(isinstance(key, str) and key.isidentifier() for key in case):
        raise CatalogError(f"{folder / TASK}: expected a test as name: value of generate_input's arguments, got {case!r}")
    if unknown := [key for key in settings if key not in case]:
        raise CatalogError(f"--set: {folder.name} has no argument called {', '.join(unknown)}; it has: {', '.join(case)}")
    return case | settings


def _files(folder, task):
    """Return {module: (path, text)} of the Python files that come along, but for the submission and what runs it."""
    sources = {str(each.get("name")): str(each.get("source")) for each in task["files"] if isinstance(each, dict)}
    left_out = "submission.py", (task.get("config") or {}).get("main")
    paths = {Path(name): (folder / source).resolve() for name, source in sources.items() if name not in left_out}
    found = {name.stem: (str(path), path.read_text(encoding="utf-8")) for name, path in paths.items() if name.suffix == ".py"}
    if "reference" not in found:
        raise CatalogError(f"{folder / TASK}: `files` has no reference.py")
    return found


def _kept(name, text):
    """Return the path of a file with that text, which is there until this process ends."""
    path = Path(_folder(name, text).name) / name
    path.write_text(text, encoding="utf-8")
    return path


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
        tree = ast.parse(text, module.__file__)
        for node in ast.walk(tree) if self._device == "cpu" else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = re.sub(r"^cuda(:\d+)?$", "cpu", node.value)
        exec(compile(tree, module.__file__, "exec"), vars(module))


def problem(files, arguments, device):
    """Return (Model, get_inputs, get_init_inputs, check_outputs); the last returns what check_implementation complains of.

    The model's inputs are the tensors in `data`, floats of one byte as bytes, and the form of `data` as text. A tensor that
    generate_input leaves uninitialised is an output buffer: each call gets a new one.
    """
    _Files(files, device)
    reference = importlib.import_module("reference")
    if missing := [name for name in ("generate_input", "ref_kernel") if not hasattr(reference, name)]:
        raise CatalogError(f"{reference.__file__} does not define {', '.join(missing)}")
    global finish
    finish = _narrowed if IN_FLOAT64.search(files["reference"][1]) else lambda result, given: result

    class Model(torch.nn.Module):
        def forward(self, *given):
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():  # no gradient is asked for
                return finish(reference.ref_kernel(data(given)), given)

    def get_inputs():
        given = {key: value for key, value in arguments.items() if value is not ...}
        if "seed" in given:
            given["seed"] += int(torch.randint(DRAWS, (), device="cpu"))
        t = []
        with uninitialised_is_nan():
            form = _form(reference.generate_input(**given), t)
        if not t:
            raise TypeError("generate_input makes no tensor that has values, so there is nothing to judge by")
        like = next((i for i, value in enumerate(t) if value.is_floating_point()), 0)
        return [*t, form.replace("\0", f"t[{like}], {t[like].dtype}")]

    def check_outputs(inputs, outputs):
        form = _pytree.tree_structure(reference.ref_kernel(data(inputs)))
        output = _pytree.tree_unflatten(outputs, form) if form.num_leaves == len(outputs) else tuple(outputs)
        found = reference.check_implementation(data(inputs), output)
        good, why = found if isinstance(found, tuple) else (not found, found) if isinstance(found, str) else (found, "")
        return None if good else " ".join(str(why).split())[:200] or "no reason given"

    return Model, get_inputs, list, check_outputs


def _narrowed(result, given):
    """Return float32 for a result in float64 of inputs that are in less: a reference may be more exact than is asked for."""
    if any(getattr(value, "dtype", None) == torch.float64 for value in given):
        return result
    return _pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == torch.float64 else t, result)


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
        return f"made({kind.__module__!r}, {kind.__name__!r}, {_form(dict(vars(value)), t)})"
    raise TypeError(f"generate_input gives a {kind.__name__}: expected tensors, numbers, texts and collections of them")


def _new(shape, stride, dtype, like, was):
    """Return an output buffer, in the precision to which the inputs were converted, as float64 for the reference."""
    dtype = like.dtype if dtype.is_floating_point and like.dtype != was else dtype
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def _made(module, name, fields):
    made = object.__new__(getattr(sys.modules[module], name))
    vars(made).update(fields)
    return made


_LARGEST = {kind: torch.iinfo(kind).max for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}
_NAMES = {"torch": torch, "new": _new, "made": _made, "device": torch.device, "inf": math.inf, "nan": math.nan}
_builder = functools.cache(lambda form: eval(f"lambda t: {form}", _NAMES))


def data(given):
    """Return the `data` of a call with these inputs of the model."""
    return _builder(given[-1])(given)
