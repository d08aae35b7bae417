"""The table of all checks: each has its function, and the page says what it says."""

import pytest

from playground import catalog
from playground.judge import behaviour, checks, global_state, probes
from tools import markdown


def test_each_has_a_function_and_a_name_of_its_own():
    assert all(callable(getattr(probes, check.function)) for check in checks.PROBES)
    assert all(callable(getattr(behaviour.StressTests, f"_{check.function}")) for check in checks.STRESS_TESTS)
    names = [check.name for check in (*checks.PROBES, *checks.SIDE_EFFECTS, *checks.WATCHED, *checks.STRESS_TESTS)]
    assert len(set(names)) == len(names) and set(global_state.FAVOURING) <= set(names)


def test_what_costs_drop_in_alone_says_what_would_remove_it():
    assert all(check.caveat.remedy for check in checks.ALL if check.costs == checks.DROP_IN)


@pytest.mark.parametrize("name", markdown.TABLES)
def test_the_page_has_the_tables(name):
    """`python -m tools.markdown` prints them."""
    page = (catalog.ROOT / "docs" / "what_a_pass_proves.md").read_text(encoding="utf-8")
    assert f"<!-- checks: {name} -->\n{markdown.table_of_checks(markdown.TABLES[name])}\n" in page
