"""Mistakes planted in copies of the project's CUDA variants, and what check mode says of them and of the variants themselves.

Both go the way a user goes: through the driver, on the emulator, in three schedules. Each model has a test file of its own, so
that the test processes share the work; tests_of() is what stands in it.
"""

import re

import pytest

from playground import catalog
from playground.driver.runner import Runner
from playground.driver.task import Options, Task
from playground.report.progress import Progress

BARRIER = re.compile(r"(?<=    )(__syncthreads\(\)|(?:named_barrier|bar_sync)\([^;]*\));")
# The guard that keeps a last, incomplete block inside its array, where a variant has one.
GUARD = re.compile(r"if \((index|window|k) >= ([\w* ]+)\) return;")
# Where the threads of a block share the steps of a loop.
LOOP = re.compile(r"for \((?:int|int64_t|unsigned) (\w+) = threadIdx\.x; \1 < ([^;]+);")
# For asynchronous copies and matrix products. (Kernels run one after the other: griddepcontrol waits for nothing.)
WAIT = re.compile(
    r"(?<=[\s{])(?!griddepcontrol)((?:\w+\.)?(?:wait\w*|\w+_(?:wait|wait_all|acquire)|\w*mma_wait(?:_group)?<\d>|\w+_wait_read<\d>)\([^;{}]*\));"
)
# Whose last loop fills a part of the one dynamic shared array: a step too many writes to the next part, which is not noticed,
# so it has one too few.
ONE_SHORT = {("conv_pool_sigmoid_sum", "v5_hopper"), ("conv3d_div_max_gap_bias_sum", "v4_tensor_core")}
# What shows only when a buffer is used again, and consumers' waits, which are neither first nor last of their files:
# {(model, variant): {what: (text, what stands in its place)}}.
BY_HAND = {
    ("conv3d_div_max_gap_bias_sum", "v4_tensor_core"): {"wait3": ("pipeline.consumer_wait(n + 1);", ";")},
    ("conv3d_div_max_gap_bias_sum", "v5_hopper"): {
        "wait3": ("pipeline.consumer_wait(band + 1);", ";"),
        "turn": ("line += segment.rows, turn ^= 1)", "line += segment.rows)"),
        "arrival": (
            "pipeline.consumer_release(first_band + segment.rows);",
            "pipeline.consumer_release(first_band + segment.rows), pipeline.consumer_release(first_band + segment.rows);",
        ),
    },
    ("alexnet_conv1", "v5_hopper"): {"release": ("mbarrier_try_wait(pipeline.empty(), pipeline.parity ^ 1);", ";")},
}
MOST = 2  # barriers and waits of a variant: each copy has to be compiled
KINDS = {
    "barrier": "race",
    "wait": "race|not waited for|invalid barrier|barrier never completes",
    "guard": "out of bounds|race between blocks",
    "index": "out of bounds|race|uninitialised|not waited for",
    "turn": "race",
    "arrival": "invalid barrier|barrier never completes",
    "release": "race",
}


def own(pattern, model, variant):
    """The places of a variant's text that match, run, and, with two lines on each side, stand in no earlier variant of the
    model."""
    text = variant.path.read_text()
    lines = text.splitlines()
    order = cuda_variants(model)  # of the ladder
    earlier = [each.path.read_text() for each in order[: [each.name for each in order].index(variant.name)]]

    def is_inherited(match):
        number = text[: match.start()].count("\n")
        return any("\n".join(lines[number - 2 : number + 3]) in other for other in earlier)

    return [match for match in pattern.finditer(text) if not is_inherited(match)]


def evenly(found):
    """At most MOST of them: first, last, and some between."""
    if len(found) <= MOST:
        return found
    return [found[round(k * (len(found) - 1) / (MOST - 1))] for k in range(MOST)]


def planted(model, variant):
    """(what was planted, its line, the text with it): barriers and waits removed, a guard and the last loop's bound
    off by one, and what is planted by hand."""
    text = variant.path.read_text()
    waits, barriers = own(WAIT, model, variant), own(BARRIER, model, variant)
    edits = [(f"barrier{k}", match.span(), ";") for k, match in enumerate(evenly(barriers), start=1)]
    edits += [(f"wait{k}", match.span(), ";") for k, match in enumerate(evenly(waits), start=1)]
    for match in own(GUARD, model, variant)[:1]:
        edits.append(("guard", match.span(), f"if ({match[1]} > {match[2]}) return;"))
    for match in own(LOOP, model, variant)[-1:]:
        edits.append(("index", match.span(2), f"{match[2]} {'-' if (model.name, variant.name) in ONE_SHORT else '+'} 1"))
    for what, (old, new) in BY_HAND.get((model.name, variant.name), {}).items():
        assert text.count(old) == 1, f"{variant.name} no longer has `{old}` once"
        edits.append((what, (text.index(old), text.index(old) + len(old)), new))
    for what, (start, end), new in edits:
        yield what, text[:start].count("\n") + 1, text[:start] + new + text[end:]


def cuda_variants(model):
    return [variant for variant in catalog.variants(model) if variant.backend == "cuda"]


def check(model):
    """{variant's name: result} of a model's CUDA variants under check mode."""
    settings = catalog.SETTINGS["emulator"][model.name]
    tasks = {variant.name: Task(model, variant, "emulator", settings) for variant in cuda_variants(model)}
    with Progress() as progress:
        return dict(zip(tasks, Runner(Options(quick=True), progress).run(list(tasks.values())), strict=True))


def examine(model, folder):
    """{(variant's name, what): result} of copies with what was planted in them, written to the folder; under "strict", of
    variants that have other kernels where TF32 is forbidden.

    Copies are built without optimisation, which is sooner: they run only until the mistake is found.
    """
    strict, copies = {}, {}
    settings = catalog.SETTINGS["emulator"][model.name]
    for variant in cuda_variants(model):
        if has_strict_kernels(variant):
            strict[variant.name, "strict"] = Task(model, variant, "emulator", settings)
        for what, _, text in planted(model, variant):
            path = folder / f"{variant.name}_{what}.py"
            path.write_text(text)
            copies[variant.name, what] = Task(model, catalog.Variant(path.stem, path, "cuda"), "emulator", settings)
    with Progress() as progress:
        results = Runner(Options(quick=True, precision="strict"), progress).run(list(strict.values()))
        results += Runner(Options(quick=True, debug=True), progress).run(list(copies.values()))
    return dict(zip([*strict, *copies], results, strict=True))


def has_strict_kernels(variant):
    """Whether it launches other kernels where PyTorch forbids TF32."""
    return "STRICT" in variant.path.read_text()


def assert_nothing_reported(result):
    assert (result.verdict, result.reason, result.findings) == ("pass", None, [])


def assert_planted_mistakes_are_reported(found, model, variant):
    mistakes = list(planted(model, variant))
    assert mistakes
    for what, line, _ in mistakes:
        result = found[variant.name, what]
        # What only a backward pass shows costs drop-in.
        standard = result.standards.drop_in if variant.name.startswith("training") else result.standards.forward
        assert standard.verdict == "fail", f"{what} in line {line}: {result.reason}"
        (finding,) = result.findings
        assert any(finding in reason for reason in standard.reasons), f"{what} in line {line}: {standard.reasons}"
        kind = KINDS[what.rstrip("0123456789")]
        assert re.search(rf"{variant.name}_{what}\.py:\d+: .*({kind})", finding), finding


def tests_of(name):
    """Return what the test file of the model of this name defines."""
    model = catalog.find_model(name)
    variants = cuda_variants(model)
    each = pytest.mark.parametrize("variant", variants, ids=lambda variant: variant.name)
    strict = pytest.mark.parametrize("variant", list(filter(has_strict_kernels, variants)), ids=lambda variant: variant.name)

    @pytest.fixture(scope="module")
    def checked():
        return check(model)

    @pytest.fixture(scope="module")
    def found(tmp_path_factory):
        return examine(model, tmp_path_factory.mktemp("planted"))

    @each
    def test_nothing_is_reported(checked, variant):
        assert_nothing_reported(checked[variant.name])

    @each
    def test_planted_mistakes_are_reported(found, variant):
        assert_planted_mistakes_are_reported(found, model, variant)

    @strict
    def test_nothing_is_reported_where_tf32_is_forbidden(found, variant):
        assert_nothing_reported(found[variant.name, "strict"])

    tests = test_nothing_is_reported, test_planted_mistakes_are_reported, test_nothing_is_reported_where_tf32_is_forbidden
    return {"checked": checked, "found": found, "pytestmark": pytest.mark.full} | {test.__name__: test for test in tests}
