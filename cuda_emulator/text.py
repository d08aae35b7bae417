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
    """A construct that the emulator does not know, with its line in the text. `told` is what to say of it."""

    def __init__(self, construct, line):
        super().__init__(construct)
        self.construct, self.line = construct, line

    @property
    def told(self):
        return f"the emulator does not support {self.construct}"


class RefusedError(UnsupportedError):
    """A construct that nvcc refuses, too; the construct is the reason."""

    @property
    def told(self):
        return f"error: {self.construct}"


def tokens_of(text, line=1):
    """The tokens; `line` is the number of the text's first line."""
    tokens = []
    for match in TOKEN.finditer(text):
        kind = "string" if match.lastgroup == "tag" else match.lastgroup
        tokens.append(Token(match.group(), kind, line))
        line += match.group().count("\n")
    return tokens


def end_of_directive(tokens, at):
    """Return the index of the blanks that end the preprocessor's directive at `at`, or how many tokens there are."""
    while at < len(tokens) and not (tokens[at].kind == "space" and re.search(r"(?<!\\)\n", tokens[at].text)):
        at += 1
    return at


def as_read(text):
    """Return the text without a byte-order mark and `#if 0`, and with the line ends that compilers make of all others."""
    return without_dead_parts(text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))


def without_dead_parts(text):
    """Return the text with what stands between `#if 0` and its #else or #endif emptied, line ends excepted."""
    if not re.search(r"^[ \t]*#[ \t]*if[ \t]+0\b", text, re.M):
        return text
    opened, lines = [], text.split("\n")  # of each #if around: "dead", "live", or "none" within a dead part
    directives = {token.line for token in tokens_of(text) if token.text == "#"}
    for at, line in enumerate(lines):
        directive = re.match(r"[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif)\b[ \t]*(.*)", line)
        dead = bool(opened) and opened[-1] != "live"
        if not directive or not (dead or at + 1 in directives):
            lines[at] = "" if dead else line
            continue
        name, condition = directive.groups()
        if name in ("if", "ifdef", "ifndef"):
            opened.append("none" if dead else "dead" if name == "if" and re.match(r"0\s*(//|/\*|$)", condition) else "live")
        elif opened and name in ("elif", "else"):
            opened[-1] = "live" if opened[-1] == "dead" else opened[-1]
        elif opened:
            dead = opened.pop() == "none"
        if dead and (not opened or opened[-1] != "live"):
            lines[at] = ""
    return "\n".join(lines)


def join_spaced_launches(tokens):
    """Make `<<<` and `>>>` of `<< <` and `>> >`, as some formatters leave a launch, in place."""
    at = 0
    while at < len(tokens):
        opening = spaced(tokens, at, "<")
        if not opening and tokens[at].text != "<<<":
            at += 1
            continue
        end = next((i for i in range(at, len(tokens)) if tokens[i].text in (";", "{", "}")), len(tokens))
        closing = opening and next((i for i in range(at + 3, end) if spaced(tokens, i, ">")), None)
        if opening and (closing or any(t.text == ">>>" for t in tokens[at:end])):
            join(tokens, at, "<")
            if closing:
                join(tokens, closing, ">")
        else:
            shut = next((i for i in range(at, end) if tokens[i].text == ">>>" or spaced(tokens, i, ">")), None)
            if shut and tokens[shut].text == ">":
                join(tokens, shut, ">")
        at += 1


def spaced(tokens, at, sign):
    """Whether three of the sign stand at `at`, only blanks between them, with at least one blank."""
    if tokens[at].text != sign:
        return False
    second = skip_blanks(tokens, at + 1)
    third = skip_blanks(tokens, second + 1) if second < len(tokens) and tokens[second].text == sign else len(tokens)
    if third >= len(tokens) or tokens[third].text != sign or third == at + 2:
        return False
    behind = skip_blanks(tokens, third + 1)
    return sign == "<" or (behind < len(tokens) and tokens[behind].text == "(")


def join(tokens, at, sign):
    tokens[at].text = 3 * sign
    left = 2
    at += 1
    while left:
        if tokens[at].text == sign:
            tokens[at].text, tokens[at].kind = "", "space"
            left -= 1
        at += 1


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


def template_end(tokens, at):
    """The index of the > that closes the < at `at`; None where none does in its statement."""
    depth = 0
    for ahead in range(at, len(tokens)):
        text = tokens[ahead].text
        depth += (text == "<") - (len(text) if text in (">", ">>>") else 0)
        if depth <= 0:
            return ahead
        if text in (";", "{", "}"):
            return None
    return None


def template_start(tokens, at):
    """The index of the < that the > at `at` closes; None where none does in its statement."""
    depth = 0
    for back in range(at, -1, -1):
        depth += len(tokens[back].text) if tokens[back].text in (">", ">>>") else -(tokens[back].text == "<")
        if depth == 0:
            return back
        if tokens[back].text in (";", "{", "}"):
            return None
    return None


def split_at_template_commas(tokens):
    """Like split_at_commas, but < and > count as brackets, as they do in the type of a declaration."""
    parts, depth = [[]], 0
    for token in tokens:
        depth += token.text in OPENING or token.text == "<"
        depth -= len(token.text) if token.text in (">", ">>>") else token.text in CLOSING
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
