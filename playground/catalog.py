"""Which models (`Model`, `get_inputs()`, `get_init_inputs()`) and variants (`ModelNew`) there are, and how they load."""

import ast
import builtins
import difflib
import hashlib
import linecache
import re
import symtable
import sys
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the clone, or the folder of installed packages
IS_CLONE = not (ROOT / "playground" / "data").is_dir()
DATA = ROOT if IS_CLONE else ROOT / "playground" / "data"  # where a wheel has what stands at the top of the clone
MODELS = DATA / "models"
KERNELS = DATA / "kernels"
EXAMPLES = DATA / "examples"
COMPARE = "python compare.py" if IS_CLONE else "kernel-playground"  # as its user types it

# Sizes that two cores finish in a minute or two, and that the emulator finishes in seconds. A model that is not listed runs
# at its own size everywhere. At the emulator's, each stage of each pipeline is filled twice or more in a block
# (tests/kernels/test_shapes.py); where it only counts, less will do.
SETTINGS = {
    "cpu": {
        **{"conv_pool_sigmoid_sum": {"batch_size": 4}, "conv3d_div_max_gap_bias_sum": {"batch_size": 8}},
        "alexnet_conv1": {"batch_size": 16},
    },
    "emulator": {
        "conv_pool_sigmoid_sum": {"batch_size": 3, "height": 45, "width": 64},
        "conv3d_div_max_gap_bias_sum": {"batch_size": 11, "depth": 7, "height": 12, "width": 16},
        "alexnet_conv1": {"batch_size": 11, "height": 17, "width": 281},  # in strict fp32 v5 has no room for much wider ones
    },
    "counted": {
        "conv_pool_sigmoid_sum": {"batch_size": 3, "height": 45, "width": 64},
        "conv3d_div_max_gap_bias_sum": {"batch_size": 3, "depth": 7, "height": 12, "width": 16},
        "alexnet_conv1": {"batch_size": 2, "height": 47, "width": 57},
    },
    "cuda": {},
}


# What needs a GPU or the emulator: kernels, or a library of CUDA's.
CUDA_TEXT = re.compile(
    r"__global__|(import|from) triton|#\s*include\s*[<\"](cudnn|cublas|cufft|cusparse|cusolver|curand)\w*\.h"
)


class Impossible(Exception):
    """What was asked for cannot be done here; the text, of one line, says what is wrong or missing and what to do."""


class CatalogError(Impossible):
    """A name or a path that stands for nothing, or a file without what its kind must define; the text says what to do."""


@dataclass(frozen=True)
class Model:
    """An original, in KernelBench's format."""

    name: str
    path: Path

    @property
    def catalogued_as(self):
        """Return the name under which the project has sizes and formulas for it; None for a file from elsewhere."""
        return self.path.stem if self.path.resolve().parent == MODELS.resolve() else None

    def settings(self, place):
        """Return the constants that make it as small as `place` ("cpu", "emulator", "counted" or "cuda") needs it."""
        return SETTINGS[place].get(self.catalogued_as, {})


@dataclass(frozen=True)
class Variant:
    """A file with a ModelNew; `backend` is "cuda", "cpu", "any" where nothing tells, or None where it cannot be read."""

    name: str
    path: Path
    backend: str | None

    @property
    def is_catalogued(self):
        """Return whether it is one of the project's own."""
        return self.path.resolve().parent.parent == KERNELS.resolve()


def sha256(path):
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def code_sha256(path):
    """Return the SHA-256 of a Python file without its docstring, which can be mended without measuring again."""
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return sha256(path)
    if ast.get_docstring(tree, clean=False) is not None:
        lines = text.splitlines(keepends=True)
        del lines[tree.body[0].lineno - 1 : tree.body[0].end_lineno]
        text = b"".join(lines)
    return hashlib.sha256(text).hexdigest()


def lines_of(text):
    """Return the lines of a file as Python counts them: a form feed, for example, ends none, as it does for str.splitlines."""
    return re.split("\r\n|\r|\n", text)


def kernels_sha256(path):
    """Return the SHA-256 of what runs on the GPU, the strings CUDA and CPP of a variant's file; None where it has neither."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return None
    texts = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id="CUDA" | "CPP" as name)], value=ast.Constant(value=str(text))):
                texts[name] = text
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if texts else None


def models():
    """Return the project's models, in the order of the README."""
    return sorted((Model(path.stem, path) for path in MODELS.glob("*.py")), key=lambda model: reading_order(model.name))


def reading_order(name):
    """Return a sort key for names of models: as listed in SETTINGS, then the rest by name."""
    order = list(SETTINGS["cpu"])
    return (order.index(name) if name in order else len(order), name)


def find_model(name_or_path):
    """Return the model of that name, or the one in the file at that path. Raises CatalogError."""
    known = {model.name: model for model in models()}
    if name_or_path in known:
        return known[name_or_path]
    path = _existing_file(name_or_path, "model", known)
    names = _top_level_names(path)
    if "ModelNew" in names and "Model" not in names:
        what = "defines ModelNew and no Model, as a solution does: give it to --variant, its problem to --model"
        raise CatalogError(f"{path}: {what}")
    return Model(path.stem, path)


def variants(model):
    """Return the project's variants of a model in reading order: v1, v2, ..., those for training, then the CPU's."""
    paths = (KERNELS / model.name).glob("[!_]*.py")
    return [_variant(path) for path in sorted(paths, key=lambda path: ladder_order(path.stem))]


def ladder_order(name):
    """Return a sort key for names of variants: a ladder's, those for training, those for the CPU."""
    return name.startswith("cpu_"), name.startswith("training_"), natural_order(name)


def natural_order(name):
    """Return a sort key in which numbers count as such: v10 behind v9."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))]


def find_variant(model, name_or_path):
    """Return the variant of that name of the model, or the one in the file at that path. Raises CatalogError."""
    known = {variant.name: variant for variant in variants(model)}
    if name_or_path in known:
        return known[name_or_path]
    path = _existing_file(name_or_path, f"variant of {model.name}", known)
    names = _top_level_names(path)
    if {"Model", "get_inputs"} <= names and not {"ModelNew", "*"} & names:
        what = "defines Model and no ModelNew, as a problem does: give it to --model, its solution to --variant"
        raise CatalogError(f"{path}: {what}")
    return _variant(path)


def find_any_variant(name_or_path, model_name=None):
    """Return the variant of that name, or MODEL/VARIANT, or in a file, of `model_name` if given. Raises CatalogError."""
    prefix, _, name = str(name_or_path).rpartition("/")
    if model_name:
        return find_variant(find_model(model_name), name_or_path)
    if prefix in [model.name for model in models()]:
        return find_variant(find_model(prefix), name)
    known = [f"{model.name}/{each.name}" for model in models() for each in variants(model)]
    found = [each for each in known if each.rpartition("/")[2] == name_or_path]
    if len(found) > 1:
        raise CatalogError(f"there are several variants called {name_or_path!r}; name one of them: {', '.join(found)}")
    return find_any_variant(found[0]) if found else _variant(_existing_file(name_or_path, "variant", known))


def siblings(variant):
    """Return the project's variants of the model that a variant's file stands among; none for a file that stands elsewhere."""
    return variants(Model(variant.path.parent.name, variant.path)) if variant.path.parent.parent == KERNELS else []


def _existing_file(name_or_path, kind, known):
    path = Path(name_or_path)
    if path.suffix == ".py" and path.is_file():
        return path.resolve()
    short = {name.rpartition("/")[2]: name for name in known}  # of MODEL/VARIANT
    near = difflib.get_close_matches(str(name_or_path), [*known, *short], n=1)
    guess = f" (did you mean {short.get(near[0], near[0])}?)" if near else ""
    names = ", ".join(known) or "none"
    raise CatalogError(f"no {kind} is called {str(name_or_path)!r}{guess}, and there is no such .py file; known: {names}")


def _variant(path):
    """Return the variant in a file: what launches kernels needs CUDA, what has none runs on either, unless named cpu_*."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if CUDA_TEXT.search(text):
        return Variant(path.stem, path, "cuda")
    ours = Variant(path.stem, path, "cpu")
    return ours if ours.is_catalogued or path.stem.startswith("cpu_") else Variant(path.stem, path, "any")


def parse_settings(texts):
    """Return {"batch_size": 4} from ["batch_size=4"]; values are Python literals. Raises CatalogError."""
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise CatalogError(f"--set takes NAME=VALUE, for example batch_size=4; got {text!r}")
        if name in settings:
            raise CatalogError(f"--set {name} is given twice; for several values use --sweep {name}=V1,V2")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise CatalogError(f"--set {text}: {value!r} is not a Python literal such as 4, 2.0 or (3, 3)") from None
    return settings


def load_problem(path, settings=None):
    """Return the module of a model's file, with its top-level constants replaced by `settings` where they are assigned.

    Raises CatalogError for an unknown constant and for a file without Model, get_inputs and get_init_inputs, and what the file
    itself raises.
    """
    path = Path(path)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    require_constants(path, path.name, settings or ())
    body = []
    for statement in tree.body:
        body.append(statement)
        for name in sorted(_assigned_names(statement) & set(settings or {})):
            value = ast.parse(f"{name} = {settings[name]!r}").body
            body.extend(ast.copy_location(node, statement) for node in value)
    tree.body = body
    return _run("problem", path, ast.fix_missing_locations(tree), {}, ["Model", "get_inputs", "get_init_inputs"])


def _top_level_names(path):
    """The names that a file defines or imports at its top level, "*" among them; none of one that is no Python."""
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError, OSError):
        return set()
    names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imported = [alias for node in body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return names.union({alias.asname or alias.name for alias in imported}, *map(_assigned_names, body))


def _assigned_names(statement):
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def parsed(path, text=None):
    """Return the syntax tree of a Python file, or of `text` in the place of its own. Raises CatalogError where it is none."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8") if text is None else text, filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise CatalogError(f"{path} is not Python: {error}") from None


def constants(path):
    """Return the names that a model's file assigns at its top level, sorted. Raises CatalogError where it is no Python."""
    return sorted(set().union(*map(_assigned_names, parsed(path).body)))


def require_constants(path, who, names):
    """Raise CatalogError, which begins with `who`, where a model's file assigns one of the names nowhere at its top level."""
    known = constants(path) if names else []
    if unknown := [name for name in names if name not in known]:
        raise CatalogError(f"{who} has no constant called {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")


def load_variant(path, content=None, names=None, model_new_of=None):
    """Return the module of a variant's file, of `content` if given. Raises CatalogError without ModelNew, and its own errors.

    The module has `names`, {name: value}, beforehand. `model_new_of(module)`, where the problem has it, gives the ModelNew of
    another format.
    """
    path = Path(path)
    content = path.read_bytes() if content is None else content
    lines = [f"{line}\n" for line in lines_of(content.decode("utf-8", errors="replace"))]
    linecache.cache[str(path)] = len(content), None, lines, str(path)  # tracebacks and inspect.getsource see what runs
    return _run("variant", path, content, names or {}, ["ModelNew"], model_new_of)


def _run(kind, path, code, names, required, model_new_of=None):
    """The module of a file: it has `names`, and `code` runs in it. Raises CatalogError where it lacks what is required."""
    if kind == "variant" and not model_new_of and (missing := [name for name in required if not _may_define(code, path, name)]):
        raise CatalogError(f"{path.name} does not define {', '.join(missing)}")
    module = types.ModuleType(f"{kind}_{path.stem}")
    module.__file__ = str(path)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    exec(compile(code, str(path), "exec"), vars(module))
    if model_new_of:
        module.ModelNew = model_new_of(module)
    if missing := [name for name in required if not hasattr(module, name)]:
        raise CatalogError(f"{path.name} does not define {', '.join(missing)}")
    return module


def _may_define(code, path, name):
    nodes = list(ast.walk(ast.parse(code, filename=str(path)))) if b"cpp_extension" in code else []
    for node in nodes:
        defined = getattr(node, "name", None) or getattr(node, "asname", None) or getattr(node, "id", None)
        if defined in (name, "*", "exec") or (isinstance(node, ast.Constant) and node.value == name):
            return True
    return not nodes


def borrowed_names(variant, problem):
    """Return the names, sorted, that a variant's file uses and only its problem's file defines, as KernelBench permits."""
    try:
        texts = [(Path(path).read_text(encoding="utf-8"), str(path)) for path in (variant, problem)]
        own, given = (symtable.symtable(*each, "exec") for each in texts)
    except (SyntaxError, ValueError, OSError):
        return []
    if "model_new_of" in given.get_identifiers():
        return []
    used, defined = set(), set(dir(builtins)) | {symbol.get_name() for symbol in own.get_symbols() if _is_bound(symbol)}
    waiting = [own]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or (table is own and not _is_bound(symbol)):
                (defined if _is_bound(symbol) else used).add(symbol.get_name())
    return sorted((used - defined) & {symbol.get_name() for symbol in given.get_symbols() if _is_bound(symbol)})


def _is_bound(symbol):
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
