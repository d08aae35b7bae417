"""compare.py --explain VARIANT: a docstring taken apart, and laid out for any width."""

import io

import pytest
from rich.console import Console

from playground import catalog
from playground.report import explanation
from playground.report.explanation import Columns, Lines, Prose, sections

VARIANTS = [pytest.param(m, v, id=f"{m.name}/{v.name}") for m in catalog.models() for v in catalog.variants(m)]

DOCSTRING = """pool, v2: one kernel.

Like v1, but the tail moves into the kernel, and what is written is one number a sample, so
that nothing else leaves the chip.

Why it is faster
    Memory waits, and so do the threads that read it, which is what this variant was made to
    avoid. It reads once.
    A sentence that begins a line of its own.

Mathematics
    out[b]  = sum over i of sigmoid(y[b,i])
            = another line of the same
    d out[b] / d y[b,i] = s * (1 - s), where s is what the forward pass has computed already
    and kept.
    The rest is prose again.

Launches
    kernel      grid         block  work of a thread
    fused       (batch,)     256    every 256th value of its sample, in order
    long_names  (a longer1,) 1      nothing
                                    that is long
    What follows is no row.

Takes
    Anything.
"""


@pytest.fixture
def parsed():
    title, parts = sections(DOCSTRING)
    return title, {part.heading: part.blocks for part in parts}


def test_title_and_headings(parsed):
    title, parts = parsed
    assert title == "pool, v2: one kernel."
    assert list(parts) == [None, "Why it is faster", "Mathematics", "Launches", "Takes"]


def test_prose_is_filled_anew_but_sentences_on_lines_of_their_own_stay(parsed):
    _, parts = parsed
    assert parts[None] == [
        Prose(
            "Like v1, but the tail moves into the kernel, and what is written is one number a sample, so that nothing else "
            "leaves the chip."
        )
    ]
    why = parts["Why it is faster"]
    assert [block.text.split()[0] for block in why] == ["Memory", "A"]
    assert why[0].text.endswith("made to avoid. It reads once.")


def test_formulas_keep_their_lines(parsed):
    _, parts = parsed
    formulas, prose = parts["Mathematics"]
    assert isinstance(formulas, Lines)
    assert [line.split("=")[0].strip() for line in formulas.lines] == ["out[b]", "", "d out[b] / d y[b,i]"]
    assert formulas.lines[2].endswith("has computed already and kept.")
    assert prose == Prose("The rest is prose again.")


def test_tables_are_found(parsed):
    _, parts = parsed
    table, after = parts["Launches"]
    assert table == Columns(
        ["kernel", "grid", "block", "work of a thread"],
        [
            ["fused", "(batch,)", "256", "every 256th value of its sample, in order"],
            ["long_names", "(a longer1,)", "1", "nothing that is long"],
        ],
    )
    assert after == Prose("What follows is no row.")


def test_parent():
    assert explanation.parent(DOCSTRING) == "v1"
    assert explanation.parent("pool, v1: a start.\n\nLikes nothing.") is None


def shown(variant, width, model=None, **console):
    file = io.StringIO()
    siblings = catalog.variants(model) if model else ()
    explanation.show(variant, Console(file=file, width=width, **console), siblings)
    return file.getvalue()


@pytest.mark.parametrize("model, variant", VARIANTS)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_variant_at_any_width(model, variant, width):
    text = shown(variant, width, model)
    assert max(map(len, text.splitlines())) <= width
    if width == 200:  # narrow tables fold their cells
        missing = set(explanation.docstring(variant.path).split()) - set(text.split())
        assert not missing, "every word of the docstring is there"
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert "Mathematics" in headings and "Floor" in headings and "Takes" in headings


def test_it_ends_with_the_command_that_shows_the_change():
    model = catalog.find_model("conv_pool_sigmoid_sum")
    text = shown(catalog.find_variant(model, "v2_single_kernel"), 200, model)
    assert "compare.py --diff conv_pool_sigmoid_sum/v1_fused_tail conv_pool_sigmoid_sum/v2_single_kernel" in text


def test_a_strangers_text_is_not_obeyed(write_variant):
    variant = write_variant("odd", '"""[red]title[/nonsense] \\x1b[2J.\n\nbody\n"""\n')
    text = shown(variant, 80, force_terminal=True)
    assert "[red]title[/nonsense]" in text and "\x1b[2J" not in text


@pytest.mark.parametrize("text, complaint", [("x = 1\n", "has no docstring"), ("def (:\n", "is not Python")])
def test_what_explains_nothing(write_variant, text, complaint):
    with pytest.raises(catalog.CatalogError, match=complaint):
        explanation.docstring(write_variant("silent", text).path)
