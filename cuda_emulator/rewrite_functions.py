"""Functions that are inlined, called by a name of the compiler's, or called for their effect."""

import functools

from .text import CLOSING, OPENING, matching, matching_back, skip_blanks, squeezed, template_end

ATTRIBUTES = {"alignas", "__align__", "__attribute__"}


class Functions:
    """The part of Rewriter for how functions are declared and called."""

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
