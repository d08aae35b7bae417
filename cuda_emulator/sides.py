"""Which functions and variables of a text are the host's and which the device's."""

import functools
import re
from dataclasses import dataclass, field

from .text import CLOSING, OPENING, end_of_directive, matching, skip_blanks

QUALIFIERS = {"__global__", "__device__", "__host__"}
ATTRIBUTES = {"__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__attribute__", "__align__", "alignas", "decltype"}
ATTRIBUTES |= {"noexcept", "explicit", "__declspec", "requires"}
NO_FUNCTION = {"if", "for", "while", "switch", "catch", "return", "sizeof", "defined", "static_assert"}
BEHIND_PARAMETERS = {"const", "noexcept", "override", "final", "requires", "try", "mutable", "volatile"}
NO_VARIABLE = {"using", "typedef", "template", "struct", "class", "enum", "union", "friend", "namespace", "operator", "const"}
NO_VARIABLE |= {"constexpr", "constinit", "__device__", "__constant__", "__managed__", "__shared__", "static_assert", "asm"}
NO_VARIABLE |= {"public", "private", "protected", "return", "goto", "__asm__", "concept", "extern", "texture", "surface"}
BOTH_SIDES = {"assert", "printf", "malloc", "free", "memcpy", "memset", "memmove"}
OF_DEVICE = {"__device__", "__constant__", "__managed__", "__shared__"}
CERTAIN = {("ifdef", "__CUDACC__"), ("ifdef", "__cplusplus"), ("ifdef", "__NVCC__")}
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
    owner: str = ""  # the class of a member
    conditional: bool = False  # within an #if that may leave it out
    space: str = ""  # the namespaces around, each with :: behind it

    @property
    def device(self):
        return bool(self.words & {"__device__", "__global__"})

    @property
    def host(self):
        return "__host__" in self.words or not self.device

    @property
    def hidden(self):
        """Whether a macro may stand for its qualifiers."""
        return any(MACRO_NAME.fullmatch(word) for word in self.words)

    @property
    def unknown(self):
        return self.conditional or self.hidden

    @property
    def only_host(self):
        return not self.device and not self.hidden and "constexpr" not in self.words


@dataclass
class Sides:
    """The functions and variables of a text, or of several that are one program."""

    functions: list = field(default_factory=list)
    variables: set = field(default_factory=set)  # (namespace, name) of the host's, at namespace scope
    of_device: set = field(default_factory=set)  # the names of the device's
    initialisers: list = field(default_factory=list)  # theirs, each as a Function without a name
    members: set = field(default_factory=set)  # the names of what classes have
    namespaces: set = field(default_factory=set)
    classes: set = field(default_factory=set)  # "" for templates
    types: set = field(default_factory=set)  # names that `using` and `typedef` declare
    inner: set = field(default_factory=set)  # headers that are included within a function
    used: set = field(default_factory=set)  # by `using`: namespaces and names

    def names(self, which):
        return {f.name for f in self.functions if f.free and which(f)} - BOTH_SIDES

    @functools.cached_property
    def spaces(self):
        """{name: the namespaces in which functions and variables of the name are}"""
        found = {}
        for space, name in [*((f.space, f.name) for f in self.functions if f.free), *self.variables]:
            found.setdefault(name, set()).add(space)
        return found

    def sees(self, f, name):
        """Whether all that the name is for, where f uses it without a namespace, is one of these functions and variables."""
        if not f.free and name in self.members:  # a member's name hides what is outside
            return False
        return all(f.space.startswith(each) or self.used & {name, each.split("::")[-2]} for each in self.spaces[name])

    @property
    def host_only(self):
        """Names of functions that only host code can call."""
        return self.names(lambda f: True) - self.names(lambda f: f.device or f.unknown or "constexpr" in f.words)

    @property
    def kernels(self):
        """Names of functions that can only be launched."""
        return self.names(lambda f: "__global__" in f.words) - self.names(lambda f: "__global__" not in f.words or f.unknown)

    @property
    def host_methods(self):
        """The (class, name) of members that only host code can call; a constructor has its class's name."""
        methods = [(f.owner, f.name, f.only_host and not f.conditional) for f in self.functions if f.owner]
        return {(owner, name) for owner, name, _ in methods} - {(owner, name) for owner, name, host in methods if not host}

    def add(self, other):
        """Take in what another text of the same program has."""
        self.functions += other.functions
        self.variables |= other.variables
        self.of_device |= other.of_device
        self.members |= other.members
        self.namespaces |= other.namespaces
        self.classes |= other.classes
        self.types |= other.types
        self.used |= other.used

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
            if words[:1] == ["define"] and len(words) > 1 and words[1] not in QUALIFIERS:  # those are another compiler's
                found.setdefault(words[1], set()).update(set(words[2:]) & QUALIFIERS)
    return found


def conditional_parts(tokens):
    """The tokens, as a list of (first, last), between the directives of conditions that may not hold."""
    parts, opened, guard = [], [], None
    for at, token in enumerate(tokens):
        if token.text != "#":
            continue
        words = [each.text for each in tokens[at + 1 : end_of_directive(tokens, at)] if not each.blank]
        name = words[0] if words else ""
        if name == "define" and guard == words[1:2] and opened:
            opened[-1] = None  # an include guard
        guard = words[1:2] if name == "ifndef" else None
        if name in ("if", "ifdef", "ifndef"):
            opened.append(None if tuple(words) in CERTAIN else at)
        elif name in ("else", "elif", "endif") and opened:
            start = opened.pop()
            if start is not None:
                parts.append((start, at))
            if name != "endif":
                opened.append(at)
    return parts


def sides_of(tokens, macros):
    """The Sides of one text. `macros` are those of macros_with_qualifiers, of it and what it includes."""
    found = Sides()
    at = begin = 0
    classes = []  # (closing brace, name) of the classes around; a template's has no name
    spaces = []  # the same of the namespaces

    def space():
        return "".join(name for _, name in spaces)

    conditional = bytearray(len(tokens))
    for first, last in conditional_parts(tokens):
        conditional[first:last] = bytes([1]) * (last - first)
    is_conditional = conditional.__getitem__

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
                note_declaration(tokens, head, begin, at, found, macros, classes, is_conditional, space())
            for around in (classes, spaces):
                if around and at == around[-1][0]:
                    around.pop()
            at = begin = at + 1
            continue
        if text != "{":
            at += 1
            continue
        if tokens[skip_blanks(tokens, at - 1, -1)].text in ("=", ","):  # an initialiser, or an element of one
            at = matching(tokens, at) + 1
            continue
        head = without_directives(tokens, begin, at)
        words = [tokens[i].text for i in head if tokens[i].kind == "word"]
        name = function_name(tokens, head)
        if (name is None and "namespace" in words) or is_linkage(tokens, head):
            found.namespaces.update(words)
            if "namespace" in words and "inline" not in words:
                own = words[words.index("namespace") + 1 :]
                spaces.append((matching(tokens, at), "".join(f"{each}::" for each in own)))
            at = begin = at + 1
        elif name is None and {"class", "struct", "union"} & set(words):
            classes.append((matching(tokens, at), class_name(words)))
            found.classes.add(classes[-1][1])
            at = begin = at + 1
        elif name is not None:
            close = matching(tokens, at)
            made = function(tokens, head, name, at, close, macros, classes)
            made.conditional, made.space = any(map(is_conditional, head)), space()  # its qualifiers may be
            found.functions.append(made)
            found.inner |= {tokens[i + 2].text.strip('"') for i in range(at, close) if tokens[i].text == "include"}
            if not made.free:
                found.members.add(made.name)
            at = begin = close + 1
        else:  # an initialiser, an enumeration
            at = matching(tokens, at) + 1
    return found


def class_name(words):
    """The name that a class's head gives; none for a template or where attributes or macros stand in front of it."""
    at = next(at for at, word in enumerate(words) if word in ("class", "struct", "union"))
    return words[at + 1] if at + 1 < len(words) and "template" not in words and words[at + 1] not in ATTRIBUTES else ""


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
        if text == "operator":
            return at
        if text == "=":
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
            if tokens[skip_blanks(tokens, at + 1)].text == "*":  # a pointer to functions
                k = next((j for j in range(k, len(head)) if head[j] > close), len(head))
                continue
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


def function(tokens, head, name, open_at, close, macros, classes):
    words = {tokens[i].text for i in head if i < name and tokens[i].kind == "word"}
    words |= {tokens[i].text for i in head if tokens[i].text in QUALIFIERS}
    for word in list(words):
        if word in macros:
            words = words - {word} | macros[word]
    before = skip_blanks(tokens, name - 1, -1)
    qualified = before >= 0 and tokens[before].text in ("::", "~")
    owner = classes[-1][1] if classes and not qualified else ""
    if qualified and tokens[before].text == "::" and "template" not in words:
        owner = tokens[skip_blanks(tokens, before - 1, -1)].text
    return Function(tokens[name].text, words, head[0], open_at, close, not classes and not qualified, owner)


def note_declaration(tokens, head, begin, end, found, macros, classes, is_conditional, space):
    if not head:
        return
    free = not classes
    if tokens[head[0]].text == "using" and not any(tokens[i].text == "=" for i in head):
        found.used.add(tokens[head[-1]].text)
    words = {tokens[i].text for i in head if tokens[i].kind == "word"}
    if tokens[head[0]].text in ("using", "typedef"):
        found.types.add(tokens[head[1 if tokens[head[0]].text == "using" and len(head) > 1 else -1]].text)
    name = function_name(tokens, head)
    if name is not None:
        declared = function(tokens, head, name, begin, begin, macros, classes)
        declared.conditional, declared.space = any(map(is_conditional, head)), space
        if "default" in words:  # for both sides, where it can be
            declared.words.add("constexpr")
        if declared.owner == declared.name or any(i < name and tokens[i].kind == "word" for i in head):
            found.functions.append(declared)
        if not free:
            found.members.add(declared.name)
        return
    if not free:
        found.members |= words
    if words & OF_DEVICE:
        found.of_device |= words
    no_variable = NO_VARIABLE - {"const"} if any(tokens[i].text == "[" for i in head) else NO_VARIABLE
    if not free or words & no_variable or is_conditional(head[0]):
        return
    names = declared_names(tokens, head)
    if not names or any(tokens[i].text in macros for i in names):
        return
    in_front = {tokens[i].text for i in head if i < names[0] and tokens[i].kind == "word"}
    if in_front & macros.keys() or any(MACRO_NAME.fullmatch(word) for word in in_front - found.types):
        return  # a macro may stand for its qualifiers
    found.variables |= {(space, tokens[i].text) for i in names}
    found.initialisers.append(Function("", set(), names[0], names[0], end, True, space=space))


def declared_names(tokens, head):
    """The indices in `tokens` of the names that a declaration's head declares: TYPE A = ..., B[...], C; or TYPE (*A)(...)."""
    texts = [tokens[at].text for at in head] + [";"]
    found = []
    for k, at in enumerate(head):
        if k and tokens[at].kind == "word" and texts[k + 1] in ("=", "[", ";", ",", "{"):
            found = [k]
            break
        if texts[k + 1] == "(" and k + 3 < len(head) and texts[k + 2] == "*":
            return [head[k + 3]]
        if texts[k] in ("(", "=", "{", "["):
            return []
    if not found or "<" in texts[found[0] :]:  # whose commas may be a template's
        return [head[k] for k in found]
    depth = 0
    for k in range(found[0], len(head)):
        depth += (texts[k] in OPENING) - (texts[k] in CLOSING)
        if depth == 0 and texts[k] == ",":
            k += 1 + (texts[k + 1] in ("*", "&"))
            found += [k] if k < len(head) and tokens[head[k]].kind == "word" else []
    return [head[k] for k in found]
