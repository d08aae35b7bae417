"""GPU MODE's competition problems (folders with a task.yml) in KernelBench's form; see gpu_mode_problem for a worker's part."""

import functools
import importlib.abc
import importlib.util
import math
import re
import tempfile
from pathlib import Path

from playground.catalog import CatalogError
from playground.subject import Case
from playground.suite import Pair, Suite

TASK, KINDS, VALUES = "task.yml", ("test", "benchmark"), int | float | str | list | dict | None
SOLUTIONS = ("submission.py", "solutions/*/*.py", "submissions/*.py")  # where a problem's folder has submissions of its own
ON_GPU_ONLY = re.compile(r"^\s*(?:import|from)\s+(triton|helion|cutlass|cuda|cupy|numba|tilelang)\b", re.MULTILINE)
PROBLEM = """from math import inf, nan
from playground import gpu_mode_problem as of_gpu_mode
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
    `settings` replace arguments of generate_input. Without a GPU CUDA is judged at the smallest test, untimed. Raises
    CatalogError; a faulty problem costs its own pairs alone.
    """
    found, pairs = problems(folder), []
    for each in found:
        name = _name(each, folder)
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


def alone(folder):
    """Return [(name, file or a CatalogError, settings of each test, smallest first)] of the problems in a folder."""
    found = []
    for each in problems(folder):
        try:
            file, _, kinds = _problem(each, has_gpu=False, settings={})
            found.append((_name(each, folder), file, sorted(kinds["test"], key=_size)))
        except CatalogError as complaint:
            found.append((_name(each, folder), complaint, [{}]))
    return found


def _name(problem, folder):
    return problem.absolute().name if problem == Path(folder) else problem.relative_to(folder).as_posix()


def _size(given):
    return math.prod(n for key, n in given.items() if key != "seed" and type(n) is int)


def _problem(folder, has_gpu, settings):
    """Write the file of a problem. Return it, what task.yml says, and the settings of its tests and benchmarks."""
    task = _task(folder)
    if unknown := [key for key in settings if not all(key in each for each in task["tests"] + task["benchmarks"])]:
        raise CatalogError(f"--set: {folder.name} has no {', '.join(unknown)}; it has: {', '.join(task['tests'][0])}")
    kinds = {kind: [each | settings for each in task[kind + "s"]] for kind in KINDS}
    known = dict.fromkeys(key for cases in kinds.values() for arguments in cases for key in arguments)
    constants = "\n".join(f"{key} = {kinds['test'][0].get(key, ...)!r}" for key in known)
    arguments, device = ", ".join(f"{key!r}: {key}" for key in known), "cuda" if has_gpu else "cpu"
    problem = PROBLEM.format(constants=constants, files=task["files"], arguments=arguments, device=device)
    file = Path(_kept(problem).name, f"{folder.absolute().name}.py")
    file.write_text(problem, encoding="utf-8")
    return file, task, kinds


def _pairs(folder, file, names, has_gpu, settings):
    text, pairs = file.read_text(encoding="utf-8"), []
    problem, task, kinds = _problem(folder, has_gpu, settings)
    names |= {"problem": problem, "solution": file}
    case = {"ranking": str(task.get("ranking_by", "last")), "benchmarks": len(kinds["benchmark"])}
    if not has_gpu:
        if m := ON_GPU_ONLY.search(text):
            return [Pair(**names, settings=kinds["test"][0], skipped=f"it imports {m[1]}, whose kernels run on a GPU only")]
        kinds = {"test": [min(kinds["test"], key=_size)] if "__global__" in text else kinds["test"]}
    for kind, given in ((kind, given) for kind, cases in kinds.items() for given in cases):
        name = " ".join([kind, *(f"{key}={value}" for key, value in given.items() if key != "seed")])
        if kind == "benchmark" or all(pair.case.name != name for pair in pairs):  # another seed is no other test
            pairs.append(Pair(**names, settings=given, timed=kind == "benchmark", case=Case(kind=kind, name=name, **case)))
    return pairs


def _task(folder):
    try:
        yaml = importlib.import_module("yaml")
        task = yaml.safe_load((folder / TASK).read_text(encoding="utf-8"))
    except ImportError:
        raise CatalogError(f"{folder / TASK} needs PyYAML: python -m pip install PyYAML") from None
    except yaml.YAMLError as error:
        line, what = getattr(getattr(error, "problem_mark", None), "line", 0) + 1, getattr(error, "problem", error)
        raise CatalogError(f"{folder / TASK}:{line}: not YAML: {str(what).splitlines()[0]}") from None
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
