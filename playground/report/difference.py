"""What one variant's file changed over another's: by section, function by function, and as a diff with line numbers."""

import ast
import difflib
import re

from rich.text import Text

from playground.catalog import parsed
from playground.report.layout import INDENT, print_folded
from playground.report.text import printable

TITLES = {"CUDA": "CUDA text", "CPP": "C++ text", "BINDING": "binding"}  # of the module constants that hold another language
SURROUNDINGS = "(rest)"  # what is in no function: includes, constants, declarations, imports
STYLES = {"+": "green", "-": "red", "@": "cyan"}
ENDS = re.compile(r'^ *$|[;}] *(//.*)?$|^#.*[^\\]$|^(namespace\b.*|extern "C" *)\{$|"""$')  # the last line of a piece
NOT_NAMES = re.compile(r'^(#|").*|//.*|__\w+__ *\((?:[^()]|\([^()]*\))*\)|alignas\(.*?\)', re.MULTILINE)
NAME = re.compile(
    r"^(?:async )?(?:def|class) (\w+)|^[^(=;{]*?\b((?:struct|class|union) +\w+)[^(;]*\{"
    r"|\A\s*[^=;{]*?(?!decltype|asm)\b(\w+) *\((?s:[^;]*?)\{",
    re.MULTILINE,
)


def sections(path):
    """Return {title: {name: [(number, text) of its lines]}} of a Python file. Raises CatalogError for what is no Python."""
    lines = [printable(line.expandtabs(4)) for line in path.read_text(encoding="utf-8", errors="replace").split("\n")]
    tree = parsed(path, "\n".join(lines))
    end = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
    titles = dict(_titles(tree))
    pieces, before = [], ""
    for number, text in enumerate(lines, start=1):
        title = "docstring" if number <= end else titles.get(number, "Python")
        if not pieces or pieces[-1][0] != title or (ENDS.search(before) and text[:1].strip(' )}"')):
            pieces.append((title, []))
        pieces[-1][1].append((number, text))
        before = text
    found = {}
    for title, piece in pieces:
        text = "\n".join(text for _, text in piece).rstrip()
        has_heading = title == "docstring" and re.match(r".*\n ", text)
        name = piece[0][1] if has_heading else "title" if title == "docstring" else _name(text)
        found.setdefault(title, {}).setdefault(name, []).extend(piece[: text.count("\n") + bool(text)])
    return found


def _titles(tree):
    """(line, title) of the lines of texts in another language: strings of several lines that the module gives a name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
            name, value = node.targets[0].id, node.value.value
            if isinstance(value, str) and node.end_lineno > node.lineno:
                title = TITLES.get(name, TITLES["CUDA"] if "__global__" in value else name)
                yield from ((line, title) for line in range(node.lineno, node.end_lineno + 1))


def _name(text):
    named = NAME.search(NOT_NAMES.sub("", text).strip())
    return re.sub(" +", " ", next(filter(None, named.groups()))) if named else SURROUNDINGS


def show(old, new, console):
    """Print what the variant `new` changed over `old`: first in a few lines, then line by line."""
    before, after = sections(old.path), sections(new.path)
    print_folded(console, " -> ".join(f"{each.path.parent.name}/{each.name}" for each in (old, new)), style="bold")
    details = []
    for title in dict.fromkeys([*after, *before]):
        sides = before.get(title, {}), after.get(title, {})
        told = {name: _diff(*(side.get(name, []) for side in sides)) for name in dict.fromkeys([*sides[1], *sides[0]])}
        signs = [line[0] for _, lines in told.values() for line in lines]
        console.print()
        counts = f"+{signs.count('+')} -{signs.count('-')} lines" if signs else "the same"
        print_folded(console, f"{title}: {counts}", style="bold")
        for kind in ("new", "removed", "changed", "same") if signs else ():
            names = [name for name, (what, _) in told.items() if what == kind]
            kernels = [any("__global__" in text for side in sides for _, text in side.get(name, ())) for name in names]
            marked = [f"{n}{' (kernel)' * (is_one and n != SURROUNDINGS)}" for n, is_one in zip(names, kernels, strict=True)]
            if names:
                print_folded(console, Text(f"{kind:9}").append(", ".join(marked)), INDENT, hanging=9)
        details += [(f"{title}: {name}, {kind}", lines) for name, (kind, lines) in told.items() if lines]
    for heading, lines in details:
        console.print()
        print_folded(console, heading, style="bold")
        for line in lines:
            console.print(Text(line, style=STYLES.get(line[0], "")), highlight=False, soft_wrap=True)  # whole: it is piped


def _diff(*sides):
    """Return "new", "removed", "changed" or "same", and a unified diff with the numbers that lines have in their files."""

    def renumbered(match):
        at, count = int(match[2]), match[3] or "1"
        return f"{match[1]}{sides['-+'.index(match[1])][at - 1][0] if count != '0' else 0},{count}"

    lines = list(difflib.unified_diff(*([text for _, text in side] for side in sides), lineterm=""))[2:]
    lines = [re.sub(r"([-+])(\d+)(?:,(\d+))?", renumbered, line) if line[:2] == "@@" else line for line in lines]
    return "same" if not lines else "changed" if all(sides) else "new" if sides[1] else "removed", lines
