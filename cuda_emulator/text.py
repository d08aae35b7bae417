"""CUDA C++ text as a list of tokens, enough of it for the few rewrites that the emulator needs."""

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
  | (?P<string>(?:u8|[uUL])?R"(?P<tag>[^()\\\s]*)\(.*?\)(?P=tag)"|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<character>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
  | (?P<space>(?:\s|\\\n)+)
  | (?P<symbol><<<|>>>|::|->|.)
    """,
    re.S | re.X,
)

OPENING = {"(": ")", "[": "]", "{": "}"}
CLOSING = {close: open for open, close in OPENING.items()}


@dataclass
class Token:
    text: str
    kind: str  # comment, string, character, word, number, space, symbol
    line: int

    @property
    def blank(self):
        return self.kind in ("space", "comment")


class UnsupportedError(Exception):
    """A construct that the emulator does not know, with its line in the text."""

    def __init__(self, construct, line):
        super().__init__(construct)
        self.construct, self.line = construct, line


def tokens_of(text, line=1):
    """The tokens; `line` is the number of the text's first line."""
    tokens = []
    for match in TOKEN.finditer(text):
        kind = "string" if match.lastgroup == "tag" else match.lastgroup
        tokens.append(Token(match.group(), kind, line))
        line += match.group().count("\n")
    return tokens


def text_of(tokens):
    return "".join(token.text for token in tokens)


def squeezed(tokens):
    """The tokens' text on one line without comments."""
    return " ".join("".join(" " if token.blank else token.text for token in tokens).split())


def skip_blanks(tokens, index, step=1):
    while 0 <= index < len(tokens) and tokens[index].blank:
        index += step
    return index


def matching(tokens, index):
    """The index of the bracket that closes the one at `index`."""
    depth = 0
    for at in range(index, len(tokens)):
        if tokens[at].text in OPENING:
            depth += 1
        elif tokens[at].text in CLOSING:
            depth -= 1
            if depth == 0:
                return at
    raise UnsupportedError(f"a {tokens[index].text!r} that is never closed", tokens[index].line)


def matching_back(tokens, index):
    """The index of the bracket that opens what closes at `index`."""
    depth = 0
    for at in range(index, -1, -1):
        if tokens[at].text in CLOSING:
            depth += 1
        elif tokens[at].text in OPENING:
            depth -= 1
            if depth == 0:
                return at
    raise UnsupportedError(f"a {tokens[index].text!r} that is never opened", tokens[index].line)


def split_at_commas(tokens):
    """The runs of tokens between the commas that stand in no bracket."""
    parts, depth = [[]], 0
    for token in tokens:
        depth += (token.text in OPENING) - (token.text in CLOSING)
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
