"""Tables of Markdown. `python -m tools.markdown` prints those of docs/what_a_pass_proves.md."""

from collections.abc import Iterable

from playground.judge.checks import PROBES, SEEN, SHOWN, SIDE_EFFECTS, STRESS_TESTS, WATCHED, Caveat, Check
from playground.report.text import NOTHING, one_line

TABLES = {"PROBES": PROBES, "BEHAVIOUR": (*SIDE_EFFECTS, *WATCHED, *STRESS_TESTS), "SEEN": SEEN}  # of that page


def markdown_table(head, rows):
    """Return a table of Markdown; a row that is too short ends with empty cells, and what was not measured is one."""
    rows = (["" if cell == NOTHING else markdown_cell(cell) for cell in (*row, *[""] * len(head))[: len(head)]] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---", *("--:" for _ in head[1:])), *rows))


def markdown_cell(text):
    """Return one line of text that cannot end a table's cell, the comment marker or the table."""
    return one_line(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def table_of_checks(checks: Iterable[Check]) -> str:
    """Return a table of docs/what_a_pass_proves.md: a row for each tag, with the checks that lead to it."""
    groups: dict[tuple[Caveat, str], list[Check]] = {}
    for each in checks:
        groups.setdefault((each.caveat, each.costs or "nothing"), []).append(each)
    rows = []
    for (caveat, costs), own in groups.items():
        said = "; ".join(f"*{SHOWN.get(each.name, each.name)}*: {each.about}" for each in own)
        rows.append(f"| `{caveat.tag}` | {costs} | {said} |")
    return "\n".join(["| tag | costs | check: complaint |", "|---|---|---|", *rows])


if __name__ == "__main__":
    for name, checks in TABLES.items():
        print(f"<!-- checks: {name} -->\n{table_of_checks(checks)}\n")
