"""The order of playground's folders: imports go down only, and in no circle (the contracts are in pyproject.toml)."""

from importlinter import cli

from playground import catalog


def test_no_import_points_upward(monkeypatch, capsys):
    monkeypatch.chdir(catalog.ROOT)
    assert cli.lint_imports(no_cache=True) == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out
