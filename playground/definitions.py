"""Problems of FlashInfer-Bench and SOL-ExecBench (a definition in JSON with lines of workloads) in KernelBench's form.

`read` writes a file for each workload: the reference's text, axes and scalars as constants, and a call of `problem`. Tensors
from files, and types of less than a byte, are not read.
"""

import inspect
import json
import re
import tempfile
from functools import cache
from pathlib import Path

from playground.catalog import CatalogError
from playground.subject import Case
from playground.suite import Pair, Suite

DEFINITION, WORKLOADS = "definition.json", "workload.jsonl"  # of a problem's folder in SOL-ExecBench
ROOT = "definitions"  # the folder of definitions in FlashInfer-Bench's data, beside workloads and solutions
WORKLOAD = ("axes", "inputs", "uuid", "tolerance")  # its keys
REQUIRED = {"name": str, "axes": dict, "inputs": dict, "outputs": dict, "reference": str}
INTEGERS = {"int8": 128, "int16": 1024, "int32": 1024, "int64": 1024}  # type -> what random values are below
SOURCES = ("random", "scalar", "custom")
PROBLEM = """{reference}

from math import inf, nan
from playground import definitions as of_definitions
{constants}
Model, get_inputs, get_init_inputs, model_new_of = of_definitions.problem(globals(), {definition!r}, {inputs!r})
"""
_kept = cache(lambda text: tempfile.TemporaryDirectory(prefix="playground-definitions-"))  # until this process ends


def problems(path):
    """Return the files of definitions in a folder, or below it; none where it has none."""
    found = [file for file in Path(path).rglob("*.json") if file.name == DEFINITION or ROOT in file.relative_to(path).parts]
    return sorted(found)


def read(folder, solutions):
    """Return the Suite of all problems in a folder: a pair for each workload and each solution.

    `solutions` are files, their folder, or None: those in the folder itself; each is JSON that names its definition and one
    file of Python, or, for an only problem, a file of Python. Raises CatalogError; a faulty problem costs its own pairs alone.
    """
    folder, pairs, files = Path(folder), [], problems(folder)
    given = solutions or folder
    found = sorted(given.rglob("*.json")) + sorted(given.rglob("*.py")) if isinstance(given, Path) else map(Path, given)
    texts = {file: _solution(file) for file in found if file not in files}
    for file in files:
        try:
            definition = _definition(file)
            own = {at: each for at, each in texts.items() if each and each["definition"] in (definition["name"], None)}
            if solutions is None or len(files) > 1:  # a file of Python says not of which
                own = {at: each for at, each in own.items() if each["definition"]}
            workloads = _workloads(file, definition["name"]) if own else []
            for at, solution in own.items():
                pairs += [_pair(file, definition, workload, at, solution, len(workloads)) for workload in workloads]
        except (CatalogError, OSError, UnicodeError) as complaint:
            if len(files) == 1:
                raise CatalogError(str(complaint)) from None
            pairs.append(Pair(file, file, file.stem, "no solution read", broken=str(complaint)))
    if not pairs:
        raise CatalogError(f"{given}: no solutions of {', '.join(file.stem for file in files)} are there")
    return Suite(tuple(pairs))


def _json(file, text, line=None):
    try:
        return json.loads(text)
    except ValueError as error:
        raise CatalogError(f"{file}:{line or getattr(error, 'lineno', 1)}: not JSON: {error}") from None


def _definition(file):
    found = _json(file, file.read_text(encoding="utf-8"))
    found = found if isinstance(found, dict) else {}
    for key, kind in REQUIRED.items():
        if not isinstance(found.get(key), kind):
            raise CatalogError(f"{file}: expected a {kind.__name__} called `{key}`, got {found.get(key)!r:.99}")
    return found


def _workloads(file, name):
    beside = file.with_name(WORKLOADS)
    root = next((parent for parent in file.parents if parent.name == ROOT), file.parent)
    near = [beside] if file.name == DEFINITION else sorted((root.parent / "workloads").rglob(f"{name}.jsonl"))
    lines = [(path, at, line) for path in near for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    found = []
    for path, at, line in lines:
        if line.strip():
            value = _json(path, line, at)
            value = value.get("workload", value) if isinstance(value, dict) else {}  # FlashInfer-Bench's is within a trace
            if not all(isinstance(value.get(key), dict) for key in ("axes", "inputs")) or not value.get("uuid"):
                raise CatalogError(f"{path}:{at}: expected a workload with axes, inputs and a uuid, got {line:.99}")
            found.append({key: value[key] for key in WORKLOAD if key in value})
    if not found:
        raise CatalogError(f"{file}: no workload of {name} is there: {beside if file.name == DEFINITION else root.parent}")
    return found


def _solution(file):
    """{"definition", "text", "skipped"} of a file; None where it is no solution."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return {"definition": None, "text": text, "name": file.stem} if re.search(r"^def run\b|^run *=", text, re.M) else None
    found = _json(file, text)
    if not isinstance(found, dict) or not {"definition", "spec", "sources"} <= found.keys():
        return None
    entry, _, symbol = str(found["spec"].get("entry_point")).partition("::")
    if not entry.endswith(".py") or len(found["sources"]) != 1:
        why = "expected one file of Python" if entry.endswith(".py") else f"its entry point is {entry}, which is not Python"
        return {**found, "text": "", "skipped": f"internal limit: {why}"}
    ending = "" if symbol == "run" else f"\nrun = {symbol}\n"
    return {**found, "text": found["sources"][0]["content"] + ending}


def _pair(file, definition, workload, at, solution, count):
    sources = {name: workload["inputs"].get(name, {"type": "random"}) for name in definition["inputs"]}
    values = workload["axes"] | {name: each["value"] for name, each in sources.items() if each["type"] == "scalar"}
    kinds = {name: each["type"] for name, each in sources.items()}
    constants = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    rest = {key: value for key, value in definition.items() if key != "reference"}
    problem = PROBLEM.format(reference=definition["reference"], constants=constants, definition=rest, inputs=kinds)
    name = definition["name"]
    path, own = (Path(_kept(text).name, f"{stem}.py") for text, stem in ((problem, "problem"), (solution["text"], "solution")))
    path.write_text(problem, encoding="utf-8")
    own.write_text(solution["text"], encoding="utf-8")
    types = {each.get("dtype", "") for each in (definition["inputs"] | definition["outputs"]).values()}
    unread = sorted(set(kinds.values()) - set(SOURCES)) + sorted(each for each in types if each.startswith("float4"))
    axes = " ".join(f"{key}={value}" for key, value in workload["axes"].items())
    case = Case(kind="benchmark", name=f"workload {axes}".rstrip(), ranking="geom", benchmarks=count)
    skipped = f"internal limit: {', '.join(unread)} inputs are not read" if unread else solution.get("skipped")
    files = path, at if at.suffix == ".py" else own
    return Pair(*files, name, str(solution["name"]), workload=workload, skipped=skipped, case=case)


def problem(given, definition, sources):
    """Return (Model, get_inputs, get_init_inputs, model_new_of) of a definition whose reference has run in the module `given`.

    `sources` say of each input whether it is "random" (normal floats, integers from -1024 to 1023), a "scalar" or "custom", by
    the definition's own function.
    """
    import torch

    inputs, outputs = definition["inputs"], definition["outputs"]
    if not callable(reference := given.get("run")):
        raise CatalogError(f"{definition['name']}: the reference defines no function `run`")

    def sizes(values):
        """The value of each axis, where those of the variable ones are `values`."""
        found = {name: axis["value"] for name, axis in definition["axes"].items() if axis["type"] == "const"} | values
        for name, axis in definition["axes"].items():
            if axis["type"] == "expr":
                found[name] = int(eval(axis["expression"], {"__builtins__": {}}, found))
        return found

    def shape(spec, axes):
        return [axes[name] for name in spec["shape"] or ()]

    def get_inputs():
        axes = sizes({name: given[name] for name, axis in definition["axes"].items() if axis["type"] == "var"})
        scalars = {name: given[name] for name, kind in sources.items() if kind == "scalar"}
        device = torch.empty(0).device  # the default one
        make = definition.get("custom_inputs_entrypoint")
        made = given[make](axes | scalars, device) if "custom" in sources.values() else {}
        known = scalars | made
        return [known[name] if name in known else _random(spec, shape(spec, axes)) for name, spec in inputs.items()]

    def of_given(values):
        """The value of each axis, as the inputs have it."""
        bound = {}
        for spec, value in zip(inputs.values(), values, strict=True):
            bound |= dict(zip(spec["shape"] or (), value.shape, strict=True)) if isinstance(value, torch.Tensor) else {}
        return sizes({name: bound[name] for name, axis in definition["axes"].items() if axis["type"] == "var"})

    def model(function, passes_outputs):
        class Model(torch.nn.Module):
            def forward(self, *values):
                if not passes_outputs:
                    result = function(*values)
                    return tuple(result[name] for name in outputs) if isinstance(result, dict) else result
                device = next(value.device for value in values if isinstance(value, torch.Tensor))
                axes, own = of_given(values), []
                for spec in outputs.values():
                    own.append(torch.empty(shape(spec, axes), dtype=getattr(torch, spec["dtype"]), device=device))
                function(*values, *own)
                return own[0] if len(own) == 1 else tuple(own)

        return Model

    def model_new_of(solution):
        if not callable(function := getattr(solution, "run", None)):
            raise CatalogError(f"{solution.__file__} does not define run({', '.join(inputs)})")
        try:
            taken = len(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            taken = len(inputs)
        return model(function, taken == len(inputs) + len(outputs))

    return model(reference, False), get_inputs, list, model_new_of


def _random(spec, shape):
    import torch

    kind = getattr(torch, spec["dtype"])
    if kind == torch.bool:
        values = torch.randint(0, 2, shape).bool()
    elif bound := INTEGERS.get(spec["dtype"]):
        values = torch.randint(-bound, bound, shape, dtype=kind)
    else:
        values = torch.randn(shape)
        values = (values.clamp(-2, 2) if kind.itemsize == 1 else values).to(kind)
    return values.item() if spec["shape"] is None else values
