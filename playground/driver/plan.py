"""Which tasks a run has: where each variant runs, at which sizes, and which pairs of a suite cannot run at all."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from playground import catalog
from playground.driver.session import named_failure
from playground.driver.task import Options, Task
from playground.judge.checks import DROP_IN, FORWARD
from playground.judge.text import names_cuda
from playground.judge.verdict import UNJUDGED, ended
from playground.machine import requirements
from playground.record import Result, compose
from playground.report.figures import meets
from playground.subject import StandardName
from playground.suite import Pair, Suite
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess


def of_variants(
    model: catalog.Model, variants: Sequence[catalog.Variant], points: Sequence[dict[str, Any]], options: Options
) -> list[Task]:
    """Return a task for each variant that runs on the device, at each of the points. Their settings win over the place's."""
    tasks = []
    varied = [name for name in points[0] if any(point[name] != points[0][name] for point in points)]
    for settings in points:
        for variant in variants:
            place = place_of(variant, options.device)
            if place:
                point = {name: settings[name] for name in varied}
                sizes = model.settings(place) | settings
                tasks.append(Task(model, placed(variant, place), place, sizes, point, standard_of(variant, options)))
    return sorted(tasks, key=lambda task: task.place != "cuda")


def of_suite(suite: Suite, options: Options, lacks_gpu: bool | None = None) -> list[Task]:
    """Return a task for each pair of a Suite; those that cannot be judged, where its machine `lacks_gpu`, are settled."""
    return [_of_pair(pair, options, lacks_gpu) for pair in suite.pairs]


def _of_pair(pair: Pair, options: Options, lacks_gpu: bool | None) -> Task:
    facts = pair.facts()
    try:
        if pair.broken:
            raise catalog.CatalogError(pair.broken)
        model = dataclasses.replace(catalog.find_model(str(pair.problem)), name=pair.problem_name)
        variant = dataclasses.replace(catalog.find_variant(model, str(pair.solution)), name=pair.solution_name)
        catalog.require_constants(model.path, f"settings: {model.name}", pair.settings)
    except (catalog.CatalogError, OSError) as complaint:
        unknown = catalog.Variant(pair.solution_name, pair.solution, None)
        model = catalog.Model(pair.problem_name, pair.problem)
        return Task(model, unknown, None, pair.settings, pair=facts, settled=("error", str(complaint)))
    place, device = place_of(variant, options.device, lacks_gpu), options.device
    settings = (model.settings(place) if place else {}) | pair.settings
    elsewhere: tuple[Literal["error", "skipped"], str] = "skipped", pair.skipped or f"it does not run on --device {device}"
    settled = elsewhere if pair.skipped or not place else None
    standard = standard_of(variant, options)
    point, variant = pair.settings if pair.case else {}, placed(variant, place)
    return Task(model, variant, place, settings, point, standard, pair=facts, settled=settled, timed=pair.timed)


def failed(tasks: Sequence[Task], rows: Sequence[Result]) -> list[Task]:
    """Return the tasks that did not meet their standard in rows of an earlier document; each begins with what it failed on."""
    chosen, unmet = [], [row for row in rows if not meets(row) and row.verdict != "skipped"]
    for task in tasks:
        names = task.model.name, task.variant.name
        of_variant = [row for row in unmet if (row.model, row.variant) == names]
        # In a sweep at its point; the place and the files may have changed.
        for row in [row for row in of_variant if task.point.items() <= row.shape.settings.items()][:1]:
            chosen.append(dataclasses.replace(task, first=failing_probe(row)))
    return chosen


def failing_probe(row: Result) -> str | None:
    """Return the first probe on which a variant was wrong; None where it failed for another reason."""
    return next((name for name, probe in row.checked.probes.items() if probe.complaint), None)


def require_originals(tasks: Sequence[Task], options: Options) -> None:
    """Call each original that is not the project's, or at other settings, before anything is built. Raises CatalogError."""
    known = [task.model.catalogued_as and task.settings == task.model.settings(task.place) for task in tasks]
    groups = {task.group: task for task, is_known in zip(tasks, known, strict=True) if not (task.settled or is_known)}
    if not groups:
        return
    with WorkerProcess("referee", options.time_limit, UNTIMED) as worker:
        for task in groups.values():
            original = {"problem": str(task.model.path), "settings": task.settings, "place": task.place}
            try:
                worker.ask("try_out", **original, precision=options.half)
            except WorkerFailure as failure:
                changed = ", ".join(f"{name}={value}" for name, value in task.settings.items())
                where = f" (with {changed})" if changed else ""
                raise catalog.CatalogError(f"{named_failure(task.model, failure)}{where}") from None


def settled(task: Task, *verdict: Any) -> Result:
    """Return the result of a task that is not judged: by a verdict, reason and details, or as the task is settled."""
    return compose(task.subject, ended(UNJUDGED, *(verdict or task.settled or ())))


def standard_of(variant: catalog.Variant, options: Options) -> StandardName:
    """Return what a variant has to meet: where nobody says it, one of the project's drop-in, and any other file forward."""
    return options.standard or (DROP_IN if variant.is_catalogued else FORWARD)


def place_of(variant: catalog.Variant, device: str, lacks_gpu: bool | None = None) -> str | None:
    """Return where a variant runs: "cuda", "cpu" or "emulator"; None if the device does not run it."""
    if variant.backend == "cpu":
        return "cpu" if device in ("auto", "cpu") else None
    if device == "auto":
        without = "cpu" if variant.backend == "any" and not names_cuda(variant.path) else "emulator"
        lacks_gpu = bool(requirements.missing_for("cuda")) if lacks_gpu is None else lacks_gpu
        return without if lacks_gpu else "cuda"
    return device if device in ("cuda", "emulator") or variant.backend == "any" else None


def placed(variant: catalog.Variant, place: str | None) -> catalog.Variant:
    """Return the variant as it runs at a place: a file that does not tell where has the backend of the place."""
    backend = "cpu" if place == "cpu" else "cuda"
    return dataclasses.replace(variant, backend=backend) if variant.backend == "any" else variant
