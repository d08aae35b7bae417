"""Which functions of a text are the host's and which the device's, and what nvcc refuses because of it.

Only what is certain is refused: a name that is declared for both sides, a qualifier hidden in an unknown macro, and whatever a
class declares are left to the compiler.
"""

import re
from dataclasses import dataclass, field

from .text import CLOSING, OPENING, UnsupportedError, matching, skip_blanks

QUALIFIERS = {"__global__", "__device__", "__host__"}
ATTRIBUTES = {"__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__attribute__", "__align__", "alignas", "decltype"}
ATTRIBUTES |= {"noexcept", "explicit", "__declspec", "requires"}
NO_FUNCTION = {"if", "for", "while", "switch", "catch", "return", "sizeof", "defined", "static_assert"}
BEHIND_PARAMETERS = {"const", "noexcept", "override", "final", "requires", "try", "mutable", "volatile"}
NO_VARIABLE = {"using", "typedef", "template", "struct", "class", "enum", "union", "friend", "namespace", "operator", "const"}
NO_VARIABLE |= {"constexpr", "constinit", "__device__", "__constant__", "__managed__", "__shared__", "static_assert", "asm"}
NO_VARIABLE |= {"public", "private", "protected", "return", "goto", "__asm__", "concept", "extern", "texture", "surface"}
CONTAINERS = "vector|list|deque|map|set|unordered_map|unordered_set|multimap|multiset|stack|queue|priority_queue|string"
CONTAINERS += "|ostringstream|istringstream|stringstream|cout|cerr|cin|function|shared_ptr|unique_ptr|thread|mutex|to_string"
HOST_ONLY = set(CONTAINERS.split("|"))
MACRO_NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}")


@dataclass
class Function:
    """`begin` is the first token of its head, `open` and `close` are its body's braces; no body: both are `begin`."""

    name: str
    words: set
    begin: int
    open: int
    close: int
    free: bool  # no member of a class

    @property
    def device(self):
        return bool(self.words & {"__device__", "__global__"})

    @property
    def host(self):
        return "__host__" in self.words or not self.device

    @property
    def unknown(self):
        return any(MACRO_NAME.fullmatch(word) for word in self.words)


@dataclass
class Sides:
    """The functions and variables of a text, or of several that are one program."""

    functions: list = field(default_factory=list)
    variables: set = field(default_factory=set)  # of the host, at namespace scope

    def names(self, which):
        return {f.name for f in self.functions if f.free and which(f)}

    @property
    def host_only(self):
        """Names of functions that only host code can call."""
        return self.names(lambda f: True) - self.names(lambda f: f.device or f.unknown or "constexpr" in f.words)

    @property
    def device_only(self):
        """Names of functions that only device code can call."""
        return self.names(lambda f: "__device__" in f.words) - self.names(
            lambda f: f.host or f.unknown or "__global__" in f.words or "constexpr" in f.words
        )


def macros_with_qualifiers(tokens):
    """{macro: the qualifiers in its body} of the #defines without parameters whose body has nothing but words."""
    found = {}
    for at, token in enumerate(tokens):
        if token.text == "#":
            end = end_of_directive(tokens, at)
            words = [each.text for each in tokens[at + 1 : end] if not each.blank]
            if words[:1] == ["define"] and len(words) > 1:
                found.setdefault(words[1], set()).update(set(words[2:]) & QUALIFIERS)
    return found


def end_of_directive(tokens, at):
    while at < len(tokens) and not (
        tokens[at].kind == "space" and re.search(r"(?<!\\)\n", tokens[at].text.replace("\\\n", "")) and "\n" in tokens[at].text
    ):
        at += 1
    return at


def sides_of(tokens, macros):
    """The Sides of one text. `macros` are those of macros_with_qualifiers, of it and what it includes."""
    found = Sides()
    at = begin = 0
    classes = []  # the closing braces of the classes around
    while at < len(tokens):
        text = tokens[at].text
        if text == "#":
            at = end_of_directive(tokens, at)
            if not any(not token.blank for token in tokens[begin:at] if token.text != "#") or begin == at:
                begin = at
            continue
        if text in ("(", "["):
            at = matching(tokens, at) + 1
            continue
        if text in (";", "}"):
            head = without_directives(tokens, begin, at)
            if text == ";":
                note_declaration(tokens, head, begin, at, found, macros, not classes)
            if classes and at == classes[-1]:
                classes.pop()
            at = begin = at + 1
            continue
        if text != "{":
            at += 1
            continue
        head = without_directives(tokens, begin, at)
        words = [tokens[i].text for i in head if tokens[i].kind == "word"]
        name = function_name(tokens, head)
        if (name is None and "namespace" in words) or is_linkage(tokens, head):
            at = begin = at + 1
        elif name is None and {"class", "struct", "union"} & set(words):
            classes.append(matching(tokens, at))
            at = begin = at + 1
        elif name is not None:
            close = matching(tokens, at)
            found.functions.append(function(tokens, head, name, at, close, macros, not classes))
            at = begin = close + 1
        else:  # an initialiser, an enumeration
            at = matching(tokens, at) + 1
    return found


def without_directives(tokens, begin, end):
    """The indices of the tokens in a range that are neither blank nor of a directive."""
    kept, at = [], begin
    while at < end:
        if tokens[at].text == "#":
            at = end_of_directive(tokens, at)
            continue
        if not tokens[at].blank:
            kept.append(at)
        at += 1
    return kept


def is_linkage(tokens, head):
    return [tokens[i].text for i in head] == ["extern", '"C"']


def function_name(tokens, head):
    """The index in `tokens` of the name of the function that a head declares; None where it declares none."""
    k = 0
    while k < len(head):
        at = head[k]
        text = tokens[at].text
        if text == "=" and tokens[head[k - 1]].text != "operator":
            return None
        if text == "<":
            depth = 0
            while k < len(head):
                each = tokens[head[k]].text
                depth += (each == "<") - (len(each) if each in (">", ">>>") else 0)
                if depth <= 0:
                    break
                k += 1
        elif text == "(" and k:
            before = tokens[head[k - 1]]
            close = matching(tokens, at)
            behind = next((j for j in range(k, len(head)) if head[j] > close), len(head))
            follows = tokens[head[behind]] if behind < len(head) else None
            is_attribute = before.text in ATTRIBUTES or (
                follows is not None and follows.kind == "word" and follows.text not in BEHIND_PARAMETERS | QUALIFIERS
            )
            if before.kind == "word" and not is_attribute:
                return None if before.text in NO_FUNCTION else head[k - 1]
            k = behind
            continue
        k += 1
    return None


def function(tokens, head, name, open_at, close, macros, free):
    words = {tokens[i].text for i in head if i < name and tokens[i].kind == "word"}
    words |= {tokens[i].text for i in head if tokens[i].text in QUALIFIERS}
    for word in list(words):
        if word in macros:
            words = words - {word} | macros[word]
    before = skip_blanks(tokens, name - 1, -1)
    qualified = before >= 0 and tokens[before].text in ("::", "~")
    return Function(tokens[name].text, words, head[0], open_at, close, free and not qualified)


def note_declaration(tokens, head, begin, end, found, macros, free):
    if not head:
        return
    words = {tokens[i].text for i in head if tokens[i].kind == "word"}
    name = function_name(tokens, head)
    if name is not None:
        declared = function(tokens, head, name, begin, begin, macros, free)
        if len([i for i in head if i < name and tokens[i].kind == "word"]):
            found.functions.append(declared)
        return
    if not free or words & NO_VARIABLE or any(MACRO_NAME.fullmatch(w) for w in words) or words & macros.keys():
        return
    for k, at in enumerate(head):  # TYPE NAME = ...; TYPE NAME[...]; TYPE NAME;
        following = tokens[head[k + 1]].text if k + 1 < len(head) else ";"
        if k and tokens[at].kind == "word" and following in ("=", "[", ";", ",", "{"):
            found.variables.add(tokens[at].text)
            return
        if tokens[at].text in ("(", "=", "{", "["):
            return


def refusals(tokens, own, whole):
    """{index of a token: why nvcc refuses it}. `own` are the Sides of the tokens, `whole` those of the program."""
    found = {}
    host_only, device_only = whole.host_only, whole.device_only
    for f in own.functions:
        if f.unknown or f.open == f.close:
            continue
        if "__global__" in f.words and not f.words & {"void", "auto"} and f.free:
            found[f.begin] = f"a kernel that returns something ({f.name}): __global__ functions return void"
        if f.device and not f.host:
            of_device(tokens, f, host_only, whole.variables, found)
        elif f.host and not f.device:
            of_host(tokens, f, device_only, found)
    return found


def texts_around(tokens, at):
    before, behind = skip_blanks(tokens, at - 1, -1), skip_blanks(tokens, at + 1)
    return (
        tokens[before].text if before >= 0 else "",
        tokens[behind].text if behind < len(tokens) else "",
        tokens[before] if before >= 0 else None,
    )


def words_of_body(tokens, f, skip_device_lambdas):
    """The indices of the words in a body, without directives; without lambdas for the device where they are not wanted."""
    at = f.open
    while at < f.close:
        if tokens[at].text == "#":
            at = end_of_directive(tokens, at)
            continue
        if skip_device_lambdas and tokens[at].text == "__device__":
            at = next((i for i in range(at, f.close) if tokens[i].text == "{"), f.close)
            at = matching(tokens, at) + 1 if at < f.close else at
            continue
        if tokens[at].kind == "word":
            yield at
        at += 1


def declared_in(tokens, f):
    """Names that a function declares itself: a word, or what ends a type, stands in front, and no statement's keyword."""
    names = set()
    for at in range(f.begin, f.close):
        token = tokens[at]
        if token.kind == "word":
            before, behind, previous = texts_around(tokens, at)
            if behind in ("=", ";", ",", ")", "[", "{", "(", ":") and (
                (previous is not None and previous.kind == "word" and before not in ("return", "else", "do", "case", "throw"))
                or (before in ("&", "*", ">") and behind in ("=", ",", ")", "[", ":"))
            ):
                names.add(token.text)
            if before == "," and behind in ("=", ";", "[", ","):
                names.add(token.text)
    return names


def is_call(behind):
    return behind in ("(",)


def of_device(tokens, f, host_only, variables, found):
    declared = None
    for at in words_of_body(tokens, f, False):
        word = tokens[at].text
        before, behind, _ = texts_around(tokens, at)
        if before == "::" and word in HOST_ONLY:
            std = skip_blanks(tokens, skip_blanks(tokens, at - 1, -1) - 1, -1)
            if std >= 0 and tokens[std].text == "std" and tokens[skip_blanks(tokens, std - 1, -1)].text != "::":
                found[std] = f"std::{word} in device code, whose functions are the host's (nvcc: calling a __host__ function)"
            continue
        if (word not in host_only and word not in variables) or before in (".", "->", "::"):
            continue
        declared = declared_in(tokens, f) if declared is None else declared
        if word in declared:
            continue
        if word in host_only and is_call(behind):
            found[at] = (
                f"device code calls {word}, a function of the host: calling a __host__ function from a __device__ or "
                f"__global__ function is not allowed; declare it __device__"
            )
        elif word in variables and not is_call(behind):
            found[at] = (
                f"{word} is a variable of the host, undefined in device code; declare it __device__, __constant__ or constexpr"
            )


def of_host(tokens, f, device_only, found):
    declared = None
    for at in words_of_body(tokens, f, True):
        word = tokens[at].text
        before, behind, _ = texts_around(tokens, at)
        if word not in device_only or before in (".", "->", "::"):
            continue
        declared = declared_in(tokens, f) if declared is None else declared
        if word in declared and before not in ("=", "(", ","):
            continue
        if is_call(behind):
            opener = skip_blanks(tokens, at - 1, -1)
            around = tokens[skip_blanks(tokens, opener - 1, -1)].text if before == "(" else ""
            if around not in ("decltype", "sizeof", "noexcept"):
                found[at] = (
                    f"host code calls {word}, a __device__ function: calling a __device__ function from a __host__ function "
                    f"is not allowed; declare it __host__ __device__"
                )
        elif (
            word not in declared
            and behind in (";", ")", ",")
            and before in ("=", "(", "&", ",")
            and in_parentheses(tokens, at, f)
        ):
            found[at] = (
                f"host code takes the address of {word}, a __device__ function, which is no address on the device; take it in "
                f"device code"
            )


def in_parentheses(tokens, at, f):
    """Whether what stands around a token is an argument list or a statement, and no list of template arguments."""
    depth = 0
    for back in range(at - 1, f.open, -1):
        text = tokens[back].text
        if text in CLOSING:
            depth += 1
        elif text in OPENING:
            if depth == 0:
                return True
            depth -= 1
        elif depth == 0 and text == ";":
            return True
        elif depth == 0 and text == "<":
            return False
    return True


def find(tokens, macros, whole=None):
    """(Sides, refusals) of a text; none where it cannot be read."""
    try:
        own = sides_of(tokens, macros)
        return own, refusals(tokens, own, whole or own)
    except UnsupportedError:  # brackets that do not match: in other branches of an #if, or truly
        return Sides(), {}
