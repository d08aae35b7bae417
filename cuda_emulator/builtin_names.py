"""Variables of a text's own that are called gridDim, blockDim, blockIdx or threadIdx, as host code likes to call its dim3s.

CUDA lets them hide its built-in ones. Here those are macros, so the text's own get other names, wherever they are in scope.
"""

from .text import CLOSING, OPENING, end_of_directive, skip_blanks

OWN_NAME = {"gridDim": "grid_dim", "blockDim": "block_dim", "blockIdx": "block_idx", "threadIdx": "thread_idx"}
NO_TYPE = {"return", "case", "else", "do", "throw", "new", "delete", "sizeof", "typename", "goto", "and", "or", "not"}
BEHIND_A_DECLARATOR = {"=", ";", ",", ")", "(", "{", "[", ":"}


def rename_own_builtins(tokens):
    """Rename, in place, each such variable, parameter and member from its declaration to the end of its scope.

    Macros stay as they are: where they are used is not followed.
    """
    # Of each open brace: the names declared in it; of what is around it, the open parentheses and the parameters so far.
    scopes, parameters, depth, start, at = [(set(), 0, set())], set(), 0, 0, 0
    while at < len(tokens):
        token = tokens[at]
        if token.text == "#" and depth == 0:
            at = start = end_of_directive(tokens, at)
            continue
        if token.text == "{":
            scopes.append((parameters, depth, set(parameters) if depth else set()))
            parameters, depth, start = set(), 0, at + 1
        elif token.text == "}":
            if len(scopes) > 1:
                _, depth, parameters = scopes.pop()
            start = at + 1
        elif token.text == ";":
            if depth == 0:  # else it stands in the head of a for loop
                parameters = set()
            start = at + 1
        elif token.text in OPENING:
            depth += 1
        elif token.text in CLOSING:
            depth -= 1
        elif token.text in OWN_NAME and token.kind == "word":
            name = token.text
            if _is_bound(tokens, at):
                scopes[-1][0].add(name)
            elif _is_declared(tokens, at, start):
                (parameters if depth else scopes[-1][0]).add(name)
            if _is_member(tokens, at) or name in parameters or any(name in names for names, _, _ in scopes):
                token.text = OWN_NAME[name]
        at += 1


def _text(tokens, at):
    return tokens[at].text if 0 <= at < len(tokens) else ""


def _is_member(tokens, at):
    return _text(tokens, skip_blanks(tokens, at - 1, -1)) in (".", "->")


def _is_declared(tokens, at, start):
    """Whether the name at `at`, in a statement that begins at `start`, is declared there: a type stands in front of it."""
    if _text(tokens, skip_blanks(tokens, at + 1)) not in BEHIND_A_DECLARATOR:
        return False
    before = skip_blanks(tokens, at - 1, -1)
    if _text(tokens, before) in ("*", "&"):
        before = skip_blanks(tokens, before - 1, -1)
    if before < start:
        return False
    first = skip_blanks(tokens, start)
    if tokens[before].text == ",":  # dim3 grid(4), blockDim(32);
        return _depth(tokens[first:before]) == 0 and _begins_with_a_type(tokens, first)
    if tokens[before].text == ">":  # std::array<unsigned, 3> gridDim
        return _depth(tokens[first:before]) == 0 and _begins_with_a_template(tokens, first)
    return tokens[before].kind == "word" and tokens[before].text not in NO_TYPE


def _depth(tokens):
    return sum((token.text in OPENING) - (token.text in CLOSING) for token in tokens)


def _begins_with_a_type(tokens, first):
    """Whether a statement begins with a type and a name, or a template."""
    second = skip_blanks(tokens, first + 1)
    is_pair = tokens[first].kind == "word" and second < len(tokens) and tokens[second].kind == "word"
    return (is_pair and tokens[first].text not in NO_TYPE) or _begins_with_a_template(tokens, first)


def _begins_with_a_template(tokens, first):
    """Words, joined by `::` or after one another, and then `<`."""
    at = first
    while at < len(tokens) and (tokens[at].kind == "word" or tokens[at].text == "::") and tokens[at].text not in NO_TYPE:
        at = skip_blanks(tokens, at + 1)
    return at > first and _text(tokens, at) == "<"


def _is_bound(tokens, at):
    """Whether it is one of the names of a structured binding, `auto [gridDim, blockDim] = ...`."""
    before = skip_blanks(tokens, at - 1, -1)
    while _text(tokens, before) == "," or (before >= 0 and tokens[before].kind == "word"):
        before = skip_blanks(tokens, before - 1, -1)
    if _text(tokens, before) != "[":
        return False
    before = skip_blanks(tokens, before - 1, -1)
    while _text(tokens, before) == "&":
        before = skip_blanks(tokens, before - 1, -1)
    return _text(tokens, before) == "auto"
