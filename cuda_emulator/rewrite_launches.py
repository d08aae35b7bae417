"""Launches: kernel<<<...>>>(...), cudaLaunchKernelEx and its relatives."""

import collections
import functools

from .text import (
    CLOSING,
    UnsupportedError,
    matching,
    matching_back,
    skip_blanks,
    split_at_commas,
    split_at_template_commas,
    squeezed,
    text_of,
)

NO_TYPE = {"else", "do", "return", "goto", "case", "default"}  # words in front of a declaration that are no part of it


# Functions of C's library that C++ overloads: a text may well call its kernel by the same name.
C_LIBRARY = {"abs", "div", "pow", "exp", "log", "sqrt", "cbrt", "hypot", "sin", "cos", "tan", "tanh", "erf"}
C_LIBRARY |= {"floor", "ceil", "round", "fabs", "fmax", "fmin", "fmod"}


class Launches:
    """The part of Rewriter that makes calls of launches."""

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
            clusters = [f'{{"{name}", dim3({k.cluster})}}' for name, found in self.kernels.items() for k in found if k.cluster]
            key = key_of(expression)  # a pointer, or what a macro is given: a name that several kernels have, perhaps
            of_pointer = f"::emulator::cluster_of({key}, {{{', '.join(clusters)}}})"
            return launch_line, key, of_pointer if clusters else ""
        kernel = next((kernel for kernel in reversed(known) if kernel.line <= launch_line), known[0])
        overloaded = len({other.parameters for other in known if other.scope == kernel.scope}) > 1
        has_address = given >= kernel.template_parameters and not overloaded
        key = key_of(expression)
        if not kernel.template_parameters and self.is_a_function_too(expression[-1].text, len(known)):
            key = f"::emulator::kernel_key((void (*){kernel.parameters}){squeezed(expression)})"
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


def key_of(expression):
    """A C++ expression for the address of the kernel, nullptr where several have the name."""
    address = squeezed(expression)
    return f"::emulator::key_of([&](auto take) -> decltype(take({address})) {{ return take({address}); }})"


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
