"""The kernels that a CUDA text declares, and the races that it does. Whoever needs their names or lines asks here."""

import re
from dataclasses import dataclass

from .text import Token, UnsupportedError, matching, skip_blanks, split_at_template_commas, squeezed, tokens_of

KEYWORD = "__global__"
ACCEPTED_RACE = re.compile(r"//\s*emulator: benign race\b")
BEHIND_PARAMETERS = {"noexcept", "requires"}


@dataclass(frozen=True)
class Declaration:
    """`parameters_at` is the index of the parenthesis in front of the parameters.

    `attributes` are the tokens between the parentheses of each attribute: {"__cluster_dims__": those of "2, 1, 1"}.
    """

    name: Token
    parameters_at: int
    attributes: dict


def kernel_names(text):
    """The names of the kernels in a text, or in a fragment of one; those in comments and strings do not count."""
    if KEYWORD not in text:
        return []
    tokens = tokens_of(text)
    found = [_declared_in_a_fragment(tokens, at) for at, token in enumerate(tokens) if token.text == KEYWORD]
    return [declaration.name.text for declaration in found if declaration]


def _declared_in_a_fragment(tokens, at):
    """None, too, where the fragment ends within an attribute and so in front of the name."""
    try:
        return declared_kernel(tokens, at)
    except UnsupportedError:
        return None


def declared_kernel(tokens, at):
    """The Declaration that the __global__ at `at` belongs to; None where it belongs to none, as in prose or in a macro.

    `void` has to stand beside it, before or after it; words with parentheses in front of the name are attributes. Raises
    UnsupportedError where the parenthesis of one is never closed.
    """
    before = skip_blanks(tokens, at - 1, -1)
    returns_void = before >= 0 and tokens[before].text == "void"
    name, attributes, ahead = None, {}, at + 1
    while ahead < len(tokens):
        token = tokens[ahead]
        if token.text == KEYWORD:
            return None
        if token.kind == "word":
            name, returns_void = token, returns_void or token.text == "void"
        elif token.text == "(" and name:
            if returns_void and not _is_attribute(tokens, name, ahead):
                return Declaration(name, ahead, attributes)
            close = matching(tokens, ahead)
            attributes[name.text] = tokens[ahead + 1 : close]
            ahead = close
        elif token.text == "[":
            ahead = matching(tokens, ahead)
        elif token.text == "<":
            ahead = _end_of_template(tokens, ahead)
        elif not token.blank and token.text not in ("::", "#"):  # of a macro: name##_kernel
            return None
        ahead += 1
    return None


def _is_attribute(tokens, name, open_at):
    """Whether a word with parentheses, behind `void`, is no kernel but an attribute, or a macro for one: a name follows."""
    if name.text.startswith("__") and name.text.endswith("__"):
        return True
    try:
        behind = skip_blanks(tokens, matching(tokens, open_at) + 1)
    except UnsupportedError:  # the text is a fragment
        return False
    follows = tokens[behind] if behind < len(tokens) else None
    return bool(follows) and follows.kind == "word" and not (follows.text.startswith("__") or follows.text in BEHIND_PARAMETERS)


def _end_of_template(tokens, at):
    """The index of the > that closes the < at `at`; that of the last token where none does."""
    depth = 0
    while at < len(tokens):
        if tokens[at].text == "(":
            at = matching(tokens, at)
        depth += (tokens[at].text == "<") - (len(tokens[at].text) if tokens[at].text in (">", ">>>") else 0)
        if depth <= 0:
            return at
        at += 1
    return at


@dataclass
class Kernel:
    line: int
    template_parameters: int  # 0: not a template
    parameters: str  # in parentheses
    scope: int  # where the brace around it opens; those of one name in one scope are overloads
    cluster: str = ""  # the arguments of __cluster_dims__
    body_at: int = 0  # the token of the brace that opens the definition's body; 0: it is a declaration
    most_threads: str = ""  # the first argument of __launch_bounds__


def find_kernels(tokens):
    """The kernels that the text defines or declares, by name; several in different namespaces may share one."""
    kernels, scopes = {}, [-1]
    for at, token in enumerate(tokens):
        if token.text == "{":
            scopes.append(at)
        elif token.text == "}" and len(scopes) > 1:
            scopes.pop()
        if token.text == KEYWORD and (found := declared_kernel(tokens, at)):
            close = matching(tokens, found.parameters_at)
            parameters = squeezed(tokens[found.parameters_at : close + 1])
            cluster = squeezed(found.attributes.get("__cluster_dims__", []))
            bounds = split_at_template_commas(found.attributes.get("__launch_bounds__", []))
            behind = skip_blanks(tokens, close + 1)
            body_at = behind if behind < len(tokens) and tokens[behind].text == "{" else 0
            kernel = Kernel(
                found.name.line,
                template_parameters(tokens, at),
                parameters,
                scopes[-1],
                cluster,
                body_at,
                squeezed(bounds[0]),
            )
            kernels.setdefault(found.name.text, []).append(kernel)
    return kernels


def template_parameters(tokens, at):
    """How many parameters the template<...> in front of the declaration at `at` has; 0 without one."""
    start = at
    while start > 0 and tokens[start - 1].text not in (";", "}", "{"):
        start -= 1
    words = [token for token in tokens[start:at] if not token.blank]
    for index, token in enumerate(words):
        if token.text == "template" and index + 1 < len(words) and words[index + 1].text == "<":
            depth, count = 0, 1
            for inner in words[index + 1 :]:
                depth += (inner.text in ("<", "(")) - (inner.text in (")",))
                depth -= len(inner.text) if inner.text in (">", ">>>") else 0
                count += inner.text == "," and depth == 1
                if depth == 0:
                    return count
    return 0
