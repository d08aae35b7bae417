"""What the commands do besides judging and timing: list what there is, explain, compare two files, begin a variant."""

from rich.table import Table
from rich.text import Text

from playground import catalog
from playground.command import new_variant
from playground.machine import requirements
from playground.report import difference, explanation
from playground.report.layout import make_console, print_folded, print_indented


def list_all(names=None):
    """Print every model, or those of the names, and their variants, with a line of description each. Raises CatalogError."""
    console = make_console()
    models = catalog.models() if names is None else [catalog.find_model(name) for name in names]
    for model in models:
        print_folded(console, Text(model.name, style="bold").append(f": {explanation.title(model.path)}", style="not bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        for variant in catalog.variants(model):
            table.add_row(variant.name, Text(explanation.title(variant.path)))
        print_indented(console, table)


def explain(given):
    """Print what a variant's docstring says. Raises CatalogError."""
    variant = catalog.find_any_variant(given.explain, given.model)
    explanation.show(variant, make_console(), catalog.siblings(variant))


def diff(given):
    """Print what a variant changed over another. Raises CatalogError."""
    difference.show(*(catalog.find_any_variant(name, given.model) for name in given.diff), make_console())


def create(model_name, name):
    """Write a new variant's file, and say what to do next. Raises CatalogError."""
    model = catalog.find_model(model_name)
    path = new_variant.create(model, name)
    of_project = path.parent == catalog.KERNELS / model.name
    named = f"--model {model.name if model.catalogued_as else model.path} --variant {path.stem if of_project else path}"
    todo, options = "Judge it; then edit it, and see at each save what comes", ("", "--watch")
    if name.startswith("cpu_") or not requirements.missing_for("cuda"):
        todo, options = "Judge it and time it; then edit it, and see what came", ("--json start.json", "--against start.json")
    print(f"{path} is a correct variant to start from. {todo} of it:\n")
    for option in options:
        print(f"    {catalog.COMPARE} {named} {option}".rstrip())


def copy(name):
    """Copy a file of the project's, or its examples, to the working folder, and say where. Raises CatalogError."""
    print(f"{new_variant.copy(name)} is a copy")
