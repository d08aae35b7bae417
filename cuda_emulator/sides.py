"""Which functions of a text are the host's and which the device's, and what nvcc refuses because of it.

Only what is certain is refused. The compiler decides on a name that is declared for both sides or within an #if, on a qualifier
hidden in an unknown macro, and on members of objects whose class is not named beside them.
"""

import functools
import re
from dataclasses import dataclass, field

from .text import CLOSING, OPENING, UnsupportedError, end_of_directive, matching, skip_blanks

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
ALGORITHMS = "sort|stable_sort|partial_sort|nth_element|copy|copy_n|fill|fill_n|transform|accumulate|reduce|find|find_if|count"
ALGORITHMS += "|reverse|unique|shuffle|iota|generate|max_element|min_element|make_unique|make_shared|rand|srand|exit|endl"
HOST_ONLY = {*CONTAINERS.split("|"), *ALGORITHMS.split("|")}
STREAMS = {"cout", "cerr", "cin", "endl"}
C_LIBRARY = "rand|srand|rand_r|random|drand48|exit|_exit|quick_exit|atexit|getenv|system|time|usleep|sleep|gettimeofday"
C_LIBRARY += "|fopen|fclose|fprintf|fputs|puts|putchar|scanf|sprintf|snprintf|fread|fwrite|fflush|atoi|atof|strtol|strcmp"
C_LIBRARY += "|strcpy|strcat|qsort|bsearch|calloc|realloc"
C_LIBRARY = set(C_LIBRARY.split("|"))
BOTH_SIDES = {"assert", "printf", "malloc", "free", "memcpy", "memset", "memmove"}
OF_DEVICE = {"__device__", "__constant__", "__managed__", "__shared__"}
NO_DEVICE_CODE = {"throw", "try", "typeid", "dynamic_cast"}
ATOMIC = "atomic(?:Add|Sub|Exch|Min|Max|Inc|Dec|CAS|And|Or|Xor)"
BUILTIN = re.compile(rf"__syncthreads\w*|__threadfence\w*|__syncwarp|__\w+_sync|{ATOMIC}\w*")
RUNTIME_API = re.compile(r"cuda[A-Z]\w+")
DEVICE_API = {"cudaGridDependencySynchronize", "cudaTriggerProgrammaticLaunchCompletion"}
DEVICE_API |= {"cudaGetErrorString", "cudaGetErrorName"}
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


def refusals(tokens, own, whole):
    """{index of a token: why nvcc refuses it}. `own` are the Sides of the tokens, `whole` those of the program."""
    found = {}
    host_only, device_only, kernels, methods = whole.host_only, whole.device_only, whole.kernels, whole.host_methods
    named = {f.name for f in whole.functions}
    for f in own.functions:
        if f.hidden or f.open == f.close:
            continue
        if "__global__" in f.words and not f.words & {"void", "auto"} and f.free:
            found[f.begin] = f"a kernel that returns something ({f.name}): __global__ functions return void"
        if "__global__" in f.words and f.owner in whole.classes - {""} and "friend" not in f.words:
            found[f.begin] = f"a kernel that is a member ({f.owner}::{f.name}): __global__ functions stand outside classes"
        if f.device and not f.host:
            of_device(tokens, f, host_only, whole, found)
            of_objects(tokens, f, methods, found)
            of_libraries(tokens, f, named, "std" in whole.used, found)
        elif f.only_host:
            of_host(tokens, f, device_only, whole, found)
            of_builtins(tokens, f, named, found)
        of_kernels(tokens, f, kernels, whole, found)
    for initialiser in own.initialisers:
        of_host(tokens, initialiser, device_only, whole, found)
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
            if behind in ("=", ";", ",", ")", "[", "{", "(", ":", ">") and (
                (previous is not None and previous.kind == "word" and before not in ("return", "else", "do", "case", "throw"))
                or (before in ("&", "*", ">") and behind in ("=", ",", ")", "[", ":") and is_of_type(tokens, at, before))
            ):
                names.add(token.text)
            if before == "," and behind in ("=", ";", "[", ","):
                names.add(token.text)
    return names


def is_of_type(tokens, at, before):
    """Whether the & or * in front of a word ends a type, and is not an operator's that begins an expression."""
    opener = skip_blanks(tokens, skip_blanks(tokens, at - 1, -1) - 1, -1)
    return before == ">" or opener < 0 or tokens[opener].kind == "word" or tokens[opener].text in (">", "*", "&")


def is_call(behind):
    return behind in ("(",)


def of_device(tokens, f, host_only, whole, found):
    """What a device function calls or reads of the host's."""
    variables, declared = {name for _, name in whole.variables} - whole.of_device, None
    for at in words_of_body(tokens, f, False):
        word = tokens[at].text
        before, behind, _ = texts_around(tokens, at)
        if before == "::" and word in HOST_ONLY:
            std = skip_blanks(tokens, skip_blanks(tokens, at - 1, -1) - 1, -1)
            if std >= 0 and tokens[std].text == "std" and tokens[skip_blanks(tokens, std - 1, -1)].text != "::":
                found[std] = f"std::{word} in device code, whose functions are the host's (nvcc: calling a __host__ function)"
            continue
        in_namespace = before == "::" and (
            tokens[skip_blanks(tokens, skip_blanks(tokens, at - 1, -1) - 1, -1)].text in whole.namespaces - {"std"}
        )
        if (word not in host_only and word not in variables) or (before in (".", "->", "::") and not in_namespace):
            continue
        declared = declared_in(tokens, f) if declared is None else declared
        if not in_namespace and (word in declared or not whole.sees(f, word)):
            continue
        if word in host_only and is_call(behind):
            found[at] = told_of_call(word)
        elif word in host_only and before in ("=", "(", "&", ",", "{") and behind in (";", ")", ",", "}"):
            found[at] = f"{word} is a function of the host, undefined in device code; declare it __device__"
        elif word in variables and not is_call(behind):
            found[at] = (
                f"{word} is a variable of the host, undefined in device code; declare it __device__, __constant__ or constexpr"
            )


def of_objects(tokens, f, methods, found):
    """What a device function does with objects of classes whose constructors or members are the host's."""
    classes, objects = {owner for owner, _ in methods}, {}
    for at in range(f.begin, f.close):
        token = tokens[at]
        if token.kind != "word":
            continue
        before, behind, _ = texts_around(tokens, at)
        kind_at = skip_blanks(tokens, at - 1, -1)
        kind = tokens[skip_blanks(tokens, kind_at - 1, -1) if before in ("&", "*") else kind_at].text
        if kind in classes and behind in (";", "=", ",", ")", "(", "{", "["):
            objects[token.text] = kind
            is_made = at > f.open and before == kind and behind in (";", "(", "{", ",")
            if is_made and (kind, kind) in methods:
                found[at] = told_of_call(f"the constructor of {kind}")
        elif before in (".", "->") and is_call(behind):
            of = tokens[skip_blanks(tokens, skip_blanks(tokens, at - 1, -1) - 1, -1)].text
            if (objects.get(of), token.text) in methods:
                found[at] = told_of_call(f"{objects[of]}::{token.text}")


def told_of_call(name):
    return (
        f"device code calls {name}, a function of the host: calling a __host__ function from a __device__ or __global__ "
        f"function is not allowed; declare it __device__"
    )


def of_libraries(tokens, f, named, uses_std, found):
    """What a device function uses of the host's libraries and of the language that devices do not have."""
    declared = declared_in(tokens, f)
    for at in words_of_body(tokens, f, False):
        word = tokens[at].text
        before, behind, _ = texts_around(tokens, at)
        if before in (".", "->", "::"):
            continue
        if word == "__device__" and before in (";", "{", "}") and behind != "(":
            found[at] = "a __device__ variable within a function: it has to be declared outside"
        elif word in NO_DEVICE_CODE:
            found[at] = f"{word} in device code, which has neither exceptions nor run-time type information"
        elif word in named or word in declared:
            continue
        elif word in C_LIBRARY and is_call(behind):
            found[at] = told_of_call(word).removesuffix("; declare it __device__")
        elif RUNTIME_API.fullmatch(word) and is_call(behind) and word not in DEVICE_API:
            found[at] = f"device code calls {word}: the emulator has no runtime API there (dynamic parallelism)"
        elif uses_std and word in HOST_ONLY and (word in STREAMS or (behind == "<" and word in CONTAINERS.split("|"))):
            found[at] = f"std::{word} in device code, whose functions are the host's (nvcc: calling a __host__ function)"


def of_builtins(tokens, f, named, found):
    """What a host function calls that only a thread of a kernel can."""
    parts = conditional_parts(tokens[f.open : f.close])
    for at in words_of_body(tokens, f, True):
        word = tokens[at].text
        before, behind, _ = texts_around(tokens, at)
        if any(first < at - f.open < last for first, last in parts):  # as under #ifdef __CUDA_ARCH__
            continue
        if word == "__shared__" and not is_extern(tokens, at):  # of which nvcc only warns
            found[at] = "a __shared__ variable in host code: only threads of a kernel have shared memory"
        elif is_call(behind) and before not in (".", "->", "::") and word not in named and BUILTIN.fullmatch(word):
            found[at] = f"host code calls {word}, a __device__ function: only threads of a kernel can call it"


def is_extern(tokens, at):
    begin = next((i for i in range(at, -1, -1) if tokens[i].text in (";", "{", "}")), 0)
    return any(token.text == "extern" for token in tokens[begin:at])


def of_kernels(tokens, f, kernels, whole, found):
    for at in words_of_body(tokens, f, False):
        before, behind, previous = texts_around(tokens, at)
        is_type_in_front = previous is not None and previous.kind == "word" and before not in ("return", "else", "do")
        is_used = is_call(behind) and before not in (".", "->", "::") and not is_type_in_front
        if tokens[at].text in kernels and is_used and whole.sees(f, tokens[at].text):
            found[at] = f"{tokens[at].text} is a kernel and is called as a function: a launch needs <<<grid, block>>>"


def of_host(tokens, f, device_only, whole, found):
    """What host code calls of the device's, or takes the address of."""
    declared = None
    for at in words_of_body(tokens, f, True):
        word = tokens[at].text
        before, behind, _ = texts_around(tokens, at)
        if word not in device_only or before in (".", "->", "::") or not whole.sees(f, word):
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
            and behind in (";", ")", ",", "}")
            and before in ("=", "(", "&", ",", "{")
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
