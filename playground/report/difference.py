"""What one variant's file changed over another's: by section, function by function, and as a diff with line numbers.

Two steps of a ladder share little text, and a plain diff of their files pairs lines that have nothing to do with each other. So
files are first taken apart: the docstring by its headings, the C++ and CUDA texts and the Python by their functions. What has
the same name on both sides is compared; what has no counterpart is new, or removed.
"""

import ast
import difflib
import re
from dataclasses import dataclass, field

from pygments.lexers import CudaLexer
from pygments.token import Comment, Name, Punctuation, Text, Whitespace
from rich.text import Text as StyledText

from playground.catalog import CatalogError
from playground.report.figures import printable
from playground.report.layout import INDENT, print_folded, print_whole

CONTEXT = 3  # unchanged lines around a change
TITLES = {"CUDA": "CUDA text", "CPP": "C++ text", "BINDING": "binding"}  # of the module constants that hold another language
SURROUNDINGS = "(rest)"  # what is in no function: includes, constants, declarations, imports
STYLES = {"+": "green", "-": "red", "@": "cyan"}
TRANSPARENT = {"namespace", "extern"}  # what they begin may hold functions: its braces do not count
NOT_NAMES = {"__launch_bounds__", "__cluster_dims__", "__attribute__", "alignas", "decltype", "asm", "if", "for", "while"}


@dataclass
class Piece:
    """A function, a class, or the part of the docstring below a heading: (number in the file, text) of its lines."""

    lines: list = field(default_factory=list)

    @property
    def texts(self):
        return [text for _, text in self.lines]


@dataclass
class Change:
    """How a piece differs: `old` or `new` is None where there is none."""

    name: str
    old: Piece | None
    new: Piece | None

    @property
    def kind(self):
        if self.old is None or self.new is None:
            return "removed" if self.old else "new"
        return "same" if self.old.texts == self.new.texts else "changed"


def sections(path):
    """{title: {name: Piece}} of a Python file, read and not run. Raises CatalogError for what is no Python."""
    lines = [printable(line.expandtabs(4)) for line in path.read_text(encoding="utf-8", errors="replace").split("\n")]
    try:
        body = ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError) as error:
        raise CatalogError(f"{path.name} is not Python: {error}") from None
    numbered = list(enumerate(lines, start=1))
    found, python, taken = {}, {}, set()
    for node in body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        part = numbered[first - 1 : node.end_lineno]
        if node is body[0] and _is_text(getattr(node, "value", None)):
            found["docstring"] = _by_heading(part)
        elif isinstance(node, ast.Assign) and _is_text(node.value) and len(part) > 1:
            name = ast.unparse(node.targets[0])
            found[TITLES.get(name, name)] = _by_function(part)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            python.setdefault(node.name, Piece()).lines += part
        else:
            continue
        taken |= {number for number, _ in part}
    rest = [line for line in numbered if line[0] not in taken and line[1].strip()]
    found["Python"] = {SURROUNDINGS: Piece(rest), **python}
    return found


def compare(old, new):
    """{section: [Change]} of two files' sections, in the order of the new one; what was removed comes last."""
    titles = [*new, *(title for title in old if title not in new)]
    result = {}
    for title in titles:
        before, after = old.get(title, {}), new.get(title, {})
        names = [*after, *(name for name in before if name not in after)]
        result[title] = [Change(name, before.get(name), after.get(name)) for name in names]
    return result


def show(old, new, console):
    """Print what the variant `new` changed over `old`: first in a few lines, then line by line."""
    changes = compare(sections(old.path), sections(new.path))
    print_folded(console, f"{_label(old)} -> {_label(new)}", style="bold")
    if not any(change.kind != "same" for section in changes.values() for change in section):
        print_folded(console, "The two files are the same.")
        return
    for title, section in changes.items():
        console.print()
        added, removed = _counts(section)
        print_folded(console, f"{title}: {f'+{added} -{removed} lines' if added or removed else 'the same'}", style="bold")
        for kind in ("new", "removed", "changed", "same"):
            names = ", ".join(_described(change) for change in section if change.kind == kind)
            if names and (added or removed):
                print_folded(console, StyledText(f"{kind:9}").append(names), INDENT, hanging=9)
    for title, section in changes.items():
        for change in section:
            if change.kind != "same":
                console.print()
                print_folded(console, f"{title}: {change.name}, {change.kind}", style="bold")
                for line in diff(change):
                    print_whole(console, StyledText(line, style=STYLES.get(line[0], "")))


def diff(change):
    """The lines of a unified diff of one piece, with the numbers that lines have in their files."""
    old = change.old.lines if change.old else []
    new = change.new.lines if change.new else []
    matcher = difflib.SequenceMatcher(None, [text for _, text in old], [text for _, text in new], autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        first, last = group[0], group[-1]
        yield f"@@ -{_span(old[first[1] : last[2]])} +{_span(new[first[3] : last[4]])} @@"
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                yield from (f" {text}" for _, text in old[old_start:old_end])
                continue
            yield from (f"-{text}" for _, text in old[old_start:old_end])
            yield from (f"+{text}" for _, text in new[new_start:new_end])


def _span(lines):
    return f"{lines[0][0]},{len(lines)}" if lines else "0,0"


def _label(variant):
    return f"{variant.path.parent.name}/{variant.name}"


def _counts(section):
    """Lines that are new and lines that are gone."""
    lines = [line for change in section if change.kind != "same" for line in diff(change)]
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)


def _described(change):
    """A name, and 'kernel' behind it where it is one."""
    texts = (change.new or change.old).texts
    return f"{change.name} (kernel)" if any(text.startswith("__global__") for text in texts) else change.name


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _by_heading(lines):
    """A docstring's parts: its title with what follows it, and each heading at the left edge with the indented text below."""
    pieces, name = {}, "title"
    for index, line in enumerate(lines):
        following = lines[index + 1][1] if index + 1 < len(lines) else ""
        if index and line[1] and not line[1].startswith((" ", '"')) and following.startswith(" "):
            name = line[1]
        if line[1].strip():
            pieces.setdefault(name, Piece()).lines.append(line)
    return pieces


def _by_function(lines):
    """The functions, structs and classes of a C++ text, each with the comment above it; overloads are one piece."""
    pieces = {SURROUNDINGS: Piece()}
    quotes = re.compile(r'^\w+ = r?("""|\'\'\')|("""|\'\'\')$')
    plain = [(number, quotes.sub("", text)) for number, text in lines]
    for chunk in _chunks(plain):
        name = _defined_name("\n".join(text for _, text in chunk))
        pieces.setdefault(name or SURROUNDINGS, Piece()).lines += chunk
    return pieces


def _chunks(lines):
    """Runs of lines between blank lines that are inside no brace but a namespace's."""
    chunk = []
    for line, depth in zip(lines, _depths([text for _, text in lines]), strict=True):
        if line[1].strip() or (chunk and depth > 0):
            chunk.append(line)
        elif chunk:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _depths(texts):
    """How many braces are open where each line begins. Those of namespaces, in strings and in comments do not count."""
    opened, found, begins = [], [0], None  # `begins` is the first word of the statement
    for kind, value in _tokens("\n".join(texts)):
        if kind in Punctuation and value == "{":
            opened.append(begins not in TRANSPARENT)
        elif kind in Punctuation and value == "}" and opened:
            opened.pop()
        ends = kind in Punctuation and value in ("{", "}", ";")
        begins = None if ends else begins or (None if _is_blank(kind) else value)
        found += [sum(opened)] * value.count("\n")
    return found


def _tokens(text):
    return CudaLexer(stripnl=False, ensurenl=False).get_tokens(text)


def _defined_name(text):
    """The name of the first function, struct or class whose body is in the text; None where it holds none."""
    tokens = [(kind, value) for kind, value in _tokens(text) if not _is_blank(kind)]
    depth, opened, begins = 0, None, None
    for index, (kind, value) in enumerate(tokens):
        before = tokens[index - 1][1] if index else ""
        begins = begins or value
        if depth == 0 and before in ("struct", "class", "union") and kind in Name and _body_follows(tokens[index + 1 :]):
            return f"{before} {value}"
        if value == "(":
            if depth == 0:
                opened = before
            depth += 1
        elif value == ")":
            depth -= 1
            if depth == 0 and opened.isidentifier() and opened not in NOT_NAMES and _body_follows(tokens[index + 1 :]):
                return opened
        elif value == "{" and depth == 0 and begins not in TRANSPARENT:
            return None
        if value in ("{", ";"):
            begins = None
    return None


def _is_blank(kind):
    return kind in Comment or kind in Whitespace or kind is Text


def _body_follows(tokens):
    """Whether a brace opens before anything ends the declaration."""
    for _, value in tokens:
        if value in ("{", ";", "(", ","):
            return value == "{"
    return False
