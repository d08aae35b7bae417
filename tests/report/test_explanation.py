"""compare.py --explain VARIANT: a docstring, filled to any width."""

import pytest
from drawn import printed

from playground import catalog
from playground.report import explanation
from tests.kernels.project_variants import variants

DOCSTRING = """pool, v2: one kernel.

Like v1, but the tail moves into the kernel,
and nothing else leaves the chip.

Mathematics
    out[b] = sum over i of sigmoid(y[b,i])
    d out[b] / d y[b,i] = s * (1 - s)

    The rest is
    prose.

Takes
    Anything.
"""


def test_prose_is_filled_and_formulas_keep_their_lines(write_variant):
    lines = shown(write_variant("odd", f'''"""{DOCSTRING}"""\n'''), 120).splitlines()
    assert lines[0] == "pool, v2: one kernel." and "Mathematics" in lines and "Takes" in lines and "  Anything." in lines
    assert "Like v1, but the tail moves into the kernel, and nothing else leaves the chip." in lines
    assert "  d out[b] / d y[b,i] = s * (1 - s)" in lines and "  The rest is prose." in lines


def shown(variant, width, model=None, **console):
    siblings = catalog.variants(model) if model else ()
    return printed(lambda console: explanation.show(variant, console, siblings), width, **console)


@pytest.mark.parametrize("model, variant", variants())
def test_every_variant_in_a_narrow_terminal(model, variant):
    text = shown(variant, 60, model)
    assert max(map(len, text.splitlines())) <= 60
    missing = set(explanation.docstring(variant.path).split()) - set(text.split())
    assert not missing, "every word of the docstring is there"
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert "Mathematics" in headings and "Floor" in headings and "Takes" in headings


@pytest.mark.parametrize(("name", "before"), [("v2_single_kernel", "v1_fused_tail"), ("v5_hopper", "v4_tensor_core")])
def test_it_ends_with_the_command_that_shows_the_change(name, before):
    model = catalog.find_model("conv_pool_sigmoid_sum")
    text = shown(catalog.find_variant(model, name), 200, model)
    assert f"compare.py --diff conv_pool_sigmoid_sum/{before} conv_pool_sigmoid_sum/{name}" in text


def test_an_untrusted_text_is_not_obeyed(write_variant):
    variant = write_variant("odd", '"""[red]title[/nonsense] \\x1b[2J.\n\nbody\n"""\n')
    text = shown(variant, 80, force_terminal=True)
    assert "[red]title[/nonsense]" in text and "\x1b[2J" not in text


@pytest.mark.parametrize("text, complaint", [("x = 1\n", "has no docstring"), ("def (:\n", "is not Python")])
def test_what_explains_nothing(write_variant, text, complaint):
    with pytest.raises(catalog.CatalogError, match=complaint):
        explanation.docstring(write_variant("silent", text).path)
