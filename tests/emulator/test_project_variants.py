"""The project's own CUDA variants under check mode: nothing is reported of them, and mistakes planted in copies are.

Both go the way a user goes: through the driver, on the emulator, in three schedules.
"""

import re

import pytest

from playground import catalog
from playground.report.progress import Progress
from playground.runner import Options, Runner, Task

CUDA_VARIANTS = [(m, v) for m in catalog.models() for v in catalog.variants(m) if v.backend == "cuda"]
BARRIER = "__syncthreads();"
# The guard that keeps a last, incomplete block inside its array, where a variant has one.
GUARD = re.compile(r"if \((index|window|k) >= ([\w* ]+)\) return;")


def planted(text):
    """(what was planted, its line, the text with it): each barrier removed, and the first guard off by one."""
    for k, match in enumerate(re.finditer(re.escape(BARRIER), text), start=1):
        yield f"barrier{k}", text[: match.start()].count("\n") + 1, text[: match.start()] + ";" + text[match.end() :]
    if match := GUARD.search(text):
        off_by_one = f"if ({match[1]} > {match[2]}) return;"
        yield "guard", text[: match.start()].count("\n") + 1, text[: match.start()] + off_by_one + text[match.end() :]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(model, variant, what was planted or None): result}, from one run of everything."""
    folder = tmp_path_factory.mktemp("planted")
    keys, tasks = [], []
    for model, variant in CUDA_VARIANTS:
        files = [(None, variant.path)]
        for what, _, text in planted(variant.path.read_text()):
            path = folder / f"{model.name}_{variant.name}_{what}.py"
            path.write_text(text)
            files.append((what, path))
        for what, path in files:
            keys.append((model.name, variant.name, what))
            settings = catalog.SETTINGS["emulator"][model.name]
            tasks.append(Task(model, catalog.Variant(path.stem, path, "cuda"), "emulator", settings))
    with Progress() as progress:
        return dict(zip(keys, Runner(Options(quick=True), progress).run(tasks), strict=True))


@pytest.mark.parametrize("model, variant", CUDA_VARIANTS, ids=lambda value: value.name)
def test_nothing_is_reported(results, model, variant):
    result = results[model.name, variant.name, None]
    assert (result["verdict"], result["reason"], result["findings"]) == ("pass", None, [])


@pytest.mark.parametrize("model, variant", CUDA_VARIANTS, ids=lambda value: value.name)
def test_planted_mistakes_are_reported(results, model, variant):
    mistakes = list(planted(variant.path.read_text()))
    assert mistakes
    for what, line, _ in mistakes:
        result = results[model.name, variant.name, what]
        assert result["verdict"] == "fail", f"{what} in line {line}: {result['reason']}"
        (finding,) = result["findings"]
        kind = "out of bounds|race between blocks" if what == "guard" else "race"
        assert re.search(rf"{variant.name}_{what}\.py:\d+: .*({kind})", finding), finding
