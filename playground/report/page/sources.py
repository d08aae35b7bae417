"""A variant's file as highlighted HTML, all of it escaped: Python, the CUDA and C++ texts inside, findings at their lines."""

import itertools
import re

import pygments
from markupsafe import Markup
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer, PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String, Text

from playground.catalog import lines_of
from playground.report.text import plain

LONGEST_LINE = 1000  # characters; more is left out, with a remark
MOST_LINES = 10_000
AROUND = 12  # lines before and after a finding, where a file is not shown whole
IS_CPP = re.compile(r"^\s*#\s*(include|define|pragma)\b|__global__|\bTORCH_LIBRARY|;\s*$", re.MULTILINE)
LITERAL = re.compile(r"([rRbBuU]*(?P<quotes>\"\"\"|'''))(.*)((?P=quotes))$", re.DOTALL)
# What has a colour of its own, the most special first; what is not here is plain text.
COLOURED = (Comment.PreprocFile, Comment.Preproc, Comment, String.Doc, Keyword.Type, Keyword, Operator.Word, String, Number)
COLOURED += (Name.Function, Name.Class, Name.Decorator, Name.Builtin)


class _Lexer(PythonLexer):
    """Python, in which strings of several lines that look like C++ are lexed as CUDA; `inside` are their lines."""

    def get_tokens_unprocessed(self, text, stack=("root",)):
        self.inside = set()
        tokens = super().get_tokens_unprocessed(text, stack)
        for is_string, group in itertools.groupby(tokens, lambda each: each[1] in String and each[1] not in String.Doc):
            group = list(group)
            whole = "".join(value for _, _, value in group)
            literal = LITERAL.match(whole) if is_string and "\n" in whole else None
            if literal and IS_CPP.search(literal[3]):
                start = group[0][0]
                first = text.count("\n", 0, start) + 1
                self.inside.update(range(first, first + whole.count("\n") + 1))
                within = CudaLexer().get_tokens_unprocessed(literal[3])
                group = [(start, String, literal[1]), *within, (start, String, literal[4])]
            for place, kind, value in group:
                yield place, next((each for each in COLOURED if kind in each), Text), value


def highlighted(text, findings=(), around=None):
    """Return the file's lines as <span> elements for a <pre>, embedded texts with the class "in", findings below their lines.

    `findings` are (line, text, id); with `around`, only so many lines before and after each are shown.
    """
    lines = lines_of(text.expandtabs(4))
    lines = lines if lines[-1] else lines[:-1]
    more, excess = len(lines) - MOST_LINES, [len(line) - LONGEST_LINE for line in lines]
    lines = [f"{line[:LONGEST_LINE]} … ({n} more characters)" if n > 0 else line for line, n in zip(lines, excess, strict=True)]
    lines = lines[:MOST_LINES]
    lexer = _Lexer()
    tokens = [(kind, value) for _, kind, value in lexer.get_tokens_unprocessed("\n".join(lines))]
    html = pygments.format(tokens, HtmlFormatter(nowrap=True)).replace("<span", "<i").replace("</span>", "</i>")  # shorter
    rows = plain(html).split("\n")[: len(lines)]
    html, last = [], 0
    for number, row in enumerate(rows, start=1):
        if around is not None and all(abs(number - line) > around for line, _, _ in findings):
            continue
        here = [each for each in findings if each[0] == number]
        html.append(_left_out(last + 1, number - 1))
        kind = ' class="hit"' * bool(here) or ' class="in"' * (number in lexer.inside)
        html.append(Markup(f"<span{kind}>{row}\n</span>"))
        for _, finding, identity in here:
            note = Markup('<b class="finding" id="{}" role="note"><span class="sign">▲ line {}</span> {}</b>')
            html.append(note.format(identity, number, plain(finding)))
        last = number
    html.append(_left_out(last + 1, len(rows)))
    if more > 0:
        html.append(Markup(f'<b class="cut">{more} more lines are not shown</b>'))
    return Markup("").join(html)


def _left_out(first, last):
    if first > last:
        return Markup("")
    remark = '<b class="cut" style="counter-increment:line {}">lines {} to {} are not shown</b>'
    return Markup(remark).format(last - first + 1, first, last)
