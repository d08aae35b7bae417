"""The order of playground's folders: imports go down only, and in no circle (the contracts are in pyproject.toml)."""

import re
import tomllib

from importlinter import cli

from playground import catalog


def test_no_import_points_upward(monkeypatch, capsys):
    monkeypatch.chdir(catalog.ROOT)
    assert cli.lint_imports(no_cache=True) == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_page_draws_the_floors_as_they_are_checked():
    contracts = tomllib.loads((catalog.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [set(floor.split(" | ")) for floor in contracts[0]["layers"]]
    page = (catalog.ROOT / "docs" / "design.md").read_text()
    (drawn,) = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if block.startswith("command/")]
    assert [set(re.findall(r"^(\w+)(?:/|\.py)", floor, re.MULTILINE)) for floor in drawn.split("\n\n")] == checked
