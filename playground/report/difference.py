"""What one variant's file changed over another's: by section, function by function, and as a diff with line numbers.

Two steps of a ladder share little text, and a plain diff of their files pairs lines that have nothing to do with each other. So
the docstring is taken apart by its headings, C++, CUDA and Python by what is defined at the left edge. What has the same name
in both files is compared.
"""

import ast
import difflib
import re

from rich.text import Text

from playground.catalog import CatalogError
from playground.report.figures import printable
from playground.report.layout import INDENT, print_folded, print_whole

TITLES = {"CUDA": "CUDA text", "CPP": "C++ text", "BINDING": "binding"}  # of the module constants that hold another language
SURROUNDINGS = "(rest)"  # what is in no function: includes, constants, declarations, imports
STYLES = {"+": "green", "-": "red", "@": "cyan"}
OPENS = re.compile(r'(namespace\b.*|extern "C" *)\{$|#.*[^\\]$')  # a line that is a statement of its own
ATTRIBUTE = re.compile(r"__\w+__ *\((?:[^()]|\([^()]*\))*\)")
TYPE = re.compile(r"\b(?:struct|class|union) +(?:alignas\(.*?\) +)?\w+")
CALLED = re.compile(r"(?!alignas|decltype|asm|if\b|for\b|while\b)\b(\w+) *\(")


def sections(path):
    """Return {title: {name: [(number, text) of its lines]}} of a Python file. Raises CatalogError for what is no Python."""
    lines = [printable(line.expandtabs(4)) for line in path.read_text(encoding="utf-8", errors="replace").split("\n")]
    try:
        body = ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError) as error:
        raise CatalogError(f"{path.name} is not Python: {error}") from None
    rest = dict(enumerate(lines, start=1))
    found, python = {}, {SURROUNDINGS: []}
    for node in body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        part = [(number, rest.get(number, "")) for number in range(first, node.end_lineno + 1)]
        match node:
            case ast.Expr(ast.Constant(str())) if node is body[0]:
                found["docstring"] = _pieces(_by_heading(part))
            case ast.Assign([ast.Name(name)], ast.Constant(str())) if len(part) > 1:
                found[TITLES.get(name, name)] = _pieces(_by_function(part), {SURROUNDINGS: []})
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                python.setdefault(name, []).extend(part)
            case _:
                continue
        rest = {number: text for number, text in rest.items() if not first <= number <= node.end_lineno}
    python[SURROUNDINGS] = [line for line in rest.items() if line[1].strip()]
    return found | {"Python": python}


def _pieces(named, pieces=None):
    pieces = pieces or {}
    for name, line in named:
        if line[1].strip() or (pieces.get(name) and name != SURROUNDINGS):
            pieces.setdefault(name, []).append(line)
    return pieces


def _by_heading(lines):
    """(heading, line) of each line of a docstring; what follows the title at the left edge is its own."""
    name = "title"
    for index, line in enumerate(lines):
        following = lines[index + 1][1] if index + 1 < len(lines) else ""
        if index and line[1] and not line[1].startswith((" ", '"')) and following.startswith(" "):
            name = line[1]
        yield name, line


def _by_function(lines):
    """(name, line) of each line of a C++ text: that of the function or type whose text, comment and template it belongs to."""
    lines = [(number, re.sub(r'^\w+ = r?("""|\'\'\')|("""|\'\'\')$', "", text)) for number, text in lines]
    statement = []
    for index, (number, text) in enumerate(lines):
        statement.append((number, text))
        following = next((later for _, later in lines[index + 1 :] if later.strip()), "end")
        ends_macro = index and lines[index - 1][1].endswith("\\") and not text.endswith("\\")
        ends = ends_macro or OPENS.match(text) or re.search(r"[;}] *(//.*)?$", text)
        if index == len(lines) - 1 or (ends and not following.startswith((" ", "}"))):
            name = _defined(re.sub(r"//.*", "", "\n".join(text for _, text in statement)))
            yield from ((name, line) for line in statement)
            statement = []


def _defined(text):
    """Return the name of the function or type that a statement defines; SURROUNDINGS for another."""
    text = ATTRIBUTE.sub("", re.sub(r"^ *#.*", "", text, flags=re.MULTILINE))
    header, brace, _ = text.partition("{")
    before = header.partition("(")[0]
    if brace and TYPE.search(before) and ("(" not in header or "alignas" in header):
        return TYPE.search(header)[0]
    called = CALLED.search(header)
    return called[1] if brace and called and "=" not in before and ";" not in header else SURROUNDINGS


def compare(old, new):
    """Return {section: {name: (kind, old lines, new lines)}}, in the order of the new file; what was removed comes last.

    The kind is "new", "removed", "changed" or "same".
    """
    result = {}
    for title in dict.fromkeys([*new, *old]):
        sides = old.get(title, {}), new.get(title, {})
        result[title] = {name: _change(*(side.get(name) for side in sides)) for name in dict.fromkeys([*sides[1], *sides[0]])}
    return result


def _change(old, new):
    if old is None or new is None:
        return ("new" if old is None else "removed"), old or [], new or []
    return ("same" if [text for _, text in old] == [text for _, text in new] else "changed"), old, new


def show(old, new, console):
    """Print what the variant `new` changed over `old`: first in a few lines, then line by line."""
    changes = compare(sections(old.path), sections(new.path))
    print_folded(console, " -> ".join(f"{each.path.parent.name}/{each.name}" for each in (old, new)), style="bold")
    if all(kind == "same" for section in changes.values() for kind, _, _ in section.values()):
        return print_folded(console, "The two files are the same.")
    for title, section in changes.items():
        lines = [line[0] for kind, *sides in section.values() if kind != "same" for line in diff(*sides)]
        told = f"+{lines.count('+')} -{lines.count('-')} lines" if lines else "the same"
        console.print()
        print_folded(console, f"{title}: {told}", style="bold")
        for kind in ("new", "removed", "changed", "same") if lines else ():
            names = [_described(name, after or before) for name, (what, before, after) in section.items() if what == kind]
            if names:
                print_folded(console, Text(f"{kind:9}").append(", ".join(names)), INDENT, hanging=9)
    for title, section in changes.items():
        for name, (kind, *sides) in section.items():
            if kind != "same":
                console.print()
                print_folded(console, f"{title}: {name}, {kind}", style="bold")
                for line in diff(*sides):
                    print_whole(console, Text(line, style=STYLES.get(line[0], "")))


def diff(old, new):
    """Return the lines of a unified diff of two pieces, with the numbers that lines have in their files."""
    lines = difflib.unified_diff([text for _, text in old], [text for _, text in new], lineterm="")
    return [_renumbered(line, old, new) if line.startswith("@@") else line for line in list(lines)[2:]]


def _renumbered(line, old, new):
    spans = zip("-+", (old, new), re.findall(r"[-+](\d+)(?:,(\d+))?", line), strict=True)
    told = [f"{sign}{side[int(at) - 1][0] if count != '0' else 0},{count or 1}" for sign, side, (at, count) in spans]
    return f"@@ {' '.join(told)} @@"


def _described(name, lines):
    """A name, and 'kernel' behind it where it is one."""
    return f"{name} (kernel)" if any("__global__" in text for _, text in lines) and name != SURROUNDINGS else name
