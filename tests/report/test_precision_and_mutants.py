"""How tables say what a lower precision and mutants mean."""

import io
import re

import pytest
from rich.console import Console

from playground.driver.session import NOT_PROVED
from playground.report import document, figures, terminal


def draw(view, report, width=160, **console):
    file = io.StringIO()
    view(Console(file=file, width=width, **console), {}).end(report)
    return " ".join(file.getvalue().split())


@pytest.mark.parametrize("view", [terminal.Summary, terminal.Details])
def test_mutants_are_counted_and_survivors_named(view, gpu_document):
    _, second, *_ = gpu_document["results"]
    assert "mutants" not in draw(view, gpu_document)
    second["check"] |= {"mutants_rejected": "14/14", "mutants_survived": []}
    text = draw(view, gpu_document)
    assert "14/14 rejected" in text and "cannot be told" not in text
    second["check"] |= {"mutants_rejected": "13/14", "mutants_survived": ["conv2d: bias dropped"]}
    assert "13/14 rejected; cannot be told from the original: conv2d: bias dropped" in draw(view, gpu_document)


def test_a_speed_up_in_a_lower_precision_is_labelled(gpu_document):
    _, second, *_ = gpu_document["results"]
    second["variant_precision"] = "fp16"
    text = draw(terminal.Summary, gpu_document)
    assert "cuda, fp16 against tf32" in text and "49.4x fp16" in text
    assert "faster in fp16" in text
    document.validate(gpu_document)
    assert "forward, in fp16: faster than" in draw(terminal.Details, gpu_document)
    assert "fp16 against tf32" in draw(terminal.Details, gpu_document)
    coloured = draw(terminal.Summary, gpu_document, force_terminal=True, color_system="standard")
    assert "x fp16" in coloured and not re.search(r"\x1b\[32m[\d.]+x fp16", coloured), "green would call it faster"


def test_a_speed_up_that_is_not_proved_says_so_wherever_it_stands(gpu_document):
    _, second, *_ = gpu_document["results"]
    second["speedup_proof"] = NOT_PROVED
    document.validate(gpu_document)
    assert f"49.4x {NOT_PROVED}" in draw(terminal.Summary, gpu_document)
    assert NOT_PROVED in draw(terminal.Details, gpu_document)
    assert figures.labelled("49.4x", second) == f"49.4x {NOT_PROVED}"


def test_a_lower_precision_does_not_count_in_the_mean(gpu_document):
    means = figures.geometric_means(gpu_document["results"])
    for result in gpu_document["results"]:
        result["variant_precision"] = "fp16"
    assert means and figures.geometric_means(gpu_document["results"]) == {}


@pytest.mark.parametrize("value", ["conv2d: bias dropped", [1], {"a": 1}])
def test_survivors_must_be_texts(value, gpu_document):
    gpu_document["results"][0]["check"]["mutants_survived"] = value
    with pytest.raises(document.DocumentError, match="mutants_survived: expected a list of texts"):
        document.validate(gpu_document)
