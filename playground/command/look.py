"""What the commands do besides judging and timing: list what there is, explain, compare two files, profile, begin a variant."""

import sys

from rich.table import Table
from rich.text import Text

from playground import catalog
from playground.command import new_variant
from playground.machine import requirements
from playground.nvidia import metrics, profiler
from playground.nvidia.profiler import ProfilerError
from playground.report import difference, explanation, profile
from playground.report.figures import machine
from playground.report.layout import make_console, print_folded, print_indented
from playground.report.progress import Progress
from playground.worker.referee_client import describe_machine


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


def profile_variants(given):
    """Print what Nsight Compute measures of the variants that are named, or of all. Raises Impossible, ProfilerError."""
    model = catalog.find_model(given.model)
    variants = [catalog.find_variant(model, each) for each in given.variant or ()] or catalog.variants(model)
    settings = model.settings("cuda") | catalog.parse_settings(given.set)
    chosen = [variant for variant in variants if variant.backend == "cuda"]
    if not chosen:
        raise catalog.CatalogError(f"--profile is for CUDA kernels, and none of these variants of {model.name} has any")
    if missing := requirements.missing_for("cuda") or profiler.missing():
        raise catalog.Impossible(f"--profile: {missing}")
    found, complaints = [], []
    with Progress() as progress:
        progress.expect(len(chosen))
        for variant in chosen:
            progress.started("profile", model.name, variant.name)
            try:
                found.append((variant, profiler.profile(model, variant, settings, given.time_limit), _counted(model, variant)))
                outcome = "done"
            except ProfilerError as complaint:
                complaints.append(str(complaint))
                outcome = "error"
            progress.done(model.name, variant.name, outcome)
    console = make_console()
    print_folded(console, machine(describe_machine()), style="dim")
    profile.show(found, console)
    if complaints:
        raise ProfilerError("\n".join(complaints))


def _counted(model, variant):
    try:
        return metrics.counted(model, variant)
    except RuntimeError as complaint:
        print(complaint, file=sys.stderr)
        return None
