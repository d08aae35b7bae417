"""Variables in shared, device and constant memory."""

import re
from dataclasses import dataclass

from .text import (
    CLOSING,
    OPENING,
    Token,
    UnsupportedError,
    matching,
    matching_back,
    skip_blanks,
    split_at_template_commas,
    squeezed,
    template_start,
    text_of,
)

SPECIFIERS_OF_VARIABLES = {"__device__", "__managed__", "static", "inline"}
NO_VARIABLE = {"const", "constexpr", "__constant__", "__shared__", "struct", "class", "union", "enum", "operator", "__global__"}
DECLARATION_PREFIXES = {"static", "volatile", "const", "extern", "inline", "__device__"}
NO_TYPE = {"else", "do", "return", "goto", "case", "default"}  # words in front of a declaration that are no part of it
ATTRIBUTES = {"alignas", "__align__", "__attribute__"}
# Attribute of a variable of the runtime's that each thread of the process has for itself.
OF_THE_RUNTIME = '__attribute__((tls_model("initial-exec")))'
COMMA = Token(",", "symbol", 0)


class Variables:
    """The part of Rewriter that places variables."""

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
        self.emit(text, prefix + self.tokens[at:following])
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
                f'::emulator::device_variable((const void*)&{first}, sizeof {first}, "{name}", {str(managed).lower()}, '
                f"::emulator::shape_of<decltype({first})>()); "
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
            return f"typedef {kind} {row}{inner}; {row}* {name} = ({row}*)::emulator::dynamic_shared(nullptr, 0);"
        return f'{once}{kind}* {name} = ({kind}*)::emulator::dynamic_shared("{name}", sizeof({kind}));'

    def address_of_array(self, at):
        """Drop the & in front of an array that is a pointer here: the array's address is that of its first element."""
        sign = skip_blanks(self.out, len(self.out) - 1, -1)
        of_element = self.tokens[skip_blanks(self.tokens, at + 1)].text == "[" if at + 1 < len(self.tokens) else False
        if sign > 0 and self.out[sign].text == "&" and self.out[sign - 1].text != "&" and not of_element:
            del self.out[sign]

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
            f'{{sizeof({kind}), {alignment or f"alignof({kind})"}, "{name}", __LINE__, ::emulator::shape_of<{kind}>()}}; '
            f"{kind}& {name} = *({kind}*)::emulator::shared_variable(&{declaration}); "
        )


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
