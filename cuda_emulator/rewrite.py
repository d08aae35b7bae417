"""CUDA text into C++ for the host compiler: launches, shared memory, and what else no header can provide.

Every rewrite keeps the line it stands in, so that the compiler's and the emulator's lines are the text's own.
"""

import functools
import itertools
from dataclasses import dataclass

from . import ptx, refusals
from .builtin_names import rename_own_builtins
from .declarations import find_kernels
from .rewrite_directives import Directives, macros_of
from .rewrite_functions import Functions
from .rewrite_launches import Launches
from .rewrite_variables import Variables
from .sides import macros_with_qualifiers
from .text import (
    CLOSING,
    OPENING,
    RefusedError,
    Token,
    UnsupportedError,
    join_spaced_launches,
    matching,
    skip_blanks,
    text_of,
    tokens_of,
)
from .waiting import waiting_lines

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
# Arrays of run-time size are g++'s, and nvcc takes them on the host alone.
CONSTANT_SIZES = ' _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic error \\"-Wvla\\"") '
ANY_SIZES = ' _Pragma("GCC diagnostic pop") '


@dataclass
class Rewritten:
    text: str
    kernels: dict  # name -> [Kernel], in the order of the text
    uses_torch: bool
    last_include_line: int  # 0: there is none
    waiting_lines: set  # where loops look for what other threads do


class Rewriter(Launches, Variables, Functions, Directives):
    """One pass over the tokens; `out` is the text so far, `scopes` says for each open brace whether it holds code."""

    def __init__(self, text, first_line=1, elsewhere=None, program=None, is_own_header=lambda header: False):
        self.tokens = tokens_of(text, first_line)
        join_spaced_launches(self.tokens)
        macros, whole = program or (macros_with_qualifiers(self.tokens), None)
        self.sides, self.refused = refusals.find(self.tokens, macros, whole)
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
        self.macros = macros_of(text)
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


def pragma_for(error):
    """A pragma by which the compiler says what an UnsupportedError does."""
    told = error.told.removeprefix("error: ").replace("\\", "").replace('"', "'").replace("\n", " ")
    return f'_Pragma("GCC error \\"{told}\\"")'


def rewrite(text, first_line=1, elsewhere=None, **others):
    """The text for the host compiler. `first_line` is the number of its first line, and `elsewhere` are kernels of other files
    that it may launch, as in Rewritten.kernels. `others` are further arguments of Rewriter."""
    return Rewriter(text, first_line, elsewhere, **others).run()
