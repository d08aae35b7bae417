"""What nvcc refuses because a function or variable is the host's, or the device's.

Only what is certain is refused. The compiler decides on a name that is declared for both sides or within an #if, on a qualifier
hidden in an unknown macro, and on members of objects whose class is not named beside them.
"""

import re

from .sides import Sides, conditional_parts, sides_of
from .text import CLOSING, OPENING, UnsupportedError, end_of_directive, matching, skip_blanks

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
NO_DEVICE_CODE = {"throw", "try", "typeid", "dynamic_cast"}
ATOMIC = "atomic(?:Add|Sub|Exch|Min|Max|Inc|Dec|CAS|And|Or|Xor)"
BUILTIN = re.compile(rf"__syncthreads\w*|__threadfence\w*|__syncwarp|__\w+_sync|{ATOMIC}\w*")
RUNTIME_API = re.compile(r"cuda[A-Z]\w+")
DEVICE_API = {"cudaGridDependencySynchronize", "cudaTriggerProgrammaticLaunchCompletion"}
DEVICE_API |= {"cudaGetErrorString", "cudaGetErrorName"}


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
        if word in host_only and behind == "(":
            found[at] = told_of_call(word)
        elif word in host_only and before in ("=", "(", "&", ",", "{") and behind in (";", ")", ",", "}"):
            found[at] = f"{word} is a function of the host, undefined in device code; declare it __device__"
        elif word in variables and behind != "(":
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
        elif before in (".", "->") and behind == "(":
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
        elif word in C_LIBRARY and behind == "(":
            found[at] = told_of_call(word).removesuffix("; declare it __device__")
        elif RUNTIME_API.fullmatch(word) and behind == "(" and word not in DEVICE_API:
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
        elif behind == "(" and before not in (".", "->", "::") and word not in named and BUILTIN.fullmatch(word):
            found[at] = f"host code calls {word}, a __device__ function: only threads of a kernel can call it"


def is_extern(tokens, at):
    begin = next((i for i in range(at, -1, -1) if tokens[i].text in (";", "{", "}")), 0)
    return any(token.text == "extern" for token in tokens[begin:at])


def of_kernels(tokens, f, kernels, whole, found):
    for at in words_of_body(tokens, f, False):
        before, behind, previous = texts_around(tokens, at)
        is_type_in_front = previous is not None and previous.kind == "word" and before not in ("return", "else", "do")
        is_used = behind == "(" and before not in (".", "->", "::") and not is_type_in_front
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
        if behind == "(":
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
