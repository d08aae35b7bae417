"""compare.py --new, a variant that is right at once, and --copy, a file of the project's as it is."""

import ast
import re
from pathlib import Path
from string import Template

from playground import catalog
from playground.catalog import CatalogError
from playground.command.shared_text import TEMPLATES

# A docstring's beginning: title and first paragraphs, up to the first heading, which has an indented text below.
BEFORE_HEADINGS = re.compile(r'\A""".+?(?=\n\n\S[^\n]*\n {4}\S)', re.DOTALL)
START = '''"""{model}, {number}: a start, the kernel of {parent}, to be changed.

Like v1, so far. Say what is new ("Like v2, but ...") here, and below, where all is v1's. Written by compare.py --new.'''
NAME = re.compile(r"(v[1-9][0-9]*|cpu)(_[a-z0-9]+)+")
CLAIMS = {"optimized", "optimised", "final", "fast", "best", "new"}
NEEDED = {"Model", "get_inputs", "get_init_inputs"}


def create(model, name):
    """Write a new variant called `name` to kernels/ of the clone, the working folder, or beside its problem; return its path.

    Raises CatalogError for a name that does not fit, one that is taken, a file that is there, and a problem that cannot be
    wrapped.
    """
    _check_name(model, name)
    is_own = model in catalog.models()
    of_own = catalog.KERNELS / model.name if catalog.IS_CLONE else Path.cwd()
    path = (of_own if is_own else model.path.parent) / f"{name}.py"
    simplest = next((each for each in catalog.variants(model) if each.name.startswith("v1_")), None)
    copies = is_own and simplest and not name.startswith("cpu_")
    text = _copied_text(model, simplest, name) if copies else _wrapping_text(model, name)
    _write({path: text.encode()})
    return path


def copy(name):
    """Copy a model's or a variant's file, or "examples", to the working folder, and return its path. Raises CatalogError."""
    named = {model.name: model.path for model in catalog.models()} | {"examples": catalog.EXAMPLES}
    source = named.get(name) or catalog.find_any_variant(name).path
    files = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"] if source.is_dir() else [source]
    _write({Path(source.name, path.relative_to(source)): path.read_bytes() for path in files})
    return Path(source.name)


def _write(contents):
    if there := next((path for path in contents if path.exists()), None):
        raise CatalogError(f"{there} is there already; nothing was written")
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
        except OSError as error:
            raise CatalogError(f"{path}: {error.strerror}") from None


def _check_name(model, name):
    if not NAME.fullmatch(name):
        such = f"such as v{_next_number(model)}_tiles; got {name!r}"
        raise CatalogError(f"a variant is called v<N>_<idea> or cpu_<idea>, in lower case, {such}")
    if claims := CLAIMS & set(name.split("_")):
        raise CatalogError(f"a variant's name says what its idea is, not how good it is: {', '.join(sorted(claims))}")
    number = name.split("_")[0]
    taken = [variant.name for variant in catalog.variants(model) if variant.name.split("_")[0] == number]
    if taken and number != "cpu" and name not in taken:
        raise CatalogError(f"{number} is taken by {taken[0]}; the next number is v{_next_number(model)}")


def _next_number(model):
    numbers = [int(number[1]) for variant in catalog.variants(model) if (number := re.match(r"v(\d+)_", variant.name))]
    return max(numbers, default=0) + 1


def _copied_text(model, parent, name):
    text = parent.path.read_text(encoding="utf-8")
    head = START.format(model=model.name, number=name.split("_")[0], parent=parent.name)
    text = BEFORE_HEADINGS.sub(lambda _: head, text, count=1)
    return text.replace(f"{model.name}_{parent.name}", f"{model.name}_{name}")  # NAME, and the operator that the model calls


def _wrapping_text(model, name):
    original, future = _original_text(model.path)
    identifier = re.sub(r"\W", "_", f"{model.name}_{name}")
    identifier = identifier if identifier.isidentifier() else f"problem_{identifier}"
    values = {"model": model.name, "file": model.path.name, "identifier": identifier, "original": original, "future": future}
    values["number"] = name.split("_")[0]
    kind = "cpu" if name.startswith("cpu_") else "cuda"
    template = Template((TEMPLATES / f"any_problem.{kind}.txt").read_text(encoding="utf-8"))
    own = template.substitute(values | {"original": "", "future": ""})
    if clash := ", ".join(sorted(_defined_in(original) & _defined_in(own))):
        raise CatalogError(f"{model.path.name} defines {clash}, as the new file itself must: rename it there")
    return template.substitute(values)


def _original_text(path):
    """(text without docstring and __main__ block, __future__ imports) of a problem. Raises CatalogError where it is none."""
    body, text = catalog.parsed(path).body, path.read_text(encoding="utf-8")
    if missing := NEEDED - _defined_in(text):
        raise CatalogError(f"{path.name} does not define {', '.join(sorted(missing))}, so it is no problem to start from")
    lines = catalog.lines_of(text)
    future = []
    for index, node in reversed(list(enumerate(body))):
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_future:
            future = lines[node.lineno - 1 : node.end_lineno] + future
        is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if is_future or is_docstring or is_main:
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip(), "".join(f"{line}\n" for line in [*future, ""] if future)


def _defined_in(text):
    body = ast.parse(text).body
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    names = {node.id for target in assigned for node in ast.walk(target) if isinstance(node, ast.Name)}
    return names | {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
