"""A variant's file as highlighted HTML: Python as Python, the CUDA and C++ texts inside as such, findings at their lines.

Whatever the file holds is escaped; characters that would not show, or would turn text around, are written out.
"""

import io
import itertools
import re
import tokenize
from dataclasses import dataclass

from markupsafe import Markup
from pygments.lexers import CppLexer, CudaLexer, PythonLexer
from pygments.token import Comment, Keyword, Literal, Name, Number, Operator, String

from playground.report.page.text import visible

LONGEST_LINE = 1000  # characters; more is left out, with a remark
MOST_LINES = 10_000
AROUND = 12  # lines before and after a finding, where a file is not shown whole
IS_CPP = re.compile(r"^\s*#\s*(include|define|pragma)\b|__global__|\bTORCH_LIBRARY|;\s*$", re.MULTILINE)
IS_CUDA = re.compile(r"__global__|__device__|cuda_runtime|<<<")
LITERAL = re.compile(r"([rRbBuU]*)(\"\"\"|'''|\"|')")

# Token -> class of the style sheet, the most special first; what is not here is plain text.
CLASSES = (
    (Comment.Preproc, "p"),
    (Comment.PreprocFile, "s"),
    (Comment, "c"),
    (String.Doc, "c"),
    (Keyword.Type, "t"),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (String.Affix, "k"),
    (String, "s"),
    (Number, "n"),
    (Name.Function, "f"),
    (Name.Class, "f"),
    (Name.Decorator, "p"),
    (Name.Builtin, "t"),
    (Literal, "s"),
)


@dataclass(frozen=True)
class Embedded:
    """A CUDA or C++ text inside a Python file: [begin, end) in characters."""

    begin: int
    end: int
    is_cuda: bool


def highlighted(text, findings=(), around=None):
    """The lines of the file as <span> elements for a <pre>, those of embedded texts in <code> elements.

    `findings` are (line, text, id); they are put below their lines. With `around`, only so many lines before and after each.
    """
    lines, cut = _shortened(text)
    text = "\n".join(lines)
    embedded = embedded_texts(text)
    inside = _lines_inside(text, embedded)
    rows = [[]]
    for (kind, is_end), group in itertools.groupby(
        zip(_classes(text, embedded), text, strict=True), lambda each: (each[0], each[1] == "\n")
    ):
        part = "".join(character for _, character in group)
        if is_end:
            rows.extend([] for _ in part)
        else:
            shown = visible(part)
            rows[-1].append(Markup("<i class={}>{}</i>").format(Markup(kind), shown) if kind else shown)
    below = {}
    for line, finding, identity in findings:
        below.setdefault(line, []).append((finding, identity))
    shown = range(1, len(rows) + 1)
    if around is not None:
        shown = [number for number in shown if any(abs(number - line) <= around for line in below)]
    html, last, is_code = [], 0, False
    for number in shown:
        if is_code and (number not in inside or number > last + 1):
            html.append(Markup("</code>"))
            is_code = False
        if number > last + 1:
            html.append(_left_out(last + 1, number - 1))
        if number in inside and not is_code:
            html.append(Markup("<code>"))
            is_code = True
        here, last = below.get(number, ()), number
        opening = Markup('<span class="hit">') if here else Markup("<span>")
        html.append(opening + Markup("").join(rows[number - 1]) + Markup("\n</span>"))
        for finding, identity in here:
            note = Markup('<b class="finding" id="{}" role="note"><span class="sign">▲ line {}</span> {}</b>')
            html.append(note.format(identity, number, visible(finding)))
    if is_code:
        html.append(Markup("</code>"))
    if last < len(rows):
        html.append(_left_out(last + 1, len(rows)))
    if cut:
        html.append(Markup('<b class="cut">{}</b>').format(cut))
    return Markup("").join(html)


def _left_out(first, last):
    """What stands instead of these lines; the style sheet's count goes on behind them."""
    remark = '<b class="cut" style="counter-increment:line {}">lines {} to {} are not shown</b>'
    return Markup(remark).format(last - first + 1, first, last)


def embedded_texts(text):
    """The CUDA and C++ texts among a Python file's string literals; none where the file is no Python."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found, before = [], None
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_docstring = before != tokenize.OP  # an assigned or passed literal follows an operator
            opening = LITERAL.match(token.string) if token.type == tokenize.STRING else None  # no f-string
            if opening and "\n" in token.string and not is_docstring:
                begin = starts[token.start[0] - 1] + token.start[1] + opening.end()
                end = starts[token.end[0] - 1] + token.end[1] - len(opening[2])
                if IS_CPP.search(text, begin, end):
                    found.append(Embedded(begin, end, bool(IS_CUDA.search(text, begin, end))))
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                before = token.type
    except (tokenize.TokenError, SyntaxError):
        return []
    return found


def _shortened(text):
    """(lines, remark on what was left out). Line endings of any kind become one."""
    lines = re.split(r"\r\n|\r|\n", text.expandtabs(4) if "\t" in text else text)
    if lines and not lines[-1]:
        lines.pop()
    more = len(lines) - MOST_LINES
    remark = f"{more} more lines are not shown" if more > 0 else ""
    cut = [
        line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} … ({len(line) - LONGEST_LINE} more characters)"
        for line in lines[:MOST_LINES]
    ]
    return cut, remark


def _classes(text, embedded):
    """Return the style sheet's class of each character; white space has that of what is before it."""
    found = [""] * len(text)
    languages = [(CudaLexer if each.is_cuda else CppLexer, each.begin, each.end) for each in embedded]
    for lexer, begin, end in [(PythonLexer, 0, len(text)), *languages]:
        for start, token, value in lexer(stripnl=False, ensurenl=False).get_tokens_unprocessed(text[begin:end]):
            kind = next((name for parent, name in CLASSES if token in parent), "")
            kind = found[begin + start - 1] if value.isspace() and begin + start else kind
            found[begin + start : begin + start + len(value)] = [kind] * len(value)
    return found


def _lines_inside(text, embedded):
    """The numbers of lines that lie inside embedded texts."""
    inside = set()
    for each in embedded:
        first = text.count("\n", 0, each.begin) + 1
        inside.update(range(first, first + text.count("\n", each.begin, each.end) + 1))
    return inside
