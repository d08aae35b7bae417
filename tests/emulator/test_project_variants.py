"""The project's own CUDA variants under check mode: nothing is reported of them, and mistakes planted in copies are.

Both go the way a user goes: through the driver, on the emulator, in three schedules.
"""

import re

import pytest

from playground import catalog
from playground.report.progress import Progress
from playground.runner import Options, Runner, Task

CUDA_VARIANTS = [(m, v) for m in catalog.models() for v in catalog.variants(m) if v.backend == "cuda"]
BARRIER = re.compile(r"(?<=    )(__syncthreads\(\)|named_barrier\([^;]*\));")
# The guard that keeps a last, incomplete block inside its array, where a variant has one.
GUARD = re.compile(r"if \((index|window|k) >= ([\w* ]+)\) return;")
MOST = 3  # barriers of a variant: each copy has to be compiled


def own_text(model, variant):
    """The file's text with blanks for the kernels that it has from an earlier variant, character by character."""
    text = variant.path.read_text()
    for other in catalog.variants(model):
        if other.backend == "cuda" and other.name < variant.name:
            kernels = catalog.load_variant(other.path).CUDA.strip()
            text = text.replace(kernels, re.sub(r"\S", " ", kernels))
    return text


def evenly(found):
    """At most MOST of them: first, last, and some between."""
    if len(found) <= MOST:
        return found
    return [found[round(k * (len(found) - 1) / (MOST - 1))] for k in range(MOST)]


def planted(model, variant):
    """(what was planted, its line, the text with it): barriers removed, and the first guard off by one."""
    text, own = variant.path.read_text(), own_text(model, variant)
    for k, match in enumerate(evenly(list(BARRIER.finditer(own))), start=1):
        yield f"barrier{k}", text[: match.start()].count("\n") + 1, text[: match.start()] + ";" + text[match.end() :]
    if match := GUARD.search(own):
        off_by_one = f"if ({match[1]} > {match[2]}) return;"
        yield "guard", text[: match.start()].count("\n") + 1, text[: match.start()] + off_by_one + text[match.end() :]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(model, variant, what was planted or None): result}, from one run of everything."""
    folder = tmp_path_factory.mktemp("planted")
    keys, tasks = [], []
    for model, variant in CUDA_VARIANTS:
        files = [(None, variant.path)]
        for what, _, text in planted(model, variant):
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
    mistakes = list(planted(model, variant))
    assert mistakes
    for what, line, _ in mistakes:
        result = results[model.name, variant.name, what]
        assert result["verdict"] == "fail", f"{what} in line {line}: {result['reason']}"
        (finding,) = result["findings"]
        kind = "out of bounds|race between blocks" if what == "guard" else "race"
        assert re.search(rf"{variant.name}_{what}\.py:\d+: .*({kind})", finding), finding
