"""CUDA text into C++ for the host compiler: launches, shared memory, and what else no header can provide.

Every rewrite keeps the line it stands in, so that the compiler's and the emulator's lines are the text's own.
"""

import collections
import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from . import ptx
from . import sides as sides_of_text
from .builtin_names import rename_own_builtins
from .declarations import KEYWORD, declared_kernel
from .text import (
    CLOSING,
    OPENING,
    RefusedError,
    Token,
    UnsupportedError,
    end_of_directive,
    join_spaced_launches,
    matching,
    matching_back,
    skip_blanks,
    split_at_commas,
    squeezed,
    text_of,
    tokens_of,
)

INCLUDE = Path(__file__).parent / "include"

# Libraries that the emulator has nothing for, but for what is in INCLUDE: naming them beats a page of errors about them.
UNSUPPORTED_HEADERS = re.compile(
    r"cub/|thrust/|cute/|cutlass/|cuda/|nv/|nvfunctional|cublas|cudnn|cufft|curand|cusparse|cusolver|mma\.h$|cuda_fp[468]\.h$"
    r"|cuda_awbarrier|cudaTypedefs|cudaProfiler|cuda_gl_interop|nvrtc|nvtx|nvToolsExt|nvml|nccl|npp|cooperative_groups/(?!reduce\.h|scan\.h)"
)
# Headers of the toolkit that only declare what nvcc, or cuda_runtime.h, declares anyway.
DECLARING_HEADERS = re.compile(
    r"(crt/)?(builtin_types|channel_descriptor|common_functions|cudart_platform|cuda_occupancy|cuda_stdint|cuda_surface_types"
    r"|cuda_texture_types|device_(atomic|double)_functions|device_launch_parameters|device_types|driver_functions|func_macro"
    r"|host_config|host_defines|math_functions|sm_\d\d_(atomic_functions|intrinsics|rt)|storage_class|surface_functions"
    r"|surface_indirect_functions|surface_types|texture_fetch_functions|texture_indirect_functions|texture_types"
    r"|vector_functions|vector_types)\.hp{0,2}"
)
UNSUPPORTED_WORDS = {
    "cudaMipmappedArray_t": "a mipmapped array",
    "block_tile_memory": "tiles of several warps",
    "texCubemap": "a cube map",
    "tex2Dgather": "a texture gather",
}
REMOVED_TEMPLATES = {  # from CUDA 12
    "texture": "a texture reference (texture<...>), which CUDA 12 removed; use a texture object",
    "surface": "a surface reference (surface<...>), which CUDA 12 removed; use a surface object",
}
SPECIFIERS_OF_VARIABLES = {"__device__", "__managed__", "static", "inline"}
NO_VARIABLE = {"const", "constexpr", "__constant__", "__shared__", "struct", "class", "union", "enum", "operator", "__global__"}
DECLARATION_PREFIXES = {"static", "volatile", "const", "extern", "inline", "__device__"}
NO_TYPE = {"else", "do", "return", "goto", "case", "default"}  # words in front of a declaration that are no part of it


# Functions of C's library that C++ overloads: a text may well call its kernel by the same name.
C_LIBRARY = {"abs", "div", "pow", "exp", "log", "sqrt", "cbrt", "hypot", "sin", "cos", "tan", "tanh", "erf"}
C_LIBRARY |= {"floor", "ceil", "round", "fabs", "fmax", "fmin", "fmod"}
# Arrays of run-time size are g++'s, and nvcc takes them on the host alone.
CONSTANT_SIZES = ' _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic error \\"-Wvla\\"") '
ANY_SIZES = ' _Pragma("GCC diagnostic pop") '
ATTRIBUTES = {"alignas", "__align__", "__attribute__"}
# Attribute of a variable of the runtime's that each thread of the process has for itself.
OF_THE_RUNTIME = '__attribute__((tls_model("initial-exec")))'
COMMA = Token(",", "symbol", 0)


@dataclass
class Kernel:
    line: int
    template_parameters: int  # 0: not a template
    parameters: str  # in parentheses
    scope: int  # where the brace around it opens; those of one name in one scope are overloads
    cluster: str = ""  # the arguments of __cluster_dims__
    body_at: int = 0  # the token of the brace that opens the definition's body; 0: it is a declaration
    most_threads: str = ""  # the first argument of __launch_bounds__


@dataclass
class Rewritten:
    text: str
    kernels: dict  # name -> [Kernel], in the order of the text
    uses_torch: bool
    last_include_line: int  # 0: there is none
    waiting_lines: set  # where loops look for what other threads do


class Rewriter:
    """One pass over the tokens; `out` is the text so far, `scopes` says for each open brace whether it holds code."""

    def __init__(self, text, first_line=1, elsewhere=None, program=None, is_own_header=lambda header: False):
        self.tokens = tokens_of(text, first_line)
        join_spaced_launches(self.tokens)
        macros, whole = program or (sides_of_text.macros_with_qualifiers(self.tokens), None)
        self.sides, self.refused = sides_of_text.find(self.tokens, macros, whole)
        self.is_own_header = is_own_header
        self.device_bodies = {f.open: f.close for f in self.sides.functions if f.device and self.may_size_at_run_time(f)}
        rename_own_builtins(self.tokens)
        self.out = []
        self.scopes = []
        own = find_kernels(self.tokens)
        self.kernels = (elsewhere or {}) | own
        self.launch_bounds = {k.body_at: k.most_threads for found in own.values() for k in found if k.most_threads}
        self.uses_torch = False
        self.last_include_line = 0
        self.include_end = 0  # the token behind it
        self.conditions = 0  # the #if and the like that are open
        self.macros = ptx.macros_of(text)
        self.file_scope_shared = set()  # names of `extern __shared__` outside of functions
        self.define_end = 0  # where the #define under way ends

    def run(self):
        handlers = {
            "<<<": self.launch,
            "cudaLaunchKernelEx": self.launch_call,
            "cudaLaunchKernel": self.launch_call,
            "cudaLaunchCooperativeKernel": self.launch_call,
            "__shared__": self.shared,
            "__device__": self.device_variable,
            "__managed__": self.device_variable,
            "__constant__": self.constant_variable,
            "#": self.directive,
            "__noinline__": self.noinline,
            "__forceinline__": self.forced_inline,
            "always_inline": self.always_inline,
            "__always_inline__": self.always_inline,
            "__builtin_memcpy": self.builtin_copy,
            "__builtin_memmove": self.builtin_copy,
            "__builtin_memset": self.builtin_copy,
            "asm": self.asm,
            "__asm__": self.asm,
            "atomicExch": self.exchange,
            "atomicExch_system": self.exchange,
            "atomicExch_block": self.exchange,
            "{": self.open_brace,
            "}": self.close_brace,
        }
        at = 0
        while at < len(self.tokens):
            token = self.tokens[at]
            if token.text in UNSUPPORTED_WORDS and token.kind == "word":
                self.refuse(UnsupportedError(f"{UNSUPPORTED_WORDS[token.text]} ({token.text})", token.line))
            if token.text in REMOVED_TEMPLATES and self.is_removed_template(at):
                self.refuse(UnsupportedError(REMOVED_TEMPLATES[token.text], token.line))
            handler = handlers.get(token.text) if token.kind in ("symbol", "word") else None
            self.at = at
            if at in self.refused:
                self.refuse(RefusedError(self.refused[at], token.line))
            if handler:
                at = self.handled(handler, at)
                for inner in range(self.at + 1, at):
                    if inner in self.refused:
                        self.refuse(RefusedError(self.refused[inner], self.tokens[inner].line))
            else:
                if token.text in self.file_scope_shared:
                    self.address_of_array(at)
                self.out.append(token)
                at += 1
        return Rewritten(text_of(self.out), self.kernels, self.uses_torch, self.last_include_line, waiting_lines(self.tokens))

    def address_of_array(self, at):
        """Drop the & in front of an array that is a pointer here: the array's address is that of its first element."""
        sign = skip_blanks(self.out, len(self.out) - 1, -1)
        of_element = self.tokens[skip_blanks(self.tokens, at + 1)].text == "[" if at + 1 < len(self.tokens) else False
        if sign > 0 and self.out[sign].text == "&" and self.out[sign - 1].text != "&" and not of_element:
            del self.out[sign]

    def may_size_at_run_time(self, f):
        """Whether a function's body has something like `int a[n]`."""
        for at in range(f.open, f.close):
            if self.tokens[at].text == "[" and self.tokens[skip_blanks(self.tokens, at + 1)].kind == "word":
                name = skip_blanks(self.tokens, at - 1, -1)
                kind = self.tokens[skip_blanks(self.tokens, name - 1, -1)]
                if self.tokens[name].kind == "word" and (kind.kind == "word" or kind.text in ("*", ">", "&", ",")):
                    return True
        return False

    def refuse(self, error):
        """Raise an UnsupportedError, or have the compiler do it if the condition around lets it come here."""
        if not self.conditions:
            raise error
        self.out.append(Token(pragma_for(error) + " ", "symbol", error.line))

    def handled(self, handler, at):
        """Return where a handler goes on. In a condition or a macro the compiler refuses what cannot be rewritten."""
        kept = len(self.out)
        before = list(self.out[-64:])
        try:
            return handler(at)
        except UnsupportedError as error:
            if not self.conditions and at >= self.define_end:
                raise
            del self.out[kept - len(before) :]
            self.out += before
            end, depth = at, 0
            limit = self.define_end if at < self.define_end else len(self.tokens)
            while end < limit and not (self.tokens[end].text == ";" and depth <= 0):
                if self.tokens[end].text == "#" and at >= self.define_end:
                    break
                depth += (self.tokens[end].text in OPENING) - (self.tokens[end].text in CLOSING)
                if depth < 0:
                    break
                end += 1
            self.emit(pragma_for(error), self.tokens[at:end])
            return end

    def emit(self, text, replaced):
        """Put `text` in the place of the `replaced` tokens, with as many line ends as they had."""
        first = replaced[0]
        missing = text_of(replaced).count("\n") - text.count("\n")
        self.out.extend(tokens_of(text + ("\\\n" if self.at < self.define_end else "\n") * missing))
        for token in self.out[-1:]:
            token.line = first.line

    # ---- scopes

    def open_brace(self, at):
        words = []
        back = skip_blanks(self.out, len(self.out) - 1, -1)
        while back >= 0 and len(words) < 4 and self.out[back].kind in ("word", "string"):
            words.append(self.out[back].text)
            back = skip_blanks(self.out, back - 1, -1)
        self.scopes.append(not ("namespace" in words or ("extern" in words and '"C"' in words)))
        self.out.append(self.tokens[at])
        if at in self.device_bodies:
            self.out.append(Token(CONSTANT_SIZES, "space", self.tokens[at].line))
        if at in self.launch_bounds:
            self.out.append(Token(f" ::emulator::launch_bounds({self.launch_bounds[at]});", "symbol", self.tokens[at].line))
        return at + 1

    def close_brace(self, at):
        if self.scopes:
            self.scopes.pop()
        self.out.append(self.tokens[at])
        if at in self.device_bodies.values():
            self.out.append(Token(ANY_SIZES, "space", self.tokens[at].line))
        return at + 1

    def in_code(self):
        """Inside a function, or in a macro, which is taken to be used in one."""
        return any(self.scopes) or self.at < self.define_end

    def is_removed_template(self, at):
        """Whether the word, here `texture`, is used as a template that the text itself does not declare."""
        following = skip_blanks(self.tokens, at + 1)
        used = following < len(self.tokens) and self.tokens[following].text == "<"
        return used and self.tokens[at].text not in self.own_names

    @functools.cached_property
    def own_names(self):
        """What the text declares as a class, or names as a member."""
        words = [token.text for token in self.tokens if not token.blank]
        return {word for before, word in itertools.pairwise(words) if before in ("class", "struct", "::", ".")}

    def forced_inline(self, at):
        """A function that is used as a value is called through a pointer somewhere, where GCC refuses to inline it."""
        open_at = next((i for i in range(at, len(self.tokens)) if self.tokens[i].text in ("(", ";", "{")), at)
        while self.tokens[open_at].text == "(" and self.tokens[skip_blanks(self.tokens, open_at - 1, -1)].text in ATTRIBUTES:
            close = matching(self.tokens, open_at)
            open_at = next((i for i in range(close, len(self.tokens)) if self.tokens[i].text in ("(", ";", "{")), at)
        name = self.tokens[skip_blanks(self.tokens, open_at - 1, -1)].text
        before, after = skip_blanks(self.out, len(self.out) - 1, -1), skip_blanks(self.tokens, at + 1)
        is_inline = "inline" in (self.out[before].text.strip("_") if before >= 0 else "", self.tokens[after].text.strip("_"))
        if name in self.functions_as_values:
            self.emit("" if is_inline else "inline", self.tokens[at : at + 1])
        else:
            self.emit("__attribute__((always_inline))" if is_inline else "__forceinline__", self.tokens[at : at + 1])
        return at + 1

    @functools.cached_property
    def functions_as_values(self):
        """Names that stand alone as an argument, as in `reduce(v, add<float>)`, and are not those of variables, too."""
        found, variables = set(), set()
        words = [token for token in self.tokens if not token.blank]
        for at, token in enumerate(words[:-1]):
            if token.kind != "word" or not at:
                continue
            following = at + 1
            if words[following].text == "<" and (end := template_end(words, following)) is not None:
                following = end + 1
            is_argument = following < len(words) and words[following].text in (",", ")", ">")
            if is_argument and words[at - 1].text in ("(", ",", "<", "&", "="):
                found.add(token.text)
            if (
                words[at - 1].kind == "word"
                and words[at - 1].text != "return"
                and words[at + 1].text in ("=", ";", ",", ")", "[", "{", ":")
            ):
                variables.add(token.text)
            if words[at - 1].text in ("*", "&", ",") and words[at + 1].text in ("=", "["):
                variables.add(token.text)
        found -= variables
        return found

    def always_inline(self, at):
        """As an attribute: inlining changes nothing that the emulator promises, and GCC may be unable to."""
        before = skip_blanks(self.out, len(self.out) - 1, -1)
        in_attribute = before >= 0 and self.out[before].text in ("(", ",")
        self.emit("__unused__" if in_attribute else self.tokens[at].text, self.tokens[at : at + 1])
        return at + 1

    def exchange(self, at):
        """As a statement of its own it is a store."""
        before = skip_blanks(self.out, len(self.out) - 1, -1)
        open_at = skip_blanks(self.tokens, at + 1)
        is_call = open_at < len(self.tokens) and self.tokens[open_at].text == "("
        end = skip_blanks(self.tokens, matching(self.tokens, open_at) + 1) if is_call else len(self.tokens)
        previous = self.out[before].text if before >= 0 else ";"
        begins = previous in (";", "{", "}", "else", "do", ":")
        if previous == ")":
            opener = matching_back(self.out, before)
            word = self.out[skip_blanks(self.out, opener - 1, -1)].text
            begins = word in ("if", "for", "while") or squeezed(self.out[opener + 1 : before]) == "void"
        following = self.tokens[end].text if end < len(self.tokens) else ""
        unused = begins and following == ";"
        if following in (")", ",") and previous in (";", ",", "("):
            unused = self.is_for_effect(before)
        name = "emulator_atomic_store" + self.tokens[at].text.removeprefix("atomicExch").removesuffix("_system")
        self.emit(name if unused else self.tokens[at].text, self.tokens[at : at + 1])
        return at + 1

    def is_for_effect(self, at):
        """Whether the bracket around what follows out[at] is a `for`'s, behind its condition, or static_cast<void>'s."""
        depth, semicolons = 0, 0
        while at >= 0 and not (self.out[at].text in OPENING and depth == 0):
            depth += (self.out[at].text in CLOSING) - (self.out[at].text in OPENING)
            semicolons += self.out[at].text == ";" and depth == 0
            at -= 1
        in_front = [token.text for token in self.out[max(0, at - 8) : max(at, 0)] if not token.blank]
        return (in_front[-1:] == ["for"] and semicolons == 2) or in_front[-4:] == ["static_cast", "<", "void", ">"]

    def builtin_copy(self, at):
        """The compiler's own name of memcpy, which nvcc_macros.h cannot replace: the C++ library uses it, too."""
        self.emit(self.tokens[at].text.replace("__builtin_", "emulator_"), self.tokens[at : at + 1])
        return at + 1

    def noinline(self, at):
        before = skip_blanks(self.out, len(self.out) - 1, -1)
        in_attribute = before >= 0 and self.out[before].text in ("(", ",")
        self.emit("__noinline__" if in_attribute else "__attribute__((noinline))", self.tokens[at : at + 1])
        return at + 1

    # ---- preprocessor

    def directive(self, at):
        if at < self.define_end:  # an operator of the macro's body
            self.out.append(self.tokens[at])
            return at + 1
        name_at = skip_blanks(self.tokens, at + 1)
        name = self.tokens[name_at].text if name_at < len(self.tokens) else ""
        end = end_of_directive(self.tokens, name_at)
        line = self.tokens[at:end]
        self.conditions += (name in ("if", "ifdef", "ifndef")) - (name == "endif")
        if name == "include":
            line = self.include(line)
            self.include_end = end
        elif name == "endif" and self.holds_only_directives(self.include_end, at):
            self.last_include_line = line[0].line  # it ends a condition that holds nothing else
        elif name == "pragma":
            return self.pragma(at, end)
        elif name == "define":  # its body may hold what is rewritten elsewhere
            self.define_end = end
            self.out.append(self.tokens[at])
            return at + 1
        self.out.extend(line)
        return end

    def holds_only_directives(self, begin, end):
        while begin < end:
            if self.tokens[begin].text == "#":
                begin = end_of_directive(self.tokens, begin)
            elif not self.tokens[begin].blank:
                return False
            begin += 1
        return True

    def include(self, line):
        """The tokens to put in the place of the line."""
        text = squeezed(line)
        header = re.search(r'[<"](.*)[>"]', text)
        if header and self.is_own_header(header[1]):
            return line
        self.last_include_line = line[0].line
        if not header:
            return line
        if UNSUPPORTED_HEADERS.match(header[1]) and not (INCLUDE / header[1]).is_file():
            return tokens_of(f"// {header[1]}")  # what of it is used is not known to the compiler, and named by it
        if DECLARING_HEADERS.fullmatch(header[1]):
            return tokens_of("#include <cuda_runtime.h>")
        self.uses_torch |= bool(re.match(r"torch/|ATen/|c10/", header[1]))
        return line

    def pragma(self, at, end):
        words = squeezed(self.tokens[at:end]).split()
        unroll = re.fullmatch(r"# ?pragma unroll ?\(?(\d*)\)?", " ".join(words))
        if unroll:
            self.emit(
                f"#pragma GCC unroll {min(int(unroll[1] or 32), 1024)}" if unroll[1] not in ("0", "1") else "",
                self.tokens[at:end],
            )
        else:
            self.out.extend(self.tokens[at:end])
        return end

    # ---- kernel<<<grid, block, shared, stream>>>(arguments)

    def launch(self, at):
        start = self.kernel_expression_start()
        kernel = self.out[start:]
        del self.out[start:]
        end = next((i for i in range(at, len(self.tokens)) if self.tokens[i].text == ">>>"), None)
        if end is None:
            raise UnsupportedError("a launch without >>>", self.tokens[at].line)
        open_at = skip_blanks(self.tokens, end + 1)
        if open_at == len(self.tokens) or self.tokens[open_at].text != "(":
            raise UnsupportedError("a launch without arguments in parentheses", self.tokens[at].line)
        close_at = matching(self.tokens, open_at)
        config = text_of(self.tokens[at + 1 : end])
        arguments = split_at_commas(self.tokens[open_at + 1 : close_at])
        if not squeezed(self.tokens[open_at + 1 : close_at]):
            arguments = []
        for argument in arguments:
            if squeezed(argument).startswith("{"):
                raise UnsupportedError(
                    f"a launch's argument in braces without its type: `{squeezed(argument)}`", argument[0].line
                )
        passed = "".join(", " + ("::emulator::Zero{}" if squeezed(a) in ("0", "NULL") else text_of(a)) for a in arguments)
        name = squeezed(kernel)
        line, key, cluster = self.kernel_identity(kernel, self.tokens[at].line)
        clustered = f".clustered({cluster})" if cluster else ""
        config = f"::emulator::LaunchConfig(::emulator::Line{{__LINE__}}, {config}){clustered}"
        self.emit(
            f"::emulator::launch({self.quoted_name(kernel)}, {line}, {key}, {config}, "
            f"[=](const auto&... emulator_a) {{ {name}(emulator_a...); }}{passed})",
            kernel + self.tokens[at : close_at + 1],
        )
        return close_at + 1

    # ---- cudaLaunchKernelEx(&config, kernel, arguments...) and its relatives

    def launch_call(self, at):
        function, line = self.tokens[at].text, self.tokens[at].line
        open_at = skip_blanks(self.tokens, at + 1)
        if open_at == len(self.tokens) or self.tokens[open_at].text != "(":
            raise UnsupportedError(f"{function} other than as a call", line)
        close_at = matching(self.tokens, open_at)
        arguments = split_at_template_commas(self.tokens[open_at + 1 : close_at])
        extended = function == "cudaLaunchKernelEx"
        if len(arguments) < (2 if extended else 4):
            raise UnsupportedError(f"{function} with {len(arguments)} arguments", line)
        kernel = kernel_named([token for token in arguments.pop(1 if extended else 0) if not token.blank], function)
        name = squeezed(kernel)
        kernel_line, key, cluster = self.kernel_identity(kernel, line)
        identity = f"{self.quoted_name(kernel)}, {kernel_line}"
        rest = ", ".join(text_of(argument).strip() for argument in arguments[1 if extended else 0 :])
        if extended:
            call = f"[=](const auto&... emulator_a) {{ {name}(emulator_a...); }}" + (", " if rest else "") + rest
            config = text_of(arguments[0]).strip()
            text = f"launch_extended({identity}, {key}, {config}, {cluster or 'dim3()'}, {call})"
        else:
            text = f"launch_pointers({identity}, {str('Cooperative' in function).lower()}, {name}, {rest})"
        self.emit("::emulator::" + text, self.tokens[at : close_at + 1])
        return close_at + 1

    def kernel_expression_start(self):
        """Where in `out` the expression in front of <<< begins: a name, qualified, with template arguments perhaps."""
        out = self.out
        at = skip_blanks(out, len(out) - 1, -1)
        if at < 0:
            raise UnsupportedError("a launch without a kernel", 1)
        if out[at].text == ")":
            open_at = matching_back(out, at)
            macro = skip_blanks(out, open_at - 1, -1)  # one that makes the name, as CAT(add_, TYPE)
            return macro if macro >= 0 and out[macro].text in self.macros else open_at
        if out[at].text in (">", ">>>"):
            depth = 0
            while at >= 0:
                text = out[at].text
                if text in CLOSING:
                    at = matching_back(out, at)
                elif text in (">", ">>>"):
                    depth += len(text)
                elif text == "<":
                    depth -= 1
                at -= 1
                if depth == 0:
                    break
            at = skip_blanks(out, at, -1)
        if at < 0 or out[at].kind != "word":
            raise UnsupportedError("a launch of something other than a named kernel", out[max(at, 0)].line)
        while at >= 2 and out[at - 1].text == "::" and out[at - 2].kind == "word":
            at -= 2
        while pasted := self.pasted_in_front(at):  # name##_kernel, in a macro
            at = pasted
        if at >= 1 and out[at - 1].text == "::":
            at -= 1
        return at

    def pasted_in_front(self, at):
        """Where what `##` pastes in front of the word at out[at] begins; None where there is no such thing."""
        second = skip_blanks(self.out, at - 1, -1)
        first = skip_blanks(self.out, second - 1, -1) if second >= 0 and self.out[second].text == "#" else -1
        word = skip_blanks(self.out, first - 1, -1) if first >= 0 and self.out[first].text == "#" else -1
        return word if word >= 0 and self.out[word].kind == "word" else None

    def kernels_named(self, expression):
        """(the kernels that the expression may name, how many template arguments it gives); None: it is no such name."""
        words = [token for token in expression if not token.blank]
        head = words
        if any(token.text == "<" for token in words):
            head = words[: next(i for i, token in enumerate(words) if token.text == "<")]
        inner = words[len(head) + 1 : -1]
        return self.kernels.get(head[-1].text) if head else None, len(split_at_commas(inner)) if inner else 0

    def quoted_name(self, expression):
        """The kernel's name as a C++ string. In front of what is none, a pointer's name for example, stands a question mark."""
        known, _ = self.kernels_named(expression)
        name = squeezed(expression).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{name}"' if known else f'"?{name}"'

    def kernel_identity(self, expression, launch_line):
        """The line of the kernel's definition, an expression for its address or nullptr, and one for its cluster.

        What is no name of a kernel has the launch's line.
        """
        known, given = self.kernels_named(expression)
        if known is None:
            key = squeezed(expression) if expression[0].text != "(" else "nullptr"
            clusters = [f'{{"{name}", dim3({k.cluster})}}' for name, found in self.kernels.items() for k in found if k.cluster]
            key = f"::emulator::kernel_key({key})"
            of_pointer = f"::emulator::cluster_of({key}, {{{', '.join(clusters)}}})"
            return launch_line, key, of_pointer if clusters else ""
        kernel = next((kernel for kernel in reversed(known) if kernel.line <= launch_line), known[0])
        overloaded = len({other.parameters for other in known if other.scope == kernel.scope}) > 1
        has_address = given >= kernel.template_parameters and not overloaded
        address = squeezed(expression)
        key = f"::emulator::key_of([&](auto take) -> decltype(take({address})) {{ return take({address}); }})"
        if not kernel.template_parameters and self.is_a_function_too(expression[-1].text, len(known)):
            key = f"::emulator::kernel_key((void (*){kernel.parameters}){address})"
            has_address = has_address and "=" not in kernel.parameters
        return (
            kernel.line,
            key if has_address else "::emulator::kernel_key(nullptr)",
            f"dim3({kernel.cluster})" if kernel.cluster else "",
        )

    def is_a_function_too(self, name, kernels):
        """Whether other functions have the kernel's name, as the one that launches it may, so that its address is ambiguous."""
        return name in C_LIBRARY or self.declared_functions[name] > kernels

    @functools.cached_property
    def declared_functions(self):
        """How often each name stands between a type and a parenthesis."""
        words = [token for token in self.tokens if not token.blank]
        return collections.Counter(
            name.text
            for kind, name, behind in zip(words, words[1:], words[2:], strict=False)
            if name.kind == kind.kind == "word" and behind.text == "(" and kind.text not in NO_TYPE
        )

    # ---- asm volatile("..." : outputs : inputs : clobbers);

    def asm(self, at):
        open_at = skip_blanks(self.tokens, at + 1)
        while self.tokens[open_at].text in ("volatile", "__volatile__"):
            open_at = skip_blanks(self.tokens, open_at + 1)
        if self.tokens[open_at].text != "(":
            raise UnsupportedError("an asm statement without parentheses", self.tokens[at].line)
        close_at = matching(self.tokens, open_at)
        if any(f.open < at < f.close and not f.device and not f.hidden for f in self.sides.functions):
            self.out.extend(self.tokens[at : close_at + 1])  # the host's own instructions
            return close_at + 1
        end = skip_blanks(self.tokens, close_at + 1)
        translated = ptx.translate(self.tokens[open_at + 1 : close_at], self.macros, self.tokens[at].line)
        has_semicolon = end < len(self.tokens) and self.tokens[end].text == ";"
        last = end if has_semicolon else close_at
        self.emit(translated if has_semicolon else translated.rstrip(";"), self.tokens[at : last + 1])
        return last + 1

    # ---- __shared__ T a[2][3], b;   extern __shared__ T c[];

    def shared(self, at):
        prefix_start = self.shared_prefix_start()
        prefix = self.out[prefix_start:]
        del self.out[prefix_start:]
        end = at
        depth = 0
        limit = self.define_end if at < self.define_end else len(self.tokens)  # a macro's body may lack the semicolon
        while end < limit and not (self.tokens[end].text == ";" and depth == 0):
            depth += (self.tokens[end].text in OPENING) - (self.tokens[end].text in CLOSING)
            end += 1
        following = min(end + 1, limit)
        everything = prefix + self.tokens[at:following]
        line = self.tokens[at].line
        if end == len(self.tokens):
            raise UnsupportedError("a __shared__ that declares nothing", line)
        specifiers = {token.text for token in prefix if token.kind == "word"}
        declaration, alignment, words = self.without_alignment(prefix + self.tokens[at + 1 : end])
        specifiers |= words & {"extern", "volatile"}
        declaration = [t for t in declaration if t.text not in ("extern", "static", "__device__", "__shared__")]
        variables = declared_variables(declaration, line)
        if "extern" in specifiers:
            text = self.dynamic_shared(variables, line)
        else:
            text = "".join(self.static_shared(variable, alignment, line) for variable in variables)
        self.emit(text, everything)
        return following

    # ---- __device__ T a[2] = {1, 2}, b;

    def device_variable(self, at):
        """A variable in device memory lives among the tensors, under the same checks. Constants stay what they are."""
        end = None if at < self.define_end else variable_end(self.tokens, at)
        prefix_start = self.shared_prefix_start() if end else len(self.out)
        prefix = self.out[prefix_start:]
        declaration = [t for t in prefix + self.tokens[at : end or at] if t.text not in SPECIFIERS_OF_VARIABLES]
        managed = any(token.text == "__managed__" for token in [*prefix, *self.tokens[at : end or at]])
        kept = any(token.text in ("const", "extern", "__constant__") for token in declaration)
        if not end or kept or self.follows_template(prefix_start) or any(self.scopes):
            self.out.append(self.tokens[at])
            return at + 1
        del self.out[prefix_start:]
        declaration, alignment, _ = self.without_alignment(declaration)
        parts = [split_at_initialiser(part) for part in split_at_template_commas(declaration)]
        line = self.tokens[at].line
        variables = declared_variables([token for head, _ in parts for token in [*head, COMMA]][:-1], line)
        text = ""
        for variable, (_, initial) in zip(variables, parts, strict=True):
            name, first = variable.name, f"emulator_initial_{variable.name}"
            aligned = f"alignas({alignment}) " if alignment else ""
            text += (
                f"{aligned}static {variable.kind} {first}{variable.dimensions}{text_of(initial)}; "
                f"static decltype({first})& {name} = *(decltype({first})*)"
                f'::emulator::device_variable((const void*)&{first}, sizeof {first}, "{name}", {str(managed).lower()}); '
            )
        self.emit(text, prefix + self.tokens[at : end + 1])
        return end + 1

    def constant_variable(self, at):
        """A variable in constant memory stays what it is; check mode is told of it, unless C++ keeps it from being written."""
        self.out.append(self.tokens[at])
        prefix_start = self.shared_prefix_start()
        prefix = self.out[prefix_start:]
        is_one = at >= self.define_end and not self.follows_template(prefix_start) and not any(self.scopes)
        end = variable_end(self.tokens, at + 1) if is_one else None
        words = {token.text for token in [*prefix, *self.tokens[at + 1 : end or at + 1]]}
        if not end or words & {"extern", "const", "constexpr"}:
            return at + 1
        declaration, _, _ = self.without_alignment([*prefix, *self.tokens[at + 1 : end]])
        declaration = [t for t in declaration if t.text not in SPECIFIERS_OF_VARIABLES | {"__constant__", "__managed__"}]
        heads = [split_at_initialiser(part)[0] for part in split_at_template_commas(declaration)]
        try:
            variables = declared_variables([token for head in heads for token in [*head, COMMA]][:-1], self.tokens[at].line)
        except UnsupportedError:  # C++ understands it all the same
            return at + 1
        self.out.extend(self.tokens[at + 1 : end + 1])
        for name in (variable.name for variable in variables):
            noted = f' static const ::emulator::ConstantVariable emulator_constant_{name}(&{name}, sizeof {name}, "{name}");'
            self.out.append(Token(noted, "symbol", self.tokens[end].line))
        return end + 1

    def follows_template(self, start):
        """Whether what begins at out[start] stands behind `template<...>`, or begins with it."""
        if start < len(self.out) and self.out[start].text == "template":
            return True
        close = skip_blanks(self.out, start - 1, -1)
        open_at = template_start(self.out, close) if close >= 0 and self.out[close].text == ">" else None
        return open_at is not None and self.out[skip_blanks(self.out, open_at - 1, -1)].text == "template"

    def shared_prefix_start(self):
        """Specifiers that stand before __shared__ have been put out already; where do they begin?"""
        start = len(self.out)
        at = skip_blanks(self.out, start - 1, -1)
        while at >= 0:
            token = self.out[at]
            same_line = not any("\n" in between.text for between in self.out[at:start])
            of_type = token.text in ("*", "::") or (token.kind == "word" and token.text not in NO_TYPE)
            if token.text in DECLARATION_PREFIXES or (of_type and same_line):
                start = at
            elif token.text == ">" and same_line and (open_at := template_start(self.out, at)) is not None:
                start = at = open_at
            elif token.text == ")":
                open_at = matching_back(self.out, at)
                word_at = skip_blanks(self.out, open_at - 1, -1)
                if word_at < 0 or self.out[word_at].text not in ATTRIBUTES:
                    break
                start = at = word_at
            else:
                break
            at = skip_blanks(self.out, at - 1, -1)
        return start

    def without_alignment(self, tokens):
        """The declaration without alignas(...) and the like, their argument, and the words that remain."""
        rest, alignment, at = [], None, 0
        while at < len(tokens):
            if tokens[at].text in ATTRIBUTES:
                open_at = skip_blanks(tokens, at + 1)
                close_at = matching(tokens, open_at)
                inner = squeezed(tokens[open_at + 1 : close_at])
                attribute = re.search(r"aligned\s*\((.*)\)\s*\)?$", inner)
                alignment = attribute[1].rstrip(") ") if attribute else inner
                at = close_at + 1
            else:
                rest.append(tokens[at])
                at += 1
        return rest, alignment, {token.text for token in rest}

    def dynamic_shared(self, variables, line):
        bracket = re.fullmatch(r"\[\s*\](.*)", variables[0].dimensions) if len(variables) == 1 else None
        if not bracket:
            raise UnsupportedError("an extern __shared__ declaration other than `T name[]`", line)
        kind, name, inner = variables[0].kind, variables[0].name, bracket[1]
        once = f"extern {kind} emulator_dynamic_{name}[]; "  # g++ refuses a second type under one name
        if not self.in_code():
            # A pointer of the runtime's, which points to the memory of the block that runs, under this name and type.
            self.file_scope_shared.add(name)
            declared = f"{kind} (* const {name}){inner}" if inner else f"{kind}* const {name}"
            return f'{once}extern __thread {declared} __asm__("emulator_dynamic_shared") {OF_THE_RUNTIME};'
        if inner:
            row = f"emulator_row_{name}"
            return f"typedef {kind} {row}{inner}; {row}* {name} = ({row}*)::emulator::dynamic_shared();"
        return f"{once}{kind}* {name} = ({kind}*)::emulator::dynamic_shared();"

    def static_shared(self, variable, alignment, line):
        name = variable.name
        if not self.in_code():
            kind, aligned = f"emulator_type_{name}", alignment or "0"
            return (
                f"typedef {variable.kind} {kind}{variable.dimensions}; "
                f'static const ::emulator::FileShared<{kind}> {name}{{{aligned}, "{name}", __LINE__}}; '
            )
        kind, declaration = f"emulator_type_{name}", f"emulator_declaration_{name}"
        # Where the size is none that the compiler knows, it says so of this name (diagnostics.py).
        constant = f"static char emulator_constant_size_of_{name}[sizeof({kind})]; " if variable.dimensions else ""
        return (
            f"typedef {variable.kind} {kind}{variable.dimensions}; {constant}static ::emulator::SharedDeclaration {declaration}"
            f'{{sizeof({kind}), {alignment or f"alignof({kind})"}, "{name}", __LINE__}}; '
            f"{kind}& {name} = *({kind}*)::emulator::shared_variable(&{declaration}); "
        )


def pragma_for(error):
    """A pragma by which the compiler says what an UnsupportedError does."""
    told = error.told.removeprefix("error: ").replace("\\", "").replace('"', "'").replace("\n", " ")
    return f'_Pragma("GCC error \\"{told}\\"")'


@dataclass
class Variable:
    """Of a declaration: `int* a[2]` has the type `int*` and the dimensions `[2]`."""

    kind: str
    name: str
    dimensions: str


def declared_variables(tokens, line):
    """The variables of a declaration of plain variables, pointers and arrays."""
    found, base = [], ""
    for index, part in enumerate(split_at_template_commas(tokens)):
        text = squeezed(part)
        match = re.fullmatch(r"(.*?)((?:\* ?(?:const\b|volatile\b|__restrict__\b)? ?)*)([A-Za-z_]\w*) ?((?:\[.*\])?)", text)
        if not match or (index == 0) != bool(match[1].strip()) or "=" in text:
            raise UnsupportedError(f"the shared declaration `{text}`", line)
        base = base or match[1].strip()
        found.append(Variable(base + match[2].strip(), match[3], match[4]))
    return found


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


def variable_end(tokens, at):
    """The index of the semicolon that ends the declaration of a variable; None for that of a function or of anything else."""
    k = at
    while k < len(tokens) and tokens[k].text not in ("=", "[", "{", ";", ","):
        if tokens[k].text in ATTRIBUTES:
            k = matching(tokens, skip_blanks(tokens, k + 1))
        elif tokens[k].text == "(" or tokens[k].text in NO_VARIABLE:
            return None
        elif tokens[k].text == "<":
            depth = 0
            while k < len(tokens) and (depth := depth + (tokens[k].text == "<") - tokens[k].text.count(">")) > 0:
                k += 1
        k += 1
    while k < len(tokens) and tokens[k].text != ";":
        k = matching(tokens, k) + 1 if tokens[k].text in OPENING else k + 1
    return k if k < len(tokens) else None


def split_at_initialiser(tokens):
    """(declarator, what follows it from = or { on)"""
    depth = 0
    for k, token in enumerate(tokens):
        if depth == 0 and token.text in ("=", "{"):
            return tokens[:k], tokens[k:]
        depth += (token.text in ("[", "(")) - (token.text in ("]", ")"))
    return tokens, []


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


def waiting_lines(tokens):
    """The lines of loops that look for a change: conditions that read memory, and bodies that write none."""
    words = [token for token in tokens if not token.blank]
    volatiles = {
        words[i].text
        for i in range(1, len(words))
        if words[i].kind == "word" and "volatile" in {token.text for token in words[max(0, i - 5) : i]}
    }
    lines = set()

    def note(begin, end):
        lines.update(token.line for token in words[begin:end])

    def reads_memory(begin, end):
        return any(token.text in ("[", "*", "->", "(") or token.text in volatiles for token in words[begin:end])

    def writes_memory(begin, end):
        for i in range(begin, end):
            if words[i].text in ("]", ")") and i + 1 < end:
                behind = "".join(token.text for token in words[i + 1 : i + 4])
                if re.match(r"=(?!=)|(?:[-+*/%&|^]|<<|>>)=|\+\+|--", behind):
                    return True
            if words[i].text == "*" and words[i - 1].text in (";", "{", "}", ")") and i + 2 < end and words[i + 2].text == "=":
                return True
        return False

    for at, token in enumerate(words):
        if token.text not in ("while", "for", "do", "if") or token.kind != "word" or at + 1 >= len(words):
            continue
        try:
            if token.text == "do":
                body_end = matching(words, at + 1) if words[at + 1].text == "{" else at + 1
                if not writes_memory(at + 1, body_end):
                    note(at + 1, body_end)
                continue
            if words[at + 1].text != "(":
                continue
            close = matching(words, at + 1)
        except UnsupportedError:
            continue
        behind = words[close + 1].text if close + 1 < len(words) else ";"
        if token.text == "if":
            if behind == "break" or (words[close + 1 : close + 3] and words[close + 2].text == "break" and behind == "{"):
                note(at, close)
            continue
        if token.text == "for" and words[close - 1].text != ";":
            continue
        if not reads_memory(at + 2, close) and behind != "{":
            continue
        if reads_memory(at + 2, close):
            note(at, close)
        if behind == "{":
            body_end = matching(words, close + 1)
            if not writes_memory(close + 1, body_end):
                note(close + 1, body_end)
    return lines


def kernel_named(tokens, function):
    """The name in the expression for a kernel: without a cast in front of it and an &."""
    if tokens and tokens[0].text == "(" and tokens[-1].text != ")":
        tokens = tokens[matching(tokens, 0) + 1 :]
    elif len(tokens) > 1 and tokens[0].text == "reinterpret_cast":
        tokens = tokens[next(i for i, token in enumerate(tokens) if token.text == "(") + 1 : -1]
    if tokens and tokens[0].text == "&":
        tokens = tokens[1:]
    if not tokens or (tokens[0].kind != "word" and tokens[0].text != "::"):
        raise UnsupportedError(f"{function} of something other than a named kernel", tokens[0].line if tokens else 1)
    return tokens


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


def rewrite(text, first_line=1, elsewhere=None, **others):
    """The text for the host compiler. `first_line` is the number of its first line, and `elsewhere` are kernels of other files
    that it may launch, as in Rewritten.kernels. `others` are further arguments of Rewriter."""
    return Rewriter(text, first_line, elsewhere, **others).run()
